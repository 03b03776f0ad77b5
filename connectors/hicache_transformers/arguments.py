"""Which calls of `generate` may begin with a cache that is partly filled: those whose result is the same with one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from hicache_transformers.rows import Bypass

__all__ = ["beside_a_cache", "check_arguments", "inferred_padding", "padding_behind", "repeats"]

_INPUTS: Final = frozenset({"inputs", "input_ids", "attention_mask"})
_HARMLESS: Final = frozenset(
    {
        *("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "synced_gpus", "streamer"),
        *("tokenizer", "use_model_defaults", "logits_to_keep"),
    }
)
_KIND: Final = "cache_implementation"
_PLAIN: Final = "dynamic"
"""What `generate` makes where nothing is asked for. It takes no such word beside a cache."""

_UNSET: Final[Mapping[str, tuple[Any, ...]]] = {
    "num_beams": (None, 1),
    "assistant_model": (None,),
    "use_mtp": (None, False),
    "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,),
    "is_assistant": (None, False),
    "penalty_alpha": (None, 0, 0.0),
    "dola_layers": (None,),
    "constraints": (None,),
    "force_words_ids": (None,),
    "custom_generate": (None,),
    "cache_config": (None, {}),
    "use_cache": (None, True),
    "prefill_chunk_size": (None,),
    "token_healing": (None, False),
    "guidance_scale": (None, 1, 1.0),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
}
"""Settings with which `generate` calls the model otherwise than once for the prompt and once for each token, keeps
another kind of cache, or returns what it computed of the prompt; and the values that leave them off."""


def check_arguments(model: Any, given: Any, arguments: Mapping[str, Any]) -> None:
    """See that a call of `generate` gives the same with a cache.

    Args:
        model: the model.
        given: the call's `generation_config`, or None.
        arguments: its other keyword arguments.

    Raises:
        Bypass: it may not, or nobody knows: an argument of a model's own may decide what pages hold.
    """
    for name, off in _UNSET.items():
        value = _setting(name, model, given, arguments)
        if value not in off:
            raise Bypass(name, f"{name}={value!r:.40} does not go with a cache that is filled already")
    asked = arguments.get(_KIND) or _PLAIN
    if asked != _PLAIN or _setting(_KIND, model, given, {}) is not None:
        raise Bypass(_KIND, f"{_KIND}: only the plain cache of transformers can be filled already")
    known = getattr(model, "generation_config", None)
    for name, value in arguments.items():
        if value is None or name in (_KIND, *_INPUTS, *_HARMLESS, *_UNSET) or hasattr(known, name):
            continue
        raise Bypass(name, f"the argument {name} may change what pages hold")


def beside_a_cache(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call that was found good, without those that `generate` refuses beside a filled cache."""
    return {name: value for name, value in arguments.items() if name not in (_KIND, "past_key_values")}


def repeats(model: Any, given: Any, arguments: Mapping[str, Any]) -> int:
    """How many sequences `generate` makes of each prompt."""
    return int(_setting("num_return_sequences", model, given, arguments) or 1)


def inferred_padding(model: Any, given: Any, arguments: Mapping[str, Any]) -> int | None:
    """The token that `generate` takes for padding where no mask is given; None where it takes none for it."""
    pad = _setting("pad_token_id", model, given, arguments)
    eos = _setting("eos_token_id", model, given, arguments)
    ends = list(eos) if isinstance(eos, list | tuple) else [eos]
    return None if pad is None or pad in ends else int(pad)


def padding_behind(model: Any, given: Any, arguments: Mapping[str, Any]) -> int | None:
    """The token that `generate` puts behind a sequence that ended before others; None where none can end."""
    pad = _setting("pad_token_id", model, given, arguments)
    if pad is None:
        pad = _setting("eos_token_id", model, given, arguments)
        pad = pad[0] if isinstance(pad, list | tuple) else pad
    return None if pad is None else int(pad)


def _setting(name: str, model: Any, given: Any, arguments: Mapping[str, Any]) -> Any:
    """As `generate` finds it: the argument, the call's configuration, the model's."""
    if arguments.get(name) is not None:
        return arguments[name]
    for config in (given, getattr(model, "generation_config", None)):
        value = getattr(config, name, None)
        if value is not None:
            return value
    return None
