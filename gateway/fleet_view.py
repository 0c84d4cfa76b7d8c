"""GET /v1/fleet: the workers as a client may see them, with numbers instead of addresses.

Gateway process; pure. What workers report is passed on within bounds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from transom.gateway.fleet import STAGES, Fleet, Worker

_MAX_WORKERS = 256
_MAX_FIGURES = 64


def show_fleet(fleet: Fleet, own_load: Mapping[str, float]) -> dict[str, Any]:
    """Return the state of all stages; of a stage with very many workers, the first ones."""
    missing = fleet.missing()
    return {
        "object": "fleet",
        "ready": not missing,
        "missing": missing,
        "gateway": _figures(own_load),
        "stages": [
            {
                "stage": stage,
                "total": len(workers),
                "ready": sum(worker.ready for worker in workers),
                "workers": [_worker(fleet, worker) for worker in workers[:_MAX_WORKERS]],
            }
            for stage in STAGES
            for workers in [fleet.workers(stage)]
        ],
    }


def _worker(fleet: Fleet, worker: Worker) -> dict[str, Any]:
    age_s = fleet.age_s(worker)
    return {
        "name": fleet.name(worker.address),
        "ready": worker.ready,
        "age_s": None if age_s is None else round(age_s, 3),
        "in_work": worker.own_requests,
        "in_work_tokens": worker.own_tokens,
        "load": _figures(worker.load),
    }


def _figures(load: Mapping[str, float]) -> dict[str, float]:
    return {key[:64]: value for key, value in list(load.items())[:_MAX_FIGURES] if math.isfinite(value)}
