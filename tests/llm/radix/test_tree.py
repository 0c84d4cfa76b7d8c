"""Hits that users feel, and the order of eviction, through a small serving loop."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from transom.llm.radix.keys import build_key
from transom.llm.radix.node import Rank
from transom.llm.radix.retention import Window


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1000, length).tolist()


SYSTEM, FIRST, SECOND, THIRD = (
    prompt(seed, length) for seed, length in ((1, 100), (2, 60), (3, 50), (4, 40))
)


@pytest.mark.parametrize("page", [1, 4, 16])
def test_the_second_request_on_a_shared_system_prompt_hits(make_server: Any, page: int) -> None:
    server = make_server(page=page)
    assert server.serve(SYSTEM + FIRST, turns=[len(SYSTEM)]) == 0
    assert server.serve(SYSTEM + SECOND, turns=[len(SYSTEM)]) == len(SYSTEM) // page * page


def test_an_unmarked_branching_point_is_learnt_from_its_second_request(make_server: Any) -> None:
    server = make_server()
    server.serve(SYSTEM + FIRST)
    assert server.serve(SYSTEM + SECOND) == 0
    assert server.serve(SYSTEM + THIRD) == len(SYSTEM)
    assert server.tree.stats.healed_tokens > 0
    unlearning = make_server()
    hits = [unlearning.serve(SYSTEM + more, learn=False) for more in (FIRST, SECOND, THIRD)]
    assert hits == [0, 0, 0]


def test_a_repeat_of_the_same_prompt_computes_one_page(make_server: Any) -> None:
    server = make_server(page=4)
    server.serve(SYSTEM, FIRST, turns=[len(SYSTEM)])
    assert server.serve(SYSTEM, turns=[len(SYSTEM)]) == len(SYSTEM) - 4


def test_a_truncated_prompt_hits_at_the_last_interval(make_server: Any) -> None:
    server = make_server(interval=32)
    server.serve(SYSTEM + FIRST)
    assert server.serve((SYSTEM + FIRST)[:90]) == 64
    without = make_server(interval=0)
    without.serve(SYSTEM + FIRST)
    assert without.serve((SYSTEM + FIRST)[:90]) == 0


def test_the_answer_is_not_prefilled_again_next_turn(make_server: Any) -> None:
    server = make_server()
    server.serve(SYSTEM, FIRST)
    assert server.serve(SYSTEM + FIRST + SECOND) == len(SYSTEM + FIRST)


def test_hits_stay_until_the_pool_is_really_full(make_server: Any) -> None:
    """Sessions in turn, each far longer than the window: extra windows must not push out the tails."""
    server = make_server(window=8, full_pages=9000, swa_pages=256, interval=32, chunk=64)
    sessions = [prompt(seed, 600) for seed in range(12)]
    for turn in range(3):
        for number, tokens in enumerate(sessions):
            hit = server.serve(tokens)
            assert turn == 0 or hit == len(tokens) - 40
            sessions[number] = tokens + prompt(100 * turn + number + 50, 40)


def test_one_window_a_session_is_enough(make_server: Any) -> None:
    """A next turn lowers the rank of the former tail, so the pool needs no second window for each session."""
    server = make_server(window=8, full_pages=9000, swa_pages=64 + 12 * 12, chunk=64)
    sessions = [prompt(seed, 100) for seed in range(12)]
    for turn in range(4):
        for number, tokens in enumerate(sessions):
            hit = server.serve(tokens)
            assert turn == 0 or hit == len(tokens) - 40
            sessions[number] = tokens + prompt(100 * turn + number + 50, 40)


def test_a_long_prompt_in_chunks_is_one_prefix(make_server: Any) -> None:
    server = make_server(page=4, chunk=16)
    server.serve(SYSTEM, FIRST)
    assert server.serve(SYSTEM + FIRST + SECOND) == len(SYSTEM + FIRST)
    server.tree.evict_swa(10**6)
    assert not server.tree.roots, "without windows nothing can be hit"
    assert server.pools.full_free == len(server.pools.owner)


def test_eviction_takes_the_coldest_leaf_and_spares_what_is_shared(make_server: Any) -> None:
    server = make_server()
    for more in (FIRST, SECOND, THIRD):
        server.serve(SYSTEM + more, turns=[len(SYSTEM)])
    server.serve(SYSTEM + FIRST, turns=[len(SYSTEM)])
    assert server.tree.evict_full(1) == len(SECOND)
    assert server.tree.match(build_key([*SYSTEM, *SECOND])).prefix_len == len(SYSTEM)
    assert server.tree.match(build_key([*SYSTEM, *FIRST, 0])).length == len(SYSTEM + FIRST)


def test_swa_eviction_empties_extra_windows_before_tails(make_server: Any) -> None:
    server = make_server(interval=32)
    server.serve(SYSTEM + FIRST)
    extras = server.tree.swa_evictable - 9
    assert server.tree.evict_swa(extras) >= extras
    assert server.tree.match(build_key([*SYSTEM, *FIRST, 0])).length == len(SYSTEM + FIRST)
    assert server.tree.match(build_key(SYSTEM)).length == 0


def test_a_split_keeps_its_place_among_the_windows(make_server: Any) -> None:
    server = make_server(window=9)
    tree = server.tree
    old, new = prompt(7, 40), prompt(8, 40)
    for tokens in (old, new):
        lock = tree.lock(tree.match(build_key(tokens), 0))
        tree.insert(build_key(tokens), np.array(server._take(40)), lock, keep=[Window(0, 40, Rank.TAIL)])
        tree.unlock(lock)
    tree.unlock(tree.lock(tree.match(build_key(old), 20)))
    assert tree.evict_swa(1) == 11, "what lies between the hit and the last window is the coldest"
    assert tree.match(build_key(old), 31).length == 20
    assert tree.match(build_key([*new, 0])).length == 40


def test_a_pinned_window_is_not_merged_into_its_neighbour(make_server: Any) -> None:
    """Live nodes of one rank and equal full pins, of which a running request's window covers only some."""
    server = make_server(window=8)
    tree, pools = server.tree, server.pools
    tokens = prompt(9, 12)
    lock = tree.lock(tree.match(build_key(tokens)))
    tree.insert(build_key(tokens), np.array(server._take(12)), lock, keep=[Window(0, 12, Rank.TAIL)])
    other = tree.lock(tree.match(build_key([*tokens, 0])))
    tree.unlock(lock)
    tree.check_integrity()
    tree.evict_swa(100)
    assert pools.swa_mapped(other.node.pages).all()
    assert tree.swa_protected == 8
    tree.unlock(other)
    tree.check_integrity()


def test_a_node_that_a_lock_ends_at_is_not_merged_into_its_child(make_server: Any) -> None:
    server = make_server(window=8)
    tree = server.tree
    tokens = prompt(10, 12)
    lock = tree.lock(tree.match(build_key(tokens)))
    tree.insert(build_key(tokens), np.array(server._take(12)), lock, keep=[Window(0, 12, Rank.TAIL)])
    tree.unlock(lock)
    upper = tree.lock(tree.match(build_key(tokens), 4))
    tree.release_swa(upper)
    tree.unlock(tree.lock(tree.match(build_key([*tokens, 0]))))
    tree.check_integrity()
    assert upper.length == 4
    tree.unlock(upper)
    assert len(tree.match(build_key([*tokens, 0])).path) == 1, "nothing keeps them apart any more"


def test_matching_changes_nothing_and_a_stale_match_cannot_be_locked(make_server: Any) -> None:
    server = make_server()
    server.serve(SYSTEM + FIRST)
    stale = server.tree.match(build_key(SYSTEM + FIRST))
    server.serve(SECOND)
    with pytest.raises(AssertionError, match="the tree changed"):
        server.tree.lock(stale)
    assert server.tree.full_protected == 0


def test_locks_are_released_once(make_server: Any) -> None:
    server = make_server()
    lock = server.tree.lock(server.tree.match(build_key(SYSTEM)))
    server.tree.unlock(lock)
    with pytest.raises(AssertionError, match="unlocked twice"):
        server.tree.unlock(lock)
    assert not server.tree.roots
