"""Sends the rounds of `transom bench serve` and times every piece of every answer.

Runs in the benchmark's process. What is sent is a function of (seed, round); every server gets the same.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from transom.bench.media import make_part
from transom.bench.report import progress_bar
from transom.bench.serve import arrivals
from transom.client import Answer, ChatClient
from transom.config import client_api_key
from transom.errors import TransomError

Row = dict[str, Any]
_QUESTION = "What is this?"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """`rate` > 0 makes it an open loop; lengths are in tokens."""

    requests: int
    concurrency: int
    rate: float
    prompt_lens: tuple[int, ...]
    shared_len: int
    output_len: int
    mix: Mapping[str, float]
    token_ids: tuple[int, int]
    rounds: int
    seed: int
    model: str


def draw_round(load: Load, number: int, model: str) -> list[tuple[str, dict[str, Any]]]:
    """Return kind and body of each request of a round; text prompts are token ids, the same anywhere."""
    rng = random.Random(f"{load.seed}/{number}")
    low, high = load.token_ids
    shared = [rng.randrange(low, high) for _ in range(load.shared_len)]
    kinds = rng.choices(list(load.mix), list(load.mix.values()), k=load.requests)
    bodies = []
    for index, kind in enumerate(kinds):
        body: dict[str, Any] = {"model": model, "max_tokens": load.output_len, "temperature": 0}
        if kind == "text":
            own = load.prompt_lens[index % len(load.prompt_lens)] - load.shared_len
            body |= {"prompt": shared + [rng.randrange(low, high) for _ in range(own)], "ignore_eos": True}
        else:
            part = make_part(kind, (load.seed, 1_000_000 * number + index))
            body["messages"] = [{"role": "user", "content": [part, {"type": "text", "text": _QUESTION}]}]
        bodies.append((kind, body))
    return bodies


async def measure(servers: Mapping[str, str], load: Load, *, quiet: bool) -> tuple[list[Row], list[Row]]:
    """Run all rounds on all servers in turns; return a row a request and a row a round and server."""
    rows: list[Row] = []
    rounds: list[Row] = []
    async with AsyncExitStack() as stack:
        clients, models = {}, {}
        for name, url in servers.items():
            client = await stack.enter_async_context(ChatClient(url, api_key=client_api_key()))
            clients[name], models[name] = client, load.model or (await client.models())[0]
        total = (load.rounds + 1) * load.requests * len(servers)
        with progress_bar("requests", total, quiet=quiet) as advance:
            # Round 0 warms up and is not reported.
            for number in range(load.rounds + 1):
                names = list(servers)
                for name in names[number % len(names) :] + names[: number % len(names)]:
                    bodies = draw_round(load, number, models[name])
                    sent, wall_s = await _send(clients[name], load, number, bodies, advance)
                    if number:
                        about = {"server": name, "round": number}
                        rows += [{**about, **row} for row in sent]
                        rounds.append({**about, **_round(sent, wall_s)})
    return rows, rounds


async def _send(
    client: ChatClient, load: Load, number: int, bodies: Sequence[tuple[str, dict[str, Any]]], advance: Any
) -> tuple[list[Row], float]:
    begin = time.perf_counter()
    gate = asyncio.Semaphore(load.requests if load.rate else load.concurrency)
    moments = (
        arrivals(len(bodies), load.rate, random.Random(f"arrivals {load.seed}/{number}"))
        if load.rate
        else [0.0] * len(bodies)
    )

    async def one(index: int) -> Row:
        await asyncio.sleep(max(0.0, begin + moments[index] - time.perf_counter()))
        async with gate:
            # In an open loop a request is late by what its sender is late.
            late_s = time.perf_counter() - begin - moments[index] if load.rate else 0.0
            kind, body = bodies[index]
            row = await _one(client, kind, body, late_s)
        advance()
        return {"number": index, **row}

    rows = await asyncio.gather(*(one(index) for index in range(len(bodies))))
    return list(rows), time.perf_counter() - begin


async def _one(client: ChatClient, kind: str, body: dict[str, Any], late_s: float) -> Row:
    answer, error = Answer(), None
    try:
        async for _ in client.stream(body, answer):
            pass
    except TransomError as failure:
        error = failure.message
    usage = answer.usage
    tokens = int(usage.get("completion_tokens") or 0)
    spread_s = answer.e2e_s - answer.arrivals_s[0] if answer.arrivals_s else 0.0
    return {
        "kind": kind,
        "error": error,
        "prompt_tokens": int(usage.get("prompt_tokens") or 0),
        "cached_tokens": int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0),
        "completion_tokens": tokens,
        "ttft_ms": 1000 * (answer.arrivals_s[0] + late_s) if answer.arrivals_s else None,
        "tpot_ms": 1000 * spread_s / (tokens - 1) if tokens > 1 else None,
        "e2e_ms": 1000 * (answer.e2e_s + late_s),
        "itl_ms": [round(1000 * (b - a), 3) for a, b in pairwise(answer.arrivals_s)],
    }


def _round(rows: Sequence[Row], wall_s: float) -> Row:
    good = [row for row in rows if row["error"] is None]
    prompt = sum(row["prompt_tokens"] for row in good)
    return {
        "requests": len(rows),
        "failed": len(rows) - len(good),
        "wall_s": round(wall_s, 4),
        "requests_per_s": round(len(good) / wall_s, 4),
        "output_tokens_per_s": round(sum(row["completion_tokens"] for row in good) / wall_s, 3),
        "input_tokens_per_s": round(prompt / wall_s, 3),
        "hit_rate": round(sum(row["cached_tokens"] for row in good) / prompt, 4) if prompt else 0.0,
    }
