"""What the scheduler sees of an engine's requests, cached prefixes included (engine thread).

Asks the prefix cache about those that may run in the coming step, and no others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from transom.llm.prefix_cache import PrefixCache
from transom.llm.request import Request
from transom.llm.scheduler import Order, RequestView

Views = tuple[list[RequestView], list[RequestView]]


def look(
    requests: Mapping[str, Request],
    running: Mapping[str, Request],
    cache: PrefixCache | None,
    order: Order,
    most: int,
    now_s: float,
) -> Views:
    """Return the running requests and those of the waiting that a step may admit, at most `most`."""
    if cache is None:
        waiting = [_view(r) for r in requests.values() if r.request_id not in running]
        return [_view(r) for r in running.values()], waiting
    for request in running.values():
        cache.catch_up(request)
    line = [r for r in requests.values() if r.ready_len and r.request_id not in running]
    if len(line) > most:
        # The place in line follows from what was last known to be cached.
        guessed = order([replace(_view(r), stored_len=cache.guess(r)) for r in line], now_s)
        line = [requests[view.request_id] for view in guessed[:most]]
    shares = cache.shares([*(r for r in running.values() if not r.decoding), *line])

    def refined(request: Request) -> RequestView:
        view = cache.refine(request, _view(request))
        shared = shares.get(request.request_id)
        return replace(view, shares=shared) if shared else view

    return [refined(r) for r in running.values()], [refined(r) for r in line]


def _view(request: Request) -> RequestView:
    kv = request.kv
    return RequestView(
        request_id=request.request_id,
        arrived_s=request.arrived_s,
        priority=request.priority,
        # What a step in flight decodes is as good as stored, and the token that it draws as good as known.
        stored_len=request.computed + request.flying,
        known_len=request.known_len + request.flying,
        ready_len=request.ready_len,
        decoding=request.decoding,
        full_pages=kv.count if kv else 0,
        swa_pages=kv.swa_count if kv else 0,
        deadline_s=request.deadline_s,
    )
