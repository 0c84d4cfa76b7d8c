"""Each rule of the tree broken on purpose: the state machine must notice, or it proves nothing."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from transom.llm.radix import node as node_module
from transom.llm.radix import tree as tree_module
from transom.llm.radix.tree import RadixTree

_MUTANTS = {
    "ignore a tombstone": (tree_module, "run + end - depth if node.live else 0", "run + end - depth"),
    "accept a short window": (tree_module, "run >= live_len or run == depth", "run > 0"),
    "match the whole prompt": (tree_module, "len(key) - 1 if limit is None", "len(key) if limit is None"),
    "ignore the namespace": (
        tree_module,
        "self.roots.get(key.namespace)",
        "next(iter(self.roots.values()), None)",
    ),
    "forget the full lock": (tree_module, "self._pin_path(node, None)", "pass"),
    "forget the SWA lock": (tree_module, "want = max(node.end - self.live_len, 0)", "want = node.end"),
    "lock one page": (
        tree_module,
        "want = max(node.end - self.live_len, 0)",
        "want = node.end - self.page_size",
    ),
    "forget to move the full lock": (tree_module, "self._pin_path(node, lock.node)", "pass"),
    "never release SWA": (
        tree_module,
        "        self.release_swa(lock)\n        lock.held",
        "        lock.held",
    ),
    "double free": (
        tree_module,
        "frees.full.append(new.between(depth, node.end))",
        "frees.full += [new.between(depth, node.end)] * 2",
    ),
    "leak duplicates": (tree_module, "frees.full.append(new.between(depth, node.end))", "pass"),
    "leak duplicate SWA pages": (tree_module, "frees.swa.append(own)", "pass"),
    "heal the flag only": (tree_module, "frees.moves.append((own, piece.pages))", "pass"),
    "heal the whole node": (tree_module, "piece = self._isolate(node, low, high)", "piece = node"),
    "free the tree's page, not the duplicate": (
        tree_module,
        "frees.full.append(new.between(depth, node.end))",
        "frees.full.append(node.pages)",
    ),
    "keep dead leaves": (tree_module, "self._tidy(lock.node, frees)", "pass"),
    "leave empty roots": (tree_module, "if not last.children and not last.full_pins:", "if last.start:"),
    "drop used roots": (tree_module, "if not last.children and not last.full_pins:", "if not last.children:"),
    "tombstone without freeing": (tree_module, "            frees.swa.append(node.pages)\n", ""),
    "split without SWA pins": (node_module, "node.full_pins, node.swa_pins\n", "node.full_pins, 0\n"),
    "split without liveness": (
        node_module,
        "upper.live, upper.rank = node.live",
        "upper.live, upper.rank = True",
    ),
    "merge past a branch": (node_module, "and len(upper.children) == 1", ""),
    "list pinned windows": (node_module, "if node.swa_pins == 0:", "if node.swa_pins <= 1:"),
    "keep a stale index": (node_module, "node.index.cut(node)", "pass"),
    "forget what an index passed": (tree_module, "run = index.run_after(count, run)", "run = depth"),
    "end anywhere in an index": (
        tree_module,
        "if last := index.last_usable(count, run):",
        "if last := count:",
    ),
    "settle the first node alone that an index passed": (
        tree_module,
        "nodes[bisect_right(ends, low) : bisect_left(ends, high) + 1]",
        "nodes[:1]",
    ),
    "settle one node too few": (
        tree_module,
        "bisect_left(ends, high) + 1]",
        "bisect_left(ends, high)]",
    ),
    "take an index for granted on insert": (
        tree_module,
        "(count := index.passed(new.key.raw, new.end))",
        "(count := bisect_right(index.ends, new.end))",
    ),
    "take all pages of an index": (
        tree_module,
        "index.pages[: (ends[-1] - depth) // self.page_size]",
        "index.pages",
    ),
    "no page is mapped": (tree_module, "if not mapped.any():", "if not mapped.all():"),
    "miscount pins": (node_module, "self.swa_protected += len(node)", "self.swa_protected += 1"),
}


def mutant_tree(module: ModuleType, old: str, new: str) -> type[RadixTree]:
    """Return the tree built from its own source with one rule broken."""
    source = inspect.getsource(module)
    assert source.count(old) == 1, f"{old!r} is in {module.__name__} {source.count(old)} times"
    broken: dict[str, Any] = {"__name__": module.__name__}
    exec(compile(source.replace(old, new), f"mutant of {module.__name__}", "exec"), broken)
    if module is tree_module:
        return broken["RadixTree"]  # type: ignore[no-any-return]
    tree: dict[str, Any] = {"__name__": tree_module.__name__}
    exec(compile(inspect.getsource(tree_module), "tree on a mutant", "exec"), tree)
    tree["NodeStore"] = broken["NodeStore"]
    return tree["RadixTree"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", _MUTANTS)
def test_a_broken_rule_is_noticed(name: str, tree_machine: type[RuleBasedStateMachine]) -> None:
    class Mutant(tree_machine):  # type: ignore[misc, valid-type]
        tree_type = mutant_tree(*_MUTANTS[name])

    quick = settings(
        max_examples=150,
        stateful_step_count=50,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Mutant, settings=quick)
