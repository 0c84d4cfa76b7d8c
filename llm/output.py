"""What is said of a token that came out: whether it ends its request, where the time went (engine thread).

Pure functions of a request; knows no pools and no schedule.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from transom.llm.request import Request, TokenEvent
from transom.llm.sampler import Draw
from transom.messages import FinishReason


def finish_reason(request: Request, token: int, eos_ids: Collection[int]) -> FinishReason | None:
    """Return why the request ends with this token, its latest; None if it goes on."""
    sampling = request.sampling
    ends = token in eos_ids and not sampling.ignore_eos
    complete = request.constraint is not None and request.constraint.complete
    if ends or complete or token in sampling.stop_token_ids:
        return "stop"
    return "length" if len(request.output_ids) >= request.max_tokens else None


def timings_ms(request: Request, now_s: float) -> dict[str, float]:
    """Return what the time until now went to; `ahead` ends with the last piece of the prompt."""
    queued_s = request.admitted_s
    steps = {"queue": queued_s - request.arrived_s}
    if request.complete_s > queued_s:
        steps["ahead"] = request.complete_s - queued_s
        queued_s = request.complete_s
    steps["compute"] = now_s - queued_s
    return {name: round(seconds * 1e3, 3) for name, seconds in steps.items()}


def token_event(
    request: Request, index: int, drawn: Draw, reason: FinishReason | None, timings: Mapping[str, float]
) -> TokenEvent:
    assert drawn.token is not None
    return TokenEvent(
        request.request_id,
        index,
        drawn.token,
        emit=reason != "stop",
        finish_reason=reason,
        logprob=drawn.logprob,
        timings_ms=dict(timings),
        cached_tokens=request.cached_tokens,
    )
