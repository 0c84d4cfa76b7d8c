"""The tree and both pools under random traffic against a dict of cached prefixes."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test


def test_random_traffic_agrees_with_the_dict(tree_machine: type[RuleBasedStateMachine]) -> None:
    class Counted(tree_machine):  # type: ignore[misc, valid-type]
        steps = 0

    traffic = settings(
        max_examples=400,
        stateful_step_count=50,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(Counted, settings=traffic)
    assert Counted.steps >= 10_000
