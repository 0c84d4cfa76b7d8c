"""Orders in which an engine serves requests: pure functions over what the scheduler sees of them.

The same in server, tests and simulator. Knows no torch, no clock of its own and no pools. Priority goes first
in each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from transom.errors import ConfigError
from transom.llm.scheduler import Order, RequestView

POLICIES = ("fewest-uncached", "fcfs", "longest-prefix", "deadline")


def make_order(policy: str, credit: Callable[[], float]) -> Order:
    """Return the order of that name; the credit, in tokens a second, is for "fewest-uncached" alone."""
    if policy == "fewest-uncached":
        return fewest_uncached_first(credit)
    order = {
        "fcfs": first_come_first_served,
        "longest-prefix": longest_prefix_first,
        "deadline": earliest_deadline_first,
    }.get(policy)
    if order is None:
        raise ConfigError(f"schedule_policy {policy!r}: one of {', '.join(POLICIES)}")
    return order


def fewest_uncached_first(credit: Callable[[], float]) -> Order:
    """Order by the tokens left to compute, less a credit for each second since the request arrived.

    A request of n uncached tokens is passed only by those that arrive at most n / credit seconds after it:
    both get the same credit for the time they wait together, so at one credit the order of two requests
    changes only by computing, which never puts a request back.
    """

    def order(views: Sequence[RequestView], now_s: float) -> list[RequestView]:
        per_s = credit()

        def cost(view: RequestView) -> float:
            return view.known_len - view.stored_len - per_s * (now_s - view.arrived_s)

        return sorted(views, key=lambda view: (-view.priority, cost(view), view.arrived_s))

    return order


def first_come_first_served(views: Sequence[RequestView], now_s: float) -> list[RequestView]:
    """Order by age."""
    return sorted(views, key=lambda view: (-view.priority, view.arrived_s))


def longest_prefix_first(views: Sequence[RequestView], now_s: float) -> list[RequestView]:
    """Order by how much is cached or computed already: the most hits, and no bound on the wait of others."""
    return sorted(views, key=lambda view: (-view.priority, -view.stored_len, view.arrived_s))


def earliest_deadline_first(views: Sequence[RequestView], now_s: float) -> list[RequestView]:
    """Order by deadline, equal ones by age."""
    return sorted(views, key=lambda view: (-view.priority, view.deadline_s, view.arrived_s))
