"""Deliberate bugs, each of which the tests must catch: `python tests/mutants.py [NAME ...]`.

Each mutant is one small edit of the product, made in a copy. It is caught when the tests named with it fail, and missed
when they pass. An edit whose text is no longer in the file is an error: the list follows the code.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CORE = ("tests/unit/core", "tests/property/test_core_machine.py")
RUNTIME = ("tests/property/test_cache_machine.py",)
RECORDINGS = ("tests/property/test_recordings.py",)
CAUGHT = "caught"
PLANNING = ("tests/unit/runtime/test_planner.py", "tests/property/test_load_or_recompute.py")


@dataclass(frozen=True, slots=True)
class Mutant:
    """One bug: in `file` the text `old` becomes `new`; `tests` must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...] = CORE


def core(name: str, file: str, old: str, new: str) -> Mutant:
    return Mutant(name, f"hicache/core/{file}", old, new)


def runtime(name: str, file: str, old: str, new: str) -> Mutant:
    return Mutant(name, f"hicache/runtime/{file}", old, new, RUNTIME)


MUTANTS = (
    core(
        "a load pins its source no more",
        "prefetch.py",
        "source = copies.pin(HOST, tree, host[:on_host], lease.pins[HOST])",
        "source = copies.pin(HOST, tree, host[:0])",
    ),
    core(
        "a write-back pins its source no more",
        "writeback.py",
        "source = copies.pin(DEVICE, tree, device[:resident], None if pins is None else pins[DEVICE])",
        "source = copies.pin(DEVICE, tree, device[:0])",
    ),
    core(
        "a write-back pins only what it writes, not what is in front",
        "writeback.py",
        "        whole = copies.pin(HOST, tree, np.concatenate((host, slots)), target)\n        copies.drop(target)\n",
        "        whole = copies.pin(HOST, tree, slots)\n        copies.drop(target)\n",
    ),
    core(
        "pages are published before their parent",
        "copies.py",
        "            if parent is None or (not parent.is_root() and parent.resident[tier] < parent.pages):\n"
        "                continue\n            resident = node.resident[tier]",
        "            if parent is None:\n                continue\n            resident = node.resident[tier]",
    ),
    core(
        "a quarantined slot is free at once",
        "copies.py",
        "                table.advance(taken[:pinned], RESIDENT, SlotEvent.DETACH)\n",
        "                table.advance(taken[:pinned], RESIDENT, SlotEvent.DETACH)\n"
        "                table.reclaim(taken[:pinned])\n",
    ),
    core(
        "a transfer ends with its I/O, not with the visibility of its pages",
        "transferlog.py",
        "if tier is Tier.STORAGE or not self.copies.wait(tier, transfer):",
        "if True:",
    ),
    core(
        "a split forgets to rewrite the owner of its slots",
        "tree.py",
        "                registry.tables[tier].owner[rest.slots[tier]] = rest.id\n",
        "",
    ),
    core(
        "a split loses the beliefs of its second half",
        "tree.py",
        "rest.believed, node.believed = max(0, node.believed - pages), min(node.believed, pages)",
        "rest.believed, node.believed = 0, min(node.believed, pages)",
    ),
    core(
        "a match counts as a use",
        "cache.py",
        "        path = tree.walk(prompt, limit)\n        device = HiRadix",
        "        path = tree.walk(prompt, limit)\n        for node, _ in path:\n            node.hits += 1\n"
        "        device = HiRadix",
    ),
    core(
        "a commit does not check that its prefix is still held",
        "commit.py",
        "        if at < first:\n            return None\n",
        "        at = max(at, first)\n",
    ),
    core(
        "the completion of an older generation publishes",
        "transferlog.py",
        "        elif transfer.tree.live:\n",
        "        else:\n",
    ),
    core(
        "an unpin of a cleared tree counts as one of a live tree",
        "copies.py",
        "        if not tree.live:\n            # What was cleared",
        "        if False:\n            # What was cleared",
    ),
    core(
        "a failed page does not stop the pages behind it",
        "transferlog.py",
        "            self._cut_at(tier, int(slots[bad]), reason)\n",
        "",
    ),
    core(
        "a missing page in storage is believed further on",
        "transferlog.py",
        "            if results[bad] in _AGAINST_SOURCE and not transfer.orphaned:\n",
        "            if False:\n",
    ),
    core(
        "a time-out speaks against the source",
        "transferlog.py",
        "            if results[bad] in _AGAINST_SOURCE and not transfer.orphaned:\n",
        "            if not transfer.orphaned:\n",
    ),
    core(
        "a cut spares what lies below",
        "copies.py",
        "            if here.below[tier]:\n                todo += ",
        "            if False:\n                todo += ",
    ),
    core(
        "the mark of a verified page survives its slot",
        "residency.py",
        "        self.verified[slots] = False\n        self.stored[slots] = False\n",
        "        self.stored[slots] = False\n",
    ),
    core(
        "the mark of a stored page survives its slot",
        "residency.py",
        "        self.verified[slots] = False\n        self.stored[slots] = False\n",
        "        self.verified[slots] = False\n",
    ),
    core(
        "two puts of one page at once",
        "writeback.py",
        "if not stored[identity.depth - first] and identity.hash not in tree.putting",
        "if not stored[identity.depth - first]",
    ),
    core(
        "more is planned than storage can take",
        "writeback.py",
        "return sys.maxsize if most is None else most - self._log.writing",
        "return sys.maxsize",
    ),
    core(
        "what slru protects stays protected",
        "segments.py",
        "        while self.pages > self.bound:\n",
        "        while False:\n",
    ),
    core(
        "what loses its protection is the next to go",
        "segments.py",
        "(False, max(stamp, demoted))",
        "(False, stamp)",
    ),
    core(
        "a commit counts as one more use for lfu",
        "commit.py",
        "self._registry.use(node, lease.priority, again=True)",
        "self._registry.use(node, lease.priority)",
    ),
    core(
        "time does not pass for lfu",
        "registry.py",
        "self.age += pages / self._pages_a_half_life",
        "self.age += 0",
    ),
    core(
        "an unpin wakes nobody",
        "copies.py",
        "        self.registry.candidates[tier].file(self.registry.node(owner))\n",
        "",
    ),
    core(
        "a DEVICE copy that became clean stays among the dirty",
        "copies.py",
        "            registry.candidates[DEVICE].refile(node)  # it has become clean\n",
        "            pass\n",
    ),
    core(
        "eviction takes pinned pages",
        "eviction.py",
        "return len(slots) == resident and not self.table.pins[slots[-1]]",
        "return len(slots) == resident",
    ),
    core(
        "eviction takes a parent before its child",
        "eviction.py",
        "if not resident or node.below[tier] or not",
        "if not resident or not",
    ),
    core(
        "allocation evicts before it knows that it can be met",
        "commit.py",
        "        if not table.growing and self._room.available(top) < pages:\n",
        "        self._copies.evict(top, pages)\n        if not table.growing and self._room.available(top) < pages:\n",
    ),
    core(
        "cancel frees the target at once",
        "transferlog.py",
        "        transfer.cancelled = True\n        if len(slots):\n",
        "        transfer.cancelled = True\n        for pins in transfer.pins:\n            self.copies.drop(pins)\n"
        "        transfer.pins.clear()\n        if len(slots):\n",
    ),
    core(
        "cancel takes along what others fill behind",
        "transferlog.py",
        "            if node.below[tier] or len(node.slots[tier]) > int(table.depth[last]) - node.first + 1:\n"
        "                return\n",
        "",
    ),
    core(
        "a load is not handed over to its request",
        "transferlog.py",
        "            if tier is not Tier.STORAGE:\n                self.hand_over(lease, tier)\n",
        "",
    ),
    core(
        "a lease that ends inside a node makes its rest recent too",
        "cache.py",
        "            tree.split(last, pages)  # else the rest, which is older, would become as recent as this use\n",
        "            pass\n",
    ),
)

RUNTIME_MUTANTS = (
    runtime(
        "what was read is not compared with the tokens asked for",
        "tokens.py",
        "            header.tokens == tokens and (header.extras",
        "            (header.extras",
    ),
    runtime(
        "a put that failed counts as stored",
        "objects.py",
        "return [result.status is ObjectStatus.OK for result in",
        "return [True for _ in",
    ),
    runtime(
        "only the last shard of a page is put",
        "objects.py",
        "            objects.append(StoredObject(key, header, payload))\n        return objects\n",
        "            objects.append(StoredObject(key, header, payload))\n        return objects[-1:]\n",
    ),
    runtime(
        "a page that was read is as good as its first shard",
        "objects.py",
        "answers[at : at + len(parts)])",
        "answers[at : at + 1])",
    ),
    runtime(
        "a shard whose read failed does not matter",
        "objects.py",
        "                result = PageResult.FAILED\n",
        "                continue\n",
    ),
    runtime(
        "keys of objects leave the generation out",
        "objects.py",
        "return ObjectKey(tree.namespace, tree.generation, page.hash, part.shard)",
        "return ObjectKey(tree.namespace, 0, page.hash, part.shard)",
    ),
    runtime(
        "an event that breaks publishes all the same",
        "executor.py",
        "result = PageResult.OK if passed else PageResult.FAILED\n",
        "result = PageResult.OK\n",
    ),
    runtime(
        "a copier that answers for another number of pages has answered well",
        "executor.py",
        "            results = [PageResult.FAILED] * transfer.count\n",
        "            results = [PageResult.OK] * transfer.count\n",
    ),
    runtime(
        "what a copier says of single pages is ignored",
        "executor.py",
        "        results = list(results)\n",
        "        results = [min(results)] * len(results)\n",
    ),
    runtime(
        "a transfer that a full queue turns away never ends",
        "executor.py",
        "        if shed:\n",
        "        if shed == 'error':\n",
    ),
    runtime(
        "a commit does not wait for its event",
        "request.py",
        "passed = ready is None or ready is READY or ready.query()",
        "passed = True",
    ),
    runtime(
        "all of a prompt may come from the cache although logits are wanted",
        "request.py",
        "    return max(tokens - 1, 0) // page_size\n",
        "    return tokens // page_size\n",
    ),
    runtime(
        "what came too late is not withdrawn",
        "loading.py",
        "        elif lease.waiting and not explores:\n",
        "        elif False:\n",
    ),
    runtime(
        "pages that come after load has answered move the request's own",
        "loading.py",
        "        if lease.waiting and explores and lease.start is None:\n",
        "        if False:\n",
    ),
    runtime(
        "a request waits longer than its deadline",
        "loading.py",
        "end = limit if until is None else min(until, limit)",
        "end = limit",
    ),
    runtime(
        "pages asked for are counted twice",
        "leasing.py",
        "        self._reducer.notify()\n        return counts\n",
        "        self._ledger.asked += counts.asked\n        self._reducer.notify()\n        return counts\n",
    ),
    runtime(
        "a request that nobody closed keeps its pins",
        "leasing.py",
        "        if not lease.closed:\n            self._ledger.dropped += 1\n",
        "        if False:\n            self._ledger.dropped += 1\n",
    ),
    runtime(
        "storage is not told of a clear",
        "clearing.py",
        "        port.clear(scope.namespace.digest, generation)\n",
        "",
    ),
    Mutant(
        "a recording is not checked for damage",
        "hicache/core/recordings.py",
        " and xxhash.xxh32_intdigest(value) == checksum",
        "",
        RECORDINGS,
    ),
    Mutant(
        "a checkpoint forgets who holds pins",
        "hicache/core/checkpoint.py",
        "            pins.holders = holders\n",
        "",
        RECORDINGS,
    ),
    Mutant(
        "a slow storage is waited for",
        "hicache/runtime/planner.py",
        "            if total < best:\n",
        "            if True:\n",
        PLANNING,
    ),
    Mutant(
        "what is under way in front costs nothing",
        "hicache/runtime/meter.py",
        "waiting = queued + sum(pages for pages, _ in self._outstanding.values())",
        "waiting = queued",
        PLANNING,
    ),
    Mutant(
        "a storage that hangs is expected to come back at once",
        "hicache/runtime/meter.py",
        "        return max(expected, silent)\n",
        "        return expected\n",
        PLANNING,
    ),
    Mutant(
        "pages that were declined count as late",
        "hicache/runtime/loading.py",
        "            reducer.core.decline(lease, self._top(lease) + decision.planned)\n",
        "",
        PLANNING,
    ),
    Mutant(
        "a recording of a living process is removed",
        "hicache/runtime/flight.py",
        "if not any(_in_use(path) for path in paths)",
        "if paths",
        ("tests/unit/runtime/test_flight.py",),
    ),
)


def caught(mutant: Mutant) -> bool:
    """Whether the tests fail with the bug in.

    Raises:
        ValueError: the code does not have the text that the mutant replaces.
    """
    with tempfile.TemporaryDirectory(prefix="hicache-mutant-") as name:
        copy = Path(name)
        ignore = shutil.ignore_patterns("__pycache__")
        for part in ("hicache", "storage_backends", "connectors", "tests", "proto"):
            shutil.copytree(ROOT / part, copy / part, ignore=ignore)
        shutil.copy(ROOT / "pyproject.toml", copy)
        (copy / "benchmarks").symlink_to(ROOT / "benchmarks")
        path = copy / mutant.file
        text = path.read_text(encoding="utf-8")
        if text.count(mutant.old) != 1:
            raise ValueError(f"{mutant.name}: {mutant.file} has its text {text.count(mutant.old)} times, not once")
        path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
        paths = ":".join(map(str, (copy, copy / "storage_backends", copy / "connectors")))
        environment = dict(os.environ, PYTHONPATH=paths, HYPOTHESIS_PROFILE="ci")
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *mutant.tests]
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
        if done.returncode not in (0, 1):
            raise ValueError(f"{mutant.name}: the tests did not run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        return done.returncode == 1


def from_data() -> Iterator[Mutant]:
    """Those of the files in `tests/data/mutants`, one table each with the fields of a `Mutant`."""
    for path in sorted((ROOT / "tests" / "data" / "mutants").glob("*.toml")):
        for fields in tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]:
            yield Mutant(**{**fields, "tests": tuple(fields["tests"])})


def outcome_of(mutant: Mutant) -> str:
    """What is printed in front of the mutant's name."""
    try:
        return CAUGHT if caught(mutant) else "MISSED"
    except ValueError as error:  # one that cannot be tried does not keep the others from it
        return f"BROKEN ({error})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of the names of the mutants to try; default all")
    names = parser.parse_args().names
    chosen = [
        m for m in (*MUTANTS, *RUNTIME_MUTANTS, *from_data()) if not names or any(name in m.name for name in names)
    ]
    missed = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for mutant, outcome in zip(chosen, pool.map(outcome_of, chosen), strict=True):
            print(f"{outcome}  {mutant.name}", flush=True)
            missed += outcome != CAUGHT
    print(f"{len(chosen) - missed} of {len(chosen)} caught")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
