"""Why requests wait for an engine: fixed words that a metric can carry, and how many wait for which.

Used by the scheduler, which finds the reason, and by the engine, which counts. Pure: knows no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple


class WaitReason(StrEnum):
    """What has to come before a request without pages can run."""

    FULL_POOL = "full_pool"
    SWA_POOL = "swa_pool"
    BATCH_TOKENS = "batch_tokens"
    RUNNING_REQUESTS = "running_requests"
    SHARED_PROMPT = "shared_prompt"
    HOST_MEMORY = "host_memory"
    EMBEDDINGS = "embeddings"


class Wait(NamedTuple):
    """A reason, with `text` that has the figures of the moment in it."""

    reason: WaitReason
    text: str


# By the name that the count of each reason has among the figures of a load.
WAIT_FIGURES: Mapping[str, WaitReason] = {f"waiting_{reason}": reason for reason in WaitReason}


def count_waits(waiting: int, unready: int, following: int, head: Wait | None) -> dict[str, float]:
    """Return by figure how many of `waiting` requests wait for what; the counts add up to `waiting`.

    `unready` have nothing to compute before more of their prompt arrives, `following` let another compute
    what they share. All others stand behind the first in line: what it waits for, they wait for.
    """
    counts = dict.fromkeys(WAIT_FIGURES, 0.0)
    counts["waiting_embeddings"] += unready
    counts["waiting_shared_prompt"] += following
    # A step looks at no more than may run. If all of those were let in or follow, these stand behind them.
    if head is None or head.reason is WaitReason.SHARED_PROMPT:
        reason = WaitReason.RUNNING_REQUESTS
    else:
        reason = head.reason
    counts[f"waiting_{reason}"] += max(waiting - unready - following, 0)
    return counts
