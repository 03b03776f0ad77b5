"""`generate` with a cache of prefixes under it."""

from __future__ import annotations

import logging
from types import TracebackType
from typing import Any

from hicache.core.identity import Adapter
from hicache.errors import ConfigError
from hicache_transformers.arguments import (
    beside_a_cache,
    check_arguments,
    inferred_padding,
    padding_behind,
    repeats,
)
from hicache_transformers.convert import PageShape
from hicache_transformers.counters import Counters, Statistics
from hicache_transformers.identity import identify
from hicache_transformers.model import describe_model, plain_model
from hicache_transformers.opening import open_connected, open_embedded
from hicache_transformers.prefix import Engine, PagesLost, Prefix, begin
from hicache_transformers.rows import Bypass, read_rows
from hicache_transformers.sources import PageSource, Separation
from hicache_transformers.storing import takes_prompts_as_given
from hicache_transformers.versions import outside_the_range
from hicache_transformers.watch import ModelWatch

__all__ = ["PrefixCache"]

_log = logging.getLogger("hicache.transformers")


class PrefixCache:
    """Keeps what a transformers model computed of prompts, and does not compute it again. A context manager.

    Calls may come from several threads at once, as far as the model itself may be called so. The cache never raises
    into `generate`: what does not work is computed, and counted (`statistics`). A forked child must not use it.

    Args:
        model: a decoder-only model with full attention (MHA, GQA, MQA) in evaluation mode, loaded and on its device.
        storage: URL of what outlives the process, such as "file:///var/cache/hicache?capacity=100GiB"; None: none.
        host: size of the tier in main memory, such as "8GiB"; by default 1 GiB.
        device: size of the tier that calls read from and write to: in the GPU's memory where all of the model is on
            one, else in main memory too; by default 256 MiB. One prompt is reused up to this size.
        address: of a service (`hicache serve`) that keeps the pages instead; then `storage` and `host` are its
            business, and `device` is memory on the model's GPU through which pages pass.
        page_size: tokens a page, the unit of reuse: up to so many tokens behind the last whole page are computed
            again.
        name: name under which pages are shared; by default where the model was loaded from.
        revision: commit or digest of the weights; by default that of the model's folder, of what is in memory where
            that is something else, or of the hub.
        numerics: which kernels may share pages; by default `transformers/ATTENTION/DTYPE`. Engines that are given the
            same text share pages: say so only where their results may be mixed.
        tenant: whose pages these are, unless a call says otherwise.
        head_group: kv heads an object of storage; engines that share pages at several TP sizes must agree on it.
        layer_partition: layers an object.
        deadline: seconds that a call waits for pages of lower tiers; by default as `hicache.open` decides.
        options: further options of `hicache.open`, or of `hicache.connect` where there is an address.

    Attributes:
        cache: the cache below: `hicache.EmbeddedCache`, or `hicache.ConnectedCache`.
        namespace: names its pages.
        warnings: what works but deserves a word; said in the log too, a line each.

    Raises:
        ConfigError: a model whose pages cannot be reused, or settings that do not work; says what to change.
        StorageError: storage cannot be reached.
    """

    def __init__(
        self,
        model: Any,
        *,
        storage: Any = None,
        host: str | int | None = None,
        device: str | int | None = None,
        address: str | None = None,
        page_size: int = 16,
        name: str | None = None,
        revision: str | None = None,
        numerics: str | None = None,
        tenant: str | None = None,
        head_group: int | None = None,
        layer_partition: int | None = None,
        deadline: float | None = None,
        **options: Any,
    ) -> None:
        model = plain_model(model)
        self._model = model
        self._shape = describe_model(model)
        self.namespace, found = identify(
            model,
            self._shape,
            page_size=page_size,
            name=name,
            revision=revision,
            numerics=numerics,
            head_group=head_group,
            layer_partition=layer_partition,
        )
        self._pages = PageShape(
            layers=self._shape.layers,
            kv_heads=self._shape.kv_heads,
            head_group=head_group or self._shape.kv_heads,
            tokens=self.namespace.page_size,
            row=self._shape.head_dim * self._shape.dtype.itemsize,
        )
        self._watch = ModelWatch(model)
        self.warnings: list[str] = []
        for warning in (*outside_the_range(), *found):
            self._warn(warning)
        self._counters = Counters()
        self._tenant = tenant
        self._deadline = deadline
        self._closed = False
        self._source = self._open(storage, host, device, address, options)
        self._engine = Engine(model, self._shape, self._pages, self._source, self._counters)
        self.cache = self._source.cache

    def generate(
        self,
        inputs: Any = None,
        generation_config: Any = None,
        *further: Any,
        adapter: Adapter | None = None,
        tenant: str | None = None,
        salt: str | None = None,
        **arguments: Any,
    ) -> Any:
        """`model.generate`, with the same arguments and the same result, computing only what the cache lacks.

        Calls that would not give the same with a cache (beam search, assisted decoding, static caches, embeddings as
        input, ...) go past it, with the reason in `statistics().bypassed`.

        Args:
            inputs: token ids `(batch, tokens)`, padded on the left; or give `input_ids`.
            generation_config: as for `model.generate`.
            further: as for `model.generate`; a call that gives more than two arguments by place goes past the cache.
            adapter: which adapter's weights are active, by name and digest; without a digest the call goes past the
                cache. A model with adapters is not looked up without it.
            tenant: whose pages; by default the cache's.
            salt: a further separation.
            arguments: as for `model.generate`.

        Raises:
            Whatever `model.generate` raises.
        """
        generate = self._model.generate
        # As the caller wrote it: wrappers around models differ in what they take by place.
        placed: tuple[Any, ...] = (inputs, generation_config, *further)
        while placed and placed[-1] is None:
            placed = placed[:-1]
        ids = arguments.get("input_ids") if inputs is None else inputs
        whose = Separation(adapter, tenant or self._tenant, salt)
        # What has been streamed cannot be taken back, so pages are waited for there.
        layered = arguments.get("streamer") is None
        prefix = self._begin(ids, generation_config, arguments, whose, further=further, layered=layered, early=True)
        if prefix is None:
            return generate(*placed, **arguments)
        try:
            result = generate(*placed, past_key_values=prefix.past_key_values, **beside_a_cache(arguments))
        except PagesLost:  # in the first forward pass, before any token was drawn
            prefix.close(aborted=True)
            return generate(*placed, **arguments)
        except BaseException:
            prefix.close(aborted=True)
            raise
        self._finish(prefix, result, generation_config, arguments)
        return result

    def prefix(
        self,
        input_ids: Any,
        attention_mask: Any = None,
        *,
        adapter: Adapter | None = None,
        tenant: str | None = None,
        salt: str | None = None,
    ) -> Prefix:
        """What the cache has of prompts, as a cache for the model: for loops of your own around `forward`.

            with cache.prefix(ids) as prefix:
                output = model.generate(ids, past_key_values=prefix.past_key_values)
                prefix.commit(output)  # without this line only the prompt is stored

        Args are those of `generate`. At least the last token of each prompt is left to be computed. Give `generate`
        and `forward` nothing that changes what a prompt's keys and values are, and do not crop or reorder the cache
        before `commit`.
        """
        given = {} if attention_mask is None else {"attention_mask": attention_mask}
        whose = Separation(adapter, tenant or self._tenant, salt)
        return self._begin(input_ids, None, given, whose) or Prefix()

    def statistics(self) -> Statistics:
        """A snapshot."""
        return self._counters.snapshot()

    def flush(self) -> None:
        """Wait until lower tiers have what they should have."""
        self._source.flush()

    def clear(self, *, adapter: Adapter | None = None, tenant: str | None = None, salt: str | None = None) -> None:
        """Forget all pages of this model, of one adapter, tenant and salt.

        Raises:
            HicacheError: storage or the service did not confirm; call it again.
        """
        self._source.clear(Separation(adapter, tenant or self._tenant, salt))

    def close(self) -> None:
        """Bring to storage what should be there, and let go of everything. Idempotent; calls go on without a cache."""
        self._closed = True
        self._source.close()

    def __enter__(self) -> PrefixCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return f"<hicache_transformers.PrefixCache {self.namespace.model!r}, pages of {self._pages.tokens}: {state}>"

    def _begin(
        self,
        inputs: Any,
        config: Any,
        arguments: dict[str, Any],
        whose: Separation,
        *,
        further: tuple[Any, ...] = (),
        layered: bool = False,
        early: bool = False,
    ) -> Prefix | None:
        """The prompts of a call; None where it goes past the cache. Raises nothing for the cache's sake."""
        self._counters.add(calls=1)
        model = self._model
        try:
            if self._closed:
                raise Bypass("closed", "the cache is closed")
            if further:
                raise Bypass("arguments", "arguments behind generation_config were given by place: give them by name")
            self._watch.check(whose.adapter)
            check_arguments(model, config, arguments)
            mask = arguments.get("attention_mask")
            rows = read_rows(inputs, mask, pad_token=inferred_padding(model, config, arguments))
            if not self._shape.takes_positions and any(row.padding for row in rows):
                raise Bypass("padding", "the model counts positions with padding: give it prompts of one length")
            times = repeats(model, config, arguments)
            early = early and takes_prompts_as_given(model)
            deadline = self._deadline
            return begin(self._engine, rows, whose, repeats=times, deadline=deadline, layered=layered, early=early)
        except Bypass as bypass:
            self._counters.bypass(bypass.reason, str(bypass))
        except Exception as error:
            self._counters.failed("looking up", error)
        return None

    def _finish(self, prefix: Prefix, result: Any, config: Any, arguments: dict[str, Any]) -> None:
        """Store what a call has computed. Raises nothing for the cache's sake."""
        try:
            sequences = getattr(result, "sequences", result)
            if int(prefix.past_key_values.get_seq_length()) > len(sequences[0]):
                raise Bypass("state", "the model keeps more columns than it has tokens: nothing of it is stored")
            # One sequence alone has no padding behind it, and may end with what looks like it.
            pad = padding_behind(self._model, config, arguments) if len(sequences) > 1 else None
            prefix.commit(sequences, pad_token=pad)
        except Bypass as bypass:
            self._counters.bypass(bypass.reason, str(bypass))
            prefix.close()
        except Exception as error:
            self._counters.failed("storing pages", error)
            prefix.close()

    def _open(self, storage: Any, host: Any, device: Any, address: str | None, options: dict[str, Any]) -> PageSource:
        most = getattr(self._model.config, "max_position_embeddings", None)
        settings: dict[str, Any] = {"device": device, "longest": None if most is None else int(most)}
        if address is None:
            options = {"storage": storage} | ({} if host is None else {"host": host}) | options
            source, found = open_embedded(self.namespace, self._pages, self._shape, **settings, options=options)
        else:
            for what, value in (("storage", storage), ("host", host), ("tenant", self._tenant)):
                if value is not None:
                    raise ConfigError(f"{what}= is the service's business where address= is given: leave it out")
            settings["counters"] = self._counters
            source, found = open_connected(
                address, self.namespace, self._pages, self._shape, **settings, options=options
            )
        for warning in found:
            self._warn(warning)
        return source

    def _warn(self, text: str) -> None:
        self.warnings.append(text)
        _log.warning("hicache: %s", text)
