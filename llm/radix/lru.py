"""An intrusive list from coldest to hottest: every update is O(1), and a place between two others can be had.

Used by the radix tree, whose nodes carry one link a list. Knows nothing of nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Link(Generic[T]):
    """A place in a list, or out of any list while `colder` is None."""

    __slots__ = ("colder", "hotter", "owner")

    def __init__(self, owner: T | None = None) -> None:
        self.owner = owner
        self.colder: Link[T] | None = None
        self.hotter: Link[T] | None = None

    @property
    def listed(self) -> bool:
        return self.colder is not None

    def remove(self) -> None:
        """Leave the list."""
        colder, hotter = self.colder, self.hotter
        assert colder is not None, "not in a list"
        assert hotter is not None
        colder.hotter = hotter
        hotter.colder = colder
        self.colder = self.hotter = None

    def insert_hotter(self, link: Link[T]) -> None:
        """Put an unlisted link right on the hotter side of this one."""
        assert link.colder is None, "already in a list"
        hotter = self.hotter
        assert hotter is not None, "not in a list"
        link.colder, link.hotter = self, hotter
        hotter.colder = link
        self.hotter = link


class LruList(Generic[T]):
    """Owners ordered by last use; the sentinel is colder than the coldest and hotter than the hottest."""

    __slots__ = ("_ends",)

    def __init__(self) -> None:
        ends: Link[T] = Link()
        ends.colder = ends.hotter = ends
        self._ends = ends

    def append(self, link: Link[T]) -> None:
        """Make an unlisted link the hottest."""
        hottest = self._ends.colder
        assert hottest is not None
        hottest.insert_hotter(link)

    def coldest(self) -> T | None:
        link = self._ends.hotter
        assert link is not None
        return link.owner

    def __iter__(self) -> Iterator[T]:
        link = self._ends.hotter
        while link is not None and link.owner is not None:
            yield link.owner
            link = link.hotter
