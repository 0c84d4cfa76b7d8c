"""Runs of pages: the allocator against a set of pages, the choice of victims against all choices."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transom.shared_cache.extents import Extents, choose_victims, coldest_first, gaps
from transom.shared_cache.layout import Geometry, Tables, Word


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=60), st.integers(0, 2**30))
def test_extents_against_a_set_of_pages(steps: list[tuple[bool, int]], seed: int) -> None:
    geometry = Geometry.of_size(160 * 1024)
    tables = Tables(bytearray(geometry.size_bytes), geometry)
    tables.initialise()
    extents = Extents(tables)
    rng = random.Random(seed)
    free = set(range(geometry.pages))
    held: list[tuple[int, int]] = []
    for takes, pages in steps:
        if takes and len(held) < geometry.entries:
            start = extents.take(pages)
            runs = [set(range(at, at + pages)) for at in range(geometry.pages)]
            assert (start is None) == (not any(run <= free for run in runs))
            if start is not None:
                assert set(range(start, start + pages)) <= free
                free -= set(range(start, start + pages))
                held.append((start, pages))
        elif held:
            start, pages = held.pop(rng.randrange(len(held)))
            extents.give(start, pages)
            free |= set(range(start, start + pages))
        listed = [set(range(s, s + n)) for s, n in extents.free.tolist()]
        assert sum(map(len, listed)) == len(free)
        assert set().union(*listed) == free
        used = np.array(sorted(held), np.int64).reshape(-1, 2)
        assert np.array_equal(extents.free, gaps(used, geometry.pages))
        assert tables.words[Word.USED_PAGES] == geometry.pages - len(free)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[int, list[tuple[int, int, int]], list[tuple[int, int]]]:
    """Runs side by side: (total pages, entries as (slot, start, pages) by age, free extents)."""
    entries, free, at = [], [], 0
    for slot in range(draw(st.integers(1, 8))):
        kind = draw(st.sampled_from(("entry", "entry", "leased", "free")))
        size = draw(st.integers(1, 5))
        if kind == "entry":
            entries.append((slot, at, size))
        elif kind == "free" and (not free or sum(free[-1]) < at):
            free.append((at, size))
        at += size
    return at, draw(st.permutations(entries)), free


@given(layouts(), st.integers(1, 20))
def test_victims_against_all_choices(
    layout: tuple[int, list[tuple[int, int, int]], list[tuple[int, int]]], pages: int
) -> None:
    total, by_age, free = layout
    empty = {page for start, size in free for page in range(start, start + size)}

    def makes_room(chosen: tuple[tuple[int, int, int], ...]) -> bool:
        open_pages = empty | {p for _, start, size in chosen for p in range(start, start + size)}
        return any(set(range(at, at + pages)) <= open_pages for at in range(total))

    if makes_room(()):
        return
    victims = choose_victims(np.array(free, np.int64).reshape(-1, 2), by_age, pages)
    needed = next((n for n in range(1, len(by_age) + 1) if makes_room(tuple(by_age[:n]))), None)
    if needed is None:
        assert victims is None
        return
    assert victims is not None
    chosen = tuple(entry for entry in by_age if entry[0] in victims)
    assert makes_room(chosen)
    assert set(victims) <= {slot for slot, _, _ in by_age[:needed]}
    cheapest = min(
        sum(size for _, _, size in some)
        for count in range(1, needed + 1)
        for some in itertools.combinations(by_age[:needed], count)
        if makes_room(some)
    )
    assert sum(size for _, _, size in chosen) == cheapest


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 300])
def test_coldest_first_is_the_order_of_use(count: int) -> None:
    last_used = np.random.default_rng(count).permutation(count).astype(np.uint64)
    slots = np.arange(count) + 1000
    order = list(coldest_first(slots, last_used))
    assert order == (slots[np.argsort(last_used)]).tolist()
