"""PrefixCache: which pages already hold the KV of a prompt's beginning.

A radix tree whose edges are atoms: one whole page of typed tokens, or the whole pages that hold an image (which attends
in both directions and so is of use only whole), with the tokens beside it on its first and last page. One tree a
namespace. The tree holds one reference on each of its pages. A user of a node's pages locks the node, which keeps it
and all nodes above it. When pages are needed, unlocked leaves are evicted, the least recently used first.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from .pages import PagePool


@dataclass(frozen=True, slots=True)
class Atom:
    """An indivisible piece of a prefix: its tokens as a key, and the number of whole pages that its KV takes."""

    key: Hashable
    num_pages: int


class Node:
    """The end of an edge. ``pages`` are the edge's own; the nodes above have the others. A root's ``atom`` has the
    namespace as its key."""

    __slots__ = ("atom", "children", "is_forgotten", "last_used", "locks", "pages", "parent")

    def __init__(self, atom: Atom, pages: list[int], parent: Node | None) -> None:
        self.atom, self.pages, self.parent = atom, pages, parent
        self.children: dict[Hashable, Node] = {}
        self.locks = 0
        self.last_used = 0
        self.is_forgotten = False
        """The node has left the tree; a sequence may still lock it."""

    def path(self) -> Iterator[Node]:
        """This node and those above it, the root left out."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix: its last node (locked by ``match``) and its pages."""

    node: Node | None
    pages: list[int]


class PrefixCache:
    """match() locks what it returns; unlock() must follow. insert() adds what was computed."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._roots: dict[Hashable, Node] = {}
        self._ticks = itertools.count(1)
        # Entries (last_used, tie, node) of leaves that were unlocked once; checked when popped.
        self._heap: list[tuple[int, int, Node]] = []
        self._ties = itertools.count()
        self._num_pages = 0
        self._num_evictable = 0

    @property
    def num_pages(self) -> int:
        """Pages that the tree refers to."""
        return self._num_pages

    @property
    def num_evictable(self) -> int:
        """Pages of unlocked nodes, which evict() can free."""
        return self._num_evictable

    def contains(self, namespace: Hashable, atoms: Sequence[Atom]) -> bool:
        """Whether all ``atoms`` are cached. Mutates nothing."""
        node = self._roots.get(namespace)
        for atom in atoms:
            node = None if node is None else node.children.get(atom.key)
        return node is not None

    def match(self, namespace: Hashable, atoms: Sequence[Atom]) -> Match:
        """The longest cached beginning of ``atoms``, locked and marked as used."""
        node = self._roots.get(namespace)
        pages: list[int] = []
        count = 0
        while node is not None and count < len(atoms):
            child = node.children.get(atoms[count].key)
            if child is None:
                break
            node = child
            pages += node.pages
            count += 1
        if node is None or count == 0:
            return Match(None, [])
        self._touch(node)
        self.lock(node)
        return Match(node, pages)

    def lock(self, node: Node) -> None:
        """Keeps ``node`` and those above it from eviction."""
        for each in node.path():
            if each.locks == 0:
                self._num_evictable -= len(each.pages)
            each.locks += 1

    def unlock(self, node: Node) -> None:
        for each in node.path():
            assert each.locks > 0, "a node is unlocked once too often"
            each.locks -= 1
            if each.locks == 0:
                self._num_evictable += len(each.pages)
                self._offer(each)

    def insert(
        self, namespace: Hashable, atoms: Sequence[Atom], pages: Sequence[int]
    ) -> Node | None:
        """Adds a computed prefix whose KV is in ``pages``. Nodes that exist keep their pages.

        New nodes take a reference of their own on their pages. Returns the last node, locked, or None for no atoms.
        """
        if not atoms:
            return None
        assert sum(atom.num_pages for atom in atoms) == len(pages), (
            "pages must cover the atoms exactly"
        )
        node = self._roots.setdefault(namespace, Node(Atom(namespace, 0), [], None))
        offset = 0
        for atom in atoms:
            child = node.children.get(atom.key)
            if child is None:
                own = list(pages[offset : offset + atom.num_pages])
                self._pool.share(own)
                child = Node(atom, own, node)
                node.children[atom.key] = child
                self._num_pages += len(own)
                self._num_evictable += len(own)
            node = child
            offset += atom.num_pages
        self._touch(node)
        self.lock(node)
        return node

    def forget(self, node: Node, pages: set[int]) -> None:
        """Removes the nodes on the way to ``node`` that hold any of ``pages``, and all nodes below them. Sequences that
        have locked such nodes keep their own references to the pages, and unlock as usual."""
        tainted = [each for each in node.path() if pages.intersection(each.pages)]
        if tainted and not tainted[-1].is_forgotten:
            self._detach(tainted[-1])

    def _detach(self, top: Node) -> None:
        """``top`` keeps its parent, because a sequence that locks ``top`` has locked the nodes above it, too."""
        assert top.parent is not None, "a root holds no pages"
        del top.parent.children[top.atom.key]
        stack = [top]
        while stack:
            node = stack.pop()
            stack += node.children.values()
            self._num_pages -= len(node.pages)
            self._num_evictable -= len(node.pages) if node.locks == 0 else 0
            self._pool.release(node.pages)
            node.pages, node.is_forgotten = [], True
        self._tidy(top.parent)

    def evict(self, num_pages: int) -> int:
        """Frees at least ``num_pages`` pages if that many are evictable. Returns the number of freed pages."""
        freed = 0
        while freed < num_pages and self._heap:
            last_used, _, node = heapq.heappop(self._heap)
            if not _may_go(node) or node.last_used != last_used:
                continue
            freed += len(node.pages)
            self._remove(node)
        return freed

    def flush(self) -> int:
        """Removes all unlocked nodes. Returns the number of freed pages."""
        return self.evict(self._num_evictable)

    def check(self) -> None:
        """Raises AssertionError unless counts, locks and references agree."""
        pages = evictable = 0
        for root in self._roots.values():
            assert root.children, "an empty namespace was kept"
            stack = list(root.children.values())
            while stack:
                node = stack.pop()
                assert len(node.pages) == node.atom.num_pages
                assert all(self._pool.references(page) >= 1 for page in node.pages), (
                    "a cached page is free"
                )
                assert node.locks or all(self._pool.references(page) == 1 for page in node.pages), (
                    "a page that counts as evictable has another owner"
                )
                assert node.locks >= sum(child.locks for child in node.children.values())
                assert node.last_used >= max(
                    (c.last_used for c in node.children.values()), default=0
                )
                pages += len(node.pages)
                evictable += len(node.pages) if node.locks == 0 else 0
                stack += node.children.values()
        assert (pages, evictable) == (self._num_pages, self._num_evictable), "page counts disagree"

    def _touch(self, node: Node) -> None:
        tick = next(self._ticks)
        for each in node.path():
            each.last_used = tick

    def _offer(self, node: Node) -> None:
        if _may_go(node):
            heapq.heappush(self._heap, (node.last_used, next(self._ties), node))
            if len(self._heap) > 64 + 4 * self._num_pages:
                self._rebuild_heap()

    def _rebuild_heap(self) -> None:
        """Drops entries that have become void, so that the heap stays as large as the tree."""
        alive = {id(n): n for _, _, n in self._heap if _may_go(n)}
        self._heap = [(n.last_used, next(self._ties), n) for n in alive.values()]
        heapq.heapify(self._heap)

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None, "a root is not removed like this"
        del parent.children[node.atom.key]
        node.parent = None
        self._pool.release(node.pages)
        self._num_pages -= len(node.pages)
        self._num_evictable -= len(node.pages)
        self._tidy(parent)

    def _tidy(self, parent: Node) -> None:
        """After a child of ``parent`` has gone."""
        if parent.parent is not None:
            self._offer(parent)
        elif not parent.children:
            del self._roots[parent.atom.key]


def _may_go(node: Node) -> bool:
    """Whether a node is in the tree, a leaf of it, and not locked."""
    return (
        node.parent is not None and not node.children and node.locks == 0 and not node.is_forgotten
    )
