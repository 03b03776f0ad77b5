"""An engine that calls a connector in vLLM's order, and sees that every key and value is the one it had to be.

It computes nothing: keys and values of a token are numbers that follow from all tokens up to it, written by a kernel of
its own into blocks. Each step reads back what its requests rely on, wherever it came from, and compares.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm_recorded import Forwards

HEADS, WIDTH, BLOCK, LAYERS = 2, 8, 4, 3
DTYPE = torch.bfloat16


def kernel(keys: Any, values: Any, key_cache: Any, value_cache: Any, slots: Any, isa: str) -> None:
    """The CPU backend's, as it was seen to write: keys as [element][token], values as [token][element]."""
    assert isa == "vec"
    _, heads, tokens, _ = key_cache.shape
    for at, slot in enumerate(slots.tolist()):
        block, token = divmod(slot, tokens)
        for head in range(heads):
            key_cache[block, head].view(-1)[token::tokens] = keys[at, head]
        value_cache[block, :, token] = values[at]


class ModelError(Exception):
    """The model has raised in the middle of a step."""


@lru_cache(maxsize=100_000)
def numbers(tokens: bytes, layer: int) -> torch.Tensor:
    """Keys and values `(2, heads, width)` of the last of these tokens."""
    seed = zlib.crc32(tokens + bytes([layer]))
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 200, (2, HEADS, WIDTH)).astype(np.float32)).to(
        DTYPE
    )


@dataclass
class Request:
    """As a connector sees vLLM's."""

    request_id: str
    all_token_ids: list[int]
    wanted: int
    num_prompt_tokens: int
    cache_salt: str | None = None
    lora_request: Any = None
    mm_features: list[Any] = field(default_factory=list)
    prompt_embeds: Any = None
    skip_reading_prefix_cache: bool = False
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    blocks: list[int] = field(default_factory=list)
    remote: bool = False
    external: int = 0

    @property
    def block_hashes(self) -> list[bytes]:
        """Names of the whole blocks."""
        known = np.asarray(self.all_token_ids, np.uint32).tobytes()
        return [sha256(known[: 4 * end]).digest() for end in range(BLOCK, self.num_tokens + 1, BLOCK)]

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


class SmallEngine:
    """One scheduler and its workers, in this process.

    Args:
        scheduler, workers: connectors.
        blocks: of the KV cache; number 0 is nobody's.
        chunk: tokens of a step at most.

    Attributes:
        external: tokens that the connector brought. failed: blocks that it said did not come.
        asked_again: how often it did not know yet.
        early: stores that went with the step that computes their pages.
        forward: what vLLM says of each step; None: there is no forward context.
        hooks: whether layers call the connector. raises: a layer in which the model raises, once.
        computing: called before each layer, with its number.
    """

    def __init__(self, scheduler: Any, workers: Iterable[Any], *, blocks: int = 64, chunk: int = 1000) -> None:
        self.scheduler = scheduler
        self.workers = list(workers)
        heads = HEADS // len(self.workers)
        self.tensors = [
            [torch.zeros((blocks, heads, BLOCK, 2 * WIDTH), dtype=DTYPE) for _ in range(LAYERS)] for _ in self.workers
        ]
        for worker, layers in zip(self.workers, self.tensors, strict=True):
            worker.register_kv_caches({f"model.layers.{n}.attn": layer for n, layer in enumerate(layers)})
        self.chunk = chunk
        self.external = self.failed = self.asked_again = self.early = 0
        self.forward: dict[str, Any] | None = {}
        self.hooks = True
        self.raises: int | None = None
        self.computing: Callable[[int], None] = lambda _: None
        self.sources: dict[str, int] = {}
        self.stats: dict[str, float] = {}
        self._free = list(range(blocks - 1, 0, -1))
        self._freed: list[int] = []
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._kept: dict[str, Request] = {}
        self._finished: set[str] = set()
        self._numbers = 0

    # ---- what tests do

    def generate(self, *prompts: list[int], new: int = 3, **fields: Any) -> list[Request]:
        """Run requests to their end, and until the engine keeps nothing for the connector."""
        requests = [self.add(prompt, new=new, **fields) for prompt in prompts]
        self.run()
        return requests

    def add(self, prompt: list[int], *, new: int = 3, **fields: Any) -> Request:
        self._numbers += 1
        request = Request(f"r{self._numbers}", list(prompt), len(prompt) + new, len(prompt), **fields)
        self._waiting.append(request)
        return request

    def run(self, steps: int = 20_000) -> None:
        for _ in range(steps):
            if not (self._waiting or self._running or self._kept):
                return
            self.step()
        raise AssertionError(f"the engine does not come to rest: {self._waiting} {self._running} {self._kept}")

    def stepped(self) -> bool:
        """A step, for waits."""
        self.step()
        return True

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    def abort(self, request: Request) -> None:
        """The client has gone away."""
        for queue in (self._waiting, self._running):
            if request in queue:
                queue.remove(request)
        self._end(request)

    def preempt(self, request: Request) -> None:
        """Take a running request's blocks away."""
        self._running.remove(request)
        self._release(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self._waiting.insert(0, request)

    # ---- a step

    def step(self) -> None:
        counts: dict[str, int] = {}
        sync = False
        budget = self.chunk
        for request in self._running:
            counts[request.request_id] = min(request.num_tokens - request.num_computed_tokens, budget)
            budget -= counts[request.request_id]
            self._grow(request, request.num_computed_tokens + counts[request.request_id])
        for request in list(self._waiting):
            if request.remote or budget <= 0:
                continue
            if request.num_computed_tokens == 0:
                tokens, apart = self.scheduler.get_num_new_matched_tokens(request, 0)
                if tokens is None:
                    self.asked_again += 1
                    continue
                assert 0 <= tokens < request.num_tokens
                assert tokens % BLOCK == 0
                assert tokens or not apart
            else:
                tokens, apart = 0, False  # its load has ended
            count = 0 if apart else min(request.num_tokens - request.num_computed_tokens - tokens, budget)
            self._grow(request, request.num_computed_tokens + tokens + count)
            blocks = SimpleNamespace(get_block_ids=lambda request=request: (list(request.blocks),))
            self.scheduler.update_state_after_alloc(request, blocks, tokens)
            if tokens:
                request.external = tokens
                self.external += tokens
                for source, number in self.scheduler.get_external_cache_hit_sources(request, tokens).items():
                    self.sources[source.value] = self.sources.get(source.value, 0) + number
            request.num_computed_tokens += tokens
            if apart:
                request.remote = True
                continue
            sync = sync or bool(tokens)
            self._waiting.remove(request)
            self._running.append(request)
            counts[request.request_id] = count
            budget -= count
        self._execute(counts, sync)

    def _execute(self, counts: dict[str, int], sync: bool) -> None:
        requests = {request.request_id: request for request in (*self._running, *self._waiting)}
        state = SimpleNamespace(get_block_ids=lambda name: (list(requests[name].blocks),) if name in counts else None)
        output = SimpleNamespace(
            num_scheduled_tokens=counts,
            total_num_scheduled_tokens=sum(counts.values()),
            kv_connector_block_state=state,
            finished_req_ids=self._finished,
        )
        metadata = self.scheduler.build_connector_meta(output)
        self.early += sum(getattr(store, "early", False) for store in metadata.plan.stores)
        finished, self._finished = self._finished, set()
        freed, self._freed = self._freed, []
        sent: list[set[str]] = []
        received: list[set[str]] = []
        bad: set[int] = set()
        wrong: list[tuple[str, set[int]]] = []
        report: Any = None
        raised = False
        for rank, worker in enumerate(self.workers):
            worker.handle_preemptions(metadata)
            self._scrub(rank, freed)
            Forwards.current = None
            if self.forward is not None:
                Forwards.begin(**{"computes": bool(counts)} | self.forward)
            worker.bind_connector_metadata(metadata)
            if sync:
                worker.start_load_kv(None)
            try:
                try:
                    for layer in range(LAYERS):
                        wrong += self._layer(worker, rank, layer, counts, requests)
                finally:  # as vLLM's first runner does, also where its model has raised
                    if not sync:
                        worker.start_load_kv(None)
                    worker.wait_for_save()
                    one, other = worker.get_finished(finished)
            except ModelError:
                raised = True
            sent.append(one or set())
            received.append(other or set())
            bad |= worker.get_block_ids_with_load_errors()
            self._count(worker)
            found = worker.build_connector_worker_meta()
            if found is not None:
                report = found if report is None else report.aggregate(found)
        for what, blocks in wrong:  # vLLM throws away what a step computed behind blocks that its end calls bad
            assert bad & blocks, what
        self._update({} if raised else counts, requests, sent, received, bad, report)

    def _layer(
        self, worker: Any, rank: int, layer: int, counts: dict[str, int], requests: dict[str, Request]
    ) -> list[tuple[str, set[int]]]:
        name = f"model.layers.{layer}.attn"
        called = self.hooks and bool(counts)
        if called:
            worker.wait_for_layer_load(name)
        self.computing(layer)
        wrong = [each for one, count in counts.items() for each in self._compute(requests[one], count, rank, layer)]
        if self.raises == layer and counts:
            self.raises = None
            raise ModelError
        if called:
            worker.save_kv_layer(name, None, None)
        return wrong

    def _update(
        self,
        counts: dict[str, int],
        requests: dict[str, Request],
        sent: list[set[str]],
        received: list[set[str]],
        bad: set[int],
        report: Any,
    ) -> None:
        self.failed += len(bad)
        for name, count in counts.items():
            request = requests[name]
            lost = next((at for at, block in enumerate(request.blocks) if block in bad), None)
            if lost is not None:
                request.num_computed_tokens = lost * BLOCK
                continue
            request.num_computed_tokens += count
            if request.num_computed_tokens == request.num_tokens:
                request.all_token_ids.append(zlib.crc32(bytes(str(request.all_token_ids), "ascii")) % 1000)
        for request in self._waiting:
            lost = next((at for at, block in enumerate(request.blocks) if block in bad), None)
            if request.remote and lost is not None:
                request.num_computed_tokens = lost * BLOCK
        self.scheduler.update_connector_output(SimpleNamespace(kv_connector_worker_meta=report, invalid_block_ids=bad))
        for request in [request for request in self._running if request.num_tokens >= request.wanted]:
            self._running.remove(request)
            self._end(request)
        for name in _all_said(self, "_sent", sent):
            self._release(self._kept.pop(name))
        for name in _all_said(self, "_received", received):
            request = requests.get(name)
            if request is not None and request in self._waiting:
                request.remote = False
                if not request.num_computed_tokens:
                    self._release(request)
            else:
                self._release(self._kept.pop(name))
        self._count(self.scheduler)

    def _end(self, request: Request) -> None:
        blocks = request.blocks[: -(-request.num_computed_tokens // BLOCK)]
        keeps, _ = self.scheduler.request_finished_all_groups(request, (list(blocks),))
        self._finished.add(request.request_id)
        if keeps or request.remote:
            self._kept[request.request_id] = request
        else:
            self._release(request)

    # ---- blocks

    def _grow(self, request: Request, tokens: int) -> None:
        while len(request.blocks) < -(-tokens // BLOCK):
            request.blocks.append(self._free.pop())

    def _release(self, request: Request) -> None:
        self._free.extend(reversed(request.blocks))
        self._freed.extend(request.blocks)
        request.blocks = []

    def _scrub(self, rank: int, freed: list[int]) -> None:
        """What belongs to nobody may be overwritten from here on in a step: whoever still reads it, reads this."""
        for tensor in self.tensors[rank]:
            tensor[freed] = -1

    def _compute(self, request: Request, count: int, rank: int, layer: int) -> Iterator[tuple[str, set[int]]]:
        """Compute tokens of a layer; yields what is wrong in front of them, with the blocks up to there.

        What is computed behind something that is wrong is wrong.
        """
        begin, spoilt = request.num_computed_tokens, 0
        tensor = self.tensors[rank][layer]
        heads = HEADS // len(self.workers)
        known = np.asarray(request.all_token_ids, np.uint32).tobytes()
        for at in range(begin + count):
            block, token = request.blocks[at // BLOCK], at % BLOCK
            wanted = numbers(known[: 4 * (at + 1)], layer)[:, rank * heads : (rank + 1) * heads]
            halves = tensor.view(-1, heads, 2 * BLOCK, WIDTH).chunk(2, dim=2)
            if at >= begin:
                kernel(
                    wanted[0:1] + spoilt, wanted[1:2] + spoilt, *halves, torch.tensor([block * BLOCK + token]), "vec"
                )
            else:
                flat = tensor[block].view(heads, -1)
                keys = flat[:, : BLOCK * WIDTH].view(heads, WIDTH, BLOCK)[:, :, token]
                values = flat[:, BLOCK * WIDTH :].view(heads, BLOCK, WIDTH)[:, token]
                if not (torch.equal(keys, wanted[0]) and torch.equal(values, wanted[1])):
                    spoilt = 1
                    yield f"{request.request_id}: token {at}, layer {layer}", set(request.blocks[: at // BLOCK + 1])

    def _count(self, connector: Any) -> None:
        found = connector.get_kv_connector_stats()
        for name, count in (found.data if found is not None else {}).items():
            self.stats[name] = self.stats.get(name, 0) + count


def _all_said(engine: Any, name: str, said: list[set[str]]) -> list[str]:
    """What every worker has said by now, as vLLM adds it up."""
    counts: dict[str, int] = engine.__dict__.setdefault(name, {})
    for one in said:
        for each in one:
            counts[each] = counts.get(each, 0) + 1
    done = [each for each, count in counts.items() if count == len(said)]
    for each in done:
        del counts[each]
    return done
