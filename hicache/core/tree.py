"""HiRadixTree: one namespace's prompts as a radix tree over page symbols, with residency in three tiers.

The alphabet is a parameter: fixed-width symbols, either a page's token bytes or its page hash. Spans are `bytes` and
are compared by `startswith` at an offset, so a match costs one memory compare a node.

Structure only: nodes part where prompts part and where a lease ends, a leaf is extended in place, a node and its only
child merge once no policy tells their uses apart. Which pages come and go in which tier is decided in `copies`; slots
know their node by `owner`, which is rewritten here, so all of this is legal while transfers are in flight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hicache.core.eviction import first_heat
from hicache.core.node import Node, Path
from hicache.core.prompt import SymbolsAreHashes, cut
from hicache.core.registry import DEVICE, HOST, Registry
from hicache.core.residency import NO_SLOTS, Slots
from hicache.records import MissReason

if TYPE_CHECKING:
    from hicache.core.prompt import Hasher, Prompt

_TIERS = (DEVICE, HOST)


class HiRadixTree:
    """The pages of one generation of one namespace. Not thread-safe.

    Attributes:
        namespace: digest of the derived namespace, 16 bytes.
        generation: the life of the namespace's content that this tree is.
        width: bytes of a page symbol.
        hasher: chains page hashes from symbols.
        named: whether the symbols are the hashes, so that nodes need no others.
        root: a node without pages.
        live: False once the namespace was cleared: nothing is published here any more.
        resident, filling, pinned: pages per owned tier, for O(1) clears.
        putting: hashes of pages whose put is in flight: one writer an object.
        stub_pages: pages that only STORAGE is believed to have.
    """

    __slots__ = (
        "filling",
        "generation",
        "hasher",
        "live",
        "named",
        "namespace",
        "pinned",
        "putting",
        "registry",
        "resident",
        "root",
        "span_pages",
        "stub_pages",
        "width",
    )

    def __init__(self, registry: Registry, namespace: bytes, *, generation: int, width: int, hasher: Hasher) -> None:
        self.registry = registry
        self.namespace = namespace
        self.generation = generation
        self.width = width
        self.hasher = hasher
        self.named = type(hasher) is SymbolsAreHashes
        self.span_pages = max(1, registry.config.span_bytes // width)
        self.live = True
        self.resident = [0, 0]
        self.filling = [0, 0]
        self.pinned = [0, 0]
        self.putting: set[bytes] = set()
        self.stub_pages = 0
        self.root = Node(self, None, b"", 0, 0)
        registry.enter(self.root)

    # ---- looking

    def walk(self, prompt: Prompt, limit: int | None = None) -> Path:
        """The nodes that the prompt's first `limit` pages run through. Changes nothing."""
        symbols = prompt.symbols
        width = self.width
        end = prompt.pages if limit is None or limit > prompt.pages else limit
        node = self.root
        at = 0
        path: Path = []
        while at < end:
            child = node.children.get(symbols[at * width : (at + 1) * width])
            if child is None:
                break
            pages = child.pages
            if at + pages > end or not symbols.startswith(child.span, at * width):
                pages = self._common(child, symbols, at, min(end - at, pages))
                path.append((child, pages))
                if pages < child.pages:
                    break
            else:
                path.append((child, pages))
            at += pages
            node = child
        return path

    def _common(self, node: Node, symbols: bytes, at: int, most: int) -> int:
        """How many of the node's first `most` pages agree with the prompt at page `at`; the first is known to."""
        width = self.width
        if symbols.startswith(node.span[: most * width], at * width):
            return most
        ours = np.frombuffer(node.span, np.uint8, most * width)
        theirs = np.frombuffer(symbols, np.uint8, most * width, at * width)
        return int((ours != theirs).argmax()) // width

    def path_to(self, node: Node, pages: int | None = None) -> Path:
        """The path from the root to the first `pages` pages (default all) of a node."""
        path: Path = [(node, node.pages if pages is None else pages)]
        while node.parent is not None and node.parent.parent is not None:
            node = node.parent
            path.append((node, node.pages))
        path.reverse()
        return path

    @staticmethod
    def held(path: Path, tier: int) -> tuple[Slots, int]:
        """Slots that the tier holds along the path, and how many of them are resident; both from the root on."""
        parts: list[Slots] = []
        resident = 0
        visible = True
        for node, pages in path:
            slots = node.slots[tier]
            if not len(slots):
                break
            if visible:
                here = node.resident[tier]
                visible = here >= pages
                resident += min(here, pages)
            have = len(slots)
            parts.append(slots[:pages] if have > pages else slots)
            if have < pages:
                break
        if len(parts) == 1:
            return parts[0], resident
        return (np.concatenate(parts) if parts else NO_SLOTS), resident

    @staticmethod
    def resident_pages(path: Path, tier: int) -> int:
        """How many leading pages of the path are resident in an owned tier."""
        total = 0
        for node, pages in path:
            here = node.resident[tier]
            if here < pages:
                return total + here
            total += pages
        return total

    @staticmethod
    def believed_pages(path: Path) -> int:
        """How many leading pages of the path are believed to be in STORAGE."""
        total = 0
        for node, pages in path:
            if node.believed < pages:
                return total + node.believed
            total += pages
        return total

    # ---- hashes

    def hashes(self, node: Node, first: int, end: int) -> list[bytes]:
        """Hashes of a node's pages `first` to `end - 1`, computed as far as they are not known yet."""
        size = self.hasher.size
        if self.named:
            return cut(node.span[first * size : end * size], size)
        if end * size > len(node.hashes):
            self._hash_down(node, end)
        return cut(node.hashes[first * size : end * size], size)

    def _hash_down(self, node: Node, end: int) -> None:
        size = self.hasher.size
        chain = [(node, end)]
        while chain[-1][0].parent is not None:
            parent = chain[-1][0].parent
            assert parent is not None
            if len(parent.hashes) >= parent.pages * size:
                break
            chain.append((parent, parent.pages))
        for link, upto in reversed(chain):
            known = len(link.hashes) // size
            if known < upto:
                parent_hash = link.hashes[-size:] if known else self.hash_before(link)
                more = link.span[known * self.width : upto * self.width]
                link.hashes += self.hasher.extend(parent_hash, more, upto - known)

    def hash_before(self, node: Node) -> bytes | None:
        """The hash of the page in front of a node's first one; None at the root."""
        parent = node.parent
        if parent is None or parent.is_root():
            return None
        return self.hashes(parent, parent.pages - 1, parent.pages)[0]

    # ---- growing and shrinking

    def grow(
        self, prompt: Prompt, end: int, *, hits: int, extend_from: int | None = None, path: Path | None = None
    ) -> Path:
        """The path of the prompt's first `end` pages, with nodes made for what is not there.

        `path` is the walk of these pages, if the caller has just made it.

        A leaf that begins at page `extend_from` or behind it is extended in place; an older one keeps its own
        recency and hits, and gets a child.
        """
        width = self.width
        if path is None:
            path = self.walk(prompt, end)
        at = path[-1][0].first + path[-1][1] if path else 0
        if path and path[-1][1] < path[-1][0].pages and at < end:
            self.split(path[-1][0], path[-1][1])
        if extend_from is not None and at < end:
            self._join(path, extend_from)
        node = path[-1][0] if path else self.root
        while at < end:
            room = self.span_pages - node.pages
            if room > 0 and extend_from is not None and not node.children and node.pages and node.first >= extend_from:
                pages = min(end - at, room)
                node.span += prompt.symbols[at * width : (at + pages) * width]
                node.pages += pages
                path[-1] = (node, node.pages)
                at += pages
                continue
            pages = min(end - at, self.span_pages)
            child = Node(self, node, prompt.symbols[at * width : (at + pages) * width], pages, at)
            child.stamp = self.registry.tick
            child.heat = first_heat(self.registry.age)
            child.hits = hits
            self.registry.enter(child)
            node.children[child.span[:width]] = child
            path.append((child, pages))
            at += pages
            node = child
        return path

    def _join(self, path: Path, end: int) -> None:
        """Merge neighbours in front of page index `end` where nothing tells them apart any more.

        A chat adds a node a turn; without this each turn would walk all of those before it.
        """
        enough = self.registry.hits_that_matter
        at = 0
        while at + 1 < len(path):
            node, child = path[at][0], path[at + 1][0]
            whole = path[at + 1][1] == child.pages and child.first + child.pages <= end
            if whole and min(node.hits, child.hits) >= enough and self.merge(node):
                path[at : at + 2] = [(node, node.pages)]
            else:
                at += 1

    def split(self, node: Node, pages: int) -> None:
        """Part a node behind its first `pages` pages. It keeps them; a new child gets the rest."""
        registry = self.registry
        width, size = self.width, self.hasher.size
        rest = Node(self, node, node.span[pages * width :], node.pages - pages, node.first + pages)
        registry.enter(rest)
        rest.hashes = node.hashes[pages * size :]
        rest.children, node.children = node.children, {rest.span[:width]: rest}
        for child in rest.children.values():
            child.parent = rest
        rest.stamp, rest.hits, rest.heat, rest.priority = node.stamp, node.hits, node.heat, node.priority
        rest.touched, rest.demoted = node.touched, node.demoted
        node.span, node.hashes, node.pages = node.span[: pages * width], node.hashes[: pages * size], pages
        rest.believed, node.believed = max(0, node.believed - pages), min(node.believed, pages)
        for tier in _TIERS:
            slots = node.slots[tier]
            rest.below[tier], node.below[tier] = node.below[tier], 0
            if len(slots) > pages:
                rest.slots[tier], node.slots[tier] = slots[pages:], slots[:pages]
                rest.resident[tier] = max(0, node.resident[tier] - pages)
                node.resident[tier] = min(node.resident[tier], pages)
                registry.tables[tier].owner[rest.slots[tier]] = rest.id
                node.below[tier] = 1
            registry.candidates[tier].unfile(node)
        registry.recount(node)
        registry.recount(rest)
        registry.file(node)
        registry.file(rest)

    def merge(self, node: Node) -> bool:
        """Join a node and its only child, if both were used alike and the span stays in bounds."""
        if node.parent is None or not node.alive or len(node.children) != 1:
            return False
        (child,) = node.children.values()
        alike = (child.stamp, child.priority, child.demoted) == (node.stamp, node.priority, node.demoted) and (
            child.hits == node.hits or min(child.hits, node.hits) >= self.registry.hits_that_matter
        )
        if not alike or node.pages + child.pages > self.span_pages:
            return False
        if child.believed and node.believed < node.pages:
            return False  # one number could not say that there is a hole between the beliefs
        registry = self.registry
        size = self.hasher.size
        if len(node.hashes) == node.pages * size:
            node.hashes += child.hashes
        if node.believed == node.pages:
            node.believed += child.believed
        for tier in _TIERS:
            slots = child.slots[tier]
            if len(slots):
                node.slots[tier] = np.concatenate((node.slots[tier], slots))
                registry.tables[tier].owner[slots] = node.id
            node.resident[tier] += child.resident[tier]
            registry.candidates[tier].unfile(node)
        node.span += child.span
        node.pages += child.pages
        node.children, node.below = child.children, child.below
        for grandchild in node.children.values():
            grandchild.parent = node
        self._leave(child)
        registry.recount(node)
        registry.file(node)
        return True

    def trim(self, node: Node, reason: MissReason) -> None:
        """Drop what no tier holds and no belief covers, from this node upwards; the pages are remembered as gone."""
        registry = self.registry
        while node.parent is not None and node.alive:
            if node.children:
                if not self.merge(node) or node.children:
                    return
                continue  # the child may have been a stub that holds nothing
            keep = max(node.held, node.believed)
            if keep < node.pages:
                self._bury(node, keep, reason)
            if keep:
                node.span = node.span[: keep * self.width]
                node.hashes = node.hashes[: keep * self.hasher.size]
                node.pages = keep
                registry.count_stubs(node)
                return
            parent = node.parent
            del parent.children[node.span[: self.width]]
            self._leave(node)
            if parent.parent is not None:
                registry.count_stubs(parent)
            node = parent

    def _bury(self, node: Node, first: int, reason: MissReason) -> None:
        # COLD: only a belief was forgotten, so nothing is known of the page any more.
        if self.live and self.registry.ghosts.enabled and reason is not MissReason.COLD:
            hashes = self.hashes(node, first, node.pages)
            self.registry.ghosts.add(self.namespace, hashes, reason, tick=self.registry.tick)

    def _leave(self, node: Node) -> None:
        node.alive = False
        self.registry.count_stubs(node)
        self.registry.leave(node)
