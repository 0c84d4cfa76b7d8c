"""The ring: stable orders, only a lost node's keys move, and no node gets more than its bounded share."""

from __future__ import annotations

import math
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from transom.hash_ring import FREE, HashRing, pick

NODES = [f"tcp://10.0.0.{n}:7001" for n in range(1, 6)]
KEYS = [f"key-{n}" for n in range(2000)]
RING = HashRing(NODES)


def owners(ring: HashRing) -> dict[str, str]:
    return {key: ring.order(key)[0] for key in KEYS}


def limit_of(items: float, weights: int, weight: int) -> float:
    return max(FREE * weight, math.ceil(1.25 * items / weights * weight))


def test_an_order_holds_each_node_once() -> None:
    ring = HashRing(NODES)
    assert len(ring) == 5
    for key in KEYS[:100]:
        assert sorted(ring.order(key)) == sorted(NODES)


def test_order_does_not_depend_on_how_the_nodes_are_listed() -> None:
    left, right = HashRing(NODES), HashRing(reversed(NODES))
    assert all(left.order(key) == right.order(key) for key in KEYS)


def test_a_lost_nodes_keys_alone_move_and_to_their_next_node() -> None:
    ring, lost = HashRing(NODES), NODES[2]
    smaller = HashRing([node for node in NODES if node != lost])
    for key in KEYS:
        assert smaller.order(key) == [node for node in ring.order(key) if node != lost]


def test_a_new_node_takes_about_its_share_and_moves_nothing_else() -> None:
    before, after = owners(HashRing(NODES[:4])), owners(HashRing(NODES))
    moved = [key for key in KEYS if before[key] != after[key]]
    assert {after[key] for key in moved} == {NODES[4]}
    assert 0.12 < len(moved) / len(KEYS) < 0.30


def test_shares_are_even_and_follow_weights() -> None:
    counts = Counter(owners(HashRing(NODES)).values())
    assert max(counts.values()) < 1.5 * len(KEYS) / len(NODES)
    weighted = Counter(owners(HashRing({NODES[0]: 3, NODES[1]: 1})).values())
    assert 2.0 < weighted[NODES[0]] / weighted[NODES[1]] < 4.5


def test_no_nodes() -> None:
    ring = HashRing()
    assert ring.order("x") == []
    assert pick([], {}) is None
    assert pick(["dead"], {}) is None


loads = st.dictionaries(st.sampled_from(NODES), st.integers(0, 50).map(float), min_size=1)


@given(loads, st.permutations(NODES))
def test_pick_is_usable_and_within_the_bound(load: dict[str, float], order: list[str]) -> None:
    node = pick(order, load)
    assert node in load
    limit = max(FREE, math.ceil(1.25 * (sum(load.values()) + 1) / len(load)))
    assert load[node] + 1 <= limit
    for earlier in order[: order.index(node)]:
        assert earlier not in load or load[earlier] + 1 > limit


weightings = st.dictionaries(st.sampled_from(NODES), st.integers(1, 8), min_size=1)


@given(loads, st.permutations(NODES), weightings)
def test_pick_bounds_each_node_by_its_weight(
    load: dict[str, float], order: list[str], weights: dict[str, int]
) -> None:
    node = pick(order, load, weights=weights)
    assert node in load
    total = sum(weights.get(one, 1) for one in load)
    limits = {one: limit_of(sum(load.values()) + 1, total, weights.get(one, 1)) for one in load}
    assert load[node] + 1 <= limits[node]
    for earlier in order[: order.index(node)]:
        assert earlier not in load or load[earlier] + 1 > limits[earlier]


@settings(max_examples=25, deadline=None)  # two rings are built for each
@given(st.sets(st.sampled_from(NODES), min_size=1), st.sets(st.sampled_from(NODES)), weightings)
def test_nodes_that_come_and_go_move_their_own_keys_only(
    before: set[str], change: set[str], weights: dict[str, int]
) -> None:
    """Any set of nodes joins and leaves at once: a key whose owner stays moves only to one that came."""
    after = before ^ change
    old = HashRing({node: weights.get(node, 1) for node in before})
    new = HashRing({node: weights.get(node, 1) for node in after})
    came = after - before
    for key in KEYS[:100]:
        owner = old.order(key)[0]
        moved_to = new.order(key)[0] if after else None
        if owner in after:
            assert moved_to == owner or moved_to in came
        elif moved_to is not None and moved_to not in came:
            # A lost node's keys go where the old ring would have sent them next.
            assert moved_to == next(node for node in old.order(key) if node in after)


@given(
    st.lists(st.tuples(st.sampled_from(KEYS[:8]), st.booleans(), st.sampled_from(NODES)), max_size=200),
    weightings,
)
def test_load_stays_bounded_through_arrivals_ends_and_deaths(
    events: list[tuple[str, bool, str]], weights: dict[str, int]
) -> None:
    """A model of the fleet: every arrival lands on a living node within the bound of that moment."""
    orders = {key: RING.order(key) for key in KEYS[:8]}
    load = dict.fromkeys(NODES, 0.0)
    for key, arrives, victim in events:
        if arrives:
            node = pick(orders[key], load, weights=weights)
            if not load:
                assert node is None
                continue
            assert node is not None
            total = sum(weights.get(one, 1) for one in load)
            load[node] += 1
            assert load[node] <= limit_of(sum(load.values()), total, weights.get(node, 1))
        elif load.get(victim, 0.0) > 0:
            load[victim] -= 1
        else:
            load.pop(victim, None)


@given(st.permutations(NODES), st.sets(st.sampled_from(NODES), min_size=1))
def test_an_idle_fleet_always_serves_from_the_owner(order: list[str], alive: set[str]) -> None:
    assert pick(order, dict.fromkeys(alive, 0.0)) == next(node for node in order if node in alive)


@given(st.lists(st.sampled_from(KEYS[:3]), max_size=200))
def test_a_hot_key_spills_over_instead_of_piling_up(keys: list[str]) -> None:
    load = dict.fromkeys(NODES, 0.0)
    for key in keys:
        node = pick(RING.order(key), load)
        assert node is not None
        load[node] += 1
    assert max(load.values()) <= limit_of(len(keys), len(NODES), 1)
