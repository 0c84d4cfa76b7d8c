"""`transom bench scheduler`: time to the first token of short and long prompts under each scheduling policy.

Without --trace nano's engine runs: short prompts arrive while a long one is computed. With --trace a worker
is simulated that serves a public trace of arrivals and shared prefix blocks, by the engine's own plan_step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from rich.table import Table

from transom.bench.origin import origin
from transom.bench.report import append_rows
from transom.commands.base import make_console, write_json
from transom.errors import ConfigError
from transom.hub import NANO_NAME, resolve_model
from transom.llm.policies import POLICIES, make_order
from transom.llm.scheduler import FreePages, Limits, Order, RequestView, plan_step

EXAMPLES = (
    "transom bench scheduler",
    "transom bench scheduler --trace mooncake_conversation_trace.jsonl --load 0.9 --out rows.jsonl",
)
BLOCK = 512  # tokens of a block in the Mooncake traces
_NO_LIMIT = FreePages(1 << 40, 1 << 40)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--policies", nargs="+", choices=POLICIES, default=["fcfs", "fewest-uncached"], help="to compare"
    )
    parser.add_argument(
        "--stretch", type=float, default=50, metavar="X", help="waiting_stretch (default %(default)s)"
    )
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="with nano (default %(default)s)")
    parser.add_argument(
        "--long",
        type=int,
        default=16_000,
        metavar="N",
        help="tokens of the long prompt (default %(default)s)",
    )
    parser.add_argument(
        "--shorts", type=int, default=24, metavar="N", help="short prompts, 0.3 s apart (default %(default)s)"
    )
    parser.add_argument("--trace", type=Path, metavar="FILE", help="simulate this trace (Mooncake's JSONL)")
    parser.add_argument(
        "--load", type=float, default=0.9, metavar="X",
        help="simulation: share of its time that the worker needs for the trace (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--batch-tokens", type=int, default=8192, metavar="N", help="simulation (default %(default)s)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="append the rows to this JSONL file")


def run(args: argparse.Namespace) -> int:
    if (
        args.repeats < 1
        or args.shorts < 1
        or args.long < 1
        or args.stretch < 1
        or not 0 < args.load <= 2
        or args.batch_tokens < 1
    ):
        raise ConfigError(
            "--repeats, --shorts, --long, --stretch and --batch-tokens: at least 1; --load: above 0, up to 2"
        )
    rows = _simulate(args) if args.trace else _live(args)
    if args.out:
        append_rows(args.out, [origin("scheduler") | row for row in rows])
    if args.json:
        write_json(origin("scheduler") | {"rows": rows})
        return 0
    table = Table("policy", "prompts", "count", "TTFT P50 s", "P90 s", "max s", title=str(rows[0]["source"]))
    for row in rows:
        times = (f"{row[f'ttft_{name}_s']:,.2f}" for name in ("p50", "p90", "max"))
        table.add_row(row["policy"], row["prompts"], f"{row['count']:,}", *times)
    console = make_console()
    console.print(table)
    if "host_share" in rows[0]:
        console.print(f"scheduling, page tables and cache: {rows[0]['host_share']:.1%} of a step's time")
    return 0


def _row(source: str, policy: str, prompts: str, times_s: Sequence[float]) -> dict[str, Any]:
    ordered = sorted(times_s)
    return {
        "source": source,
        "policy": policy,
        "prompts": prompts,
        "count": len(ordered),
        "ttft_p50_s": round(statistics.median(ordered), 4),
        "ttft_p90_s": round(ordered[int(len(ordered) * 0.9)], 4),
        "ttft_max_s": round(ordered[-1], 4),
    }


# Nano's engine.


def _live(args: argparse.Namespace) -> list[dict[str, Any]]:
    times: dict[tuple[str, str], list[float]] = {}
    host_shares = []
    for repeat in range(args.repeats):
        for policy in args.policies:  # interleaved, as a shared machine drifts
            found, host_share = _run_nano(policy, args.stretch, args.long, args.shorts, seed=repeat)
            host_shares.append(host_share)
            for kind, ttft_s in found:
                times.setdefault((policy, kind), []).append(ttft_s)
    source = f"{NANO_NAME}'s engine on one CPU thread"
    host = {"host_share": round(statistics.median(host_shares), 4)}  # of a step, outside of the model
    return [_row(source, policy, kind, found) | host for (policy, kind), found in sorted(times.items())]


def _run_nano(
    policy: str, stretch: float, long_len: int, shorts: int, seed: int
) -> tuple[list[tuple[str, float]], float]:
    """Serve a long prompt and short ones behind it; return (kind, TTFT) of each and the host's share."""
    # Late: help must not wait for torch.
    import torch

    from transom.llm.capacity import plan_pools
    from transom.llm.engine import Engine, EngineLimits
    from transom.llm.model.loader import load_language_model
    from transom.llm.pools import DualPools
    from transom.llm.prefix_cache import PrefixCache
    from transom.llm.radix.retention import RetentionPolicy
    from transom.llm.request import Event, Request, Start, TokenEvent
    from transom.messages import Sampling

    torch.set_num_threads(1)
    device = torch.device("cpu")
    model = load_language_model(resolve_model(NANO_NAME), dtype=torch.float32, device=device, mtp=False)
    plan = plan_pools(
        model.config, budget_bytes=250_000_000, dtype_bytes=4, page_size=16, typical_len=512,
        release_interval=16, chunk=576,
    )  # fmt: skip
    pools = DualPools(model.config, plan, dtype=torch.float32, device=device)
    first_s: dict[str, float] = {}

    def emit(events: list[Event]) -> None:
        for event in events:
            if isinstance(event, TokenEvent):
                first_s.setdefault(event.request_id, time.perf_counter())

    limits = EngineLimits(576, 64, model.config.max_position_embeddings, 16)
    retention = RetentionPolicy(pools.window, pools.page_size)
    cache = PrefixCache(pools, NANO_NAME, model.config.eos_token_ids, policy=retention)
    order = make_order(policy, lambda: engine.tokens_per_s / stretch)
    engine = Engine(model, pools, limits, emit, order=order, cache=cache, clock=time.perf_counter)
    random = torch.Generator().manual_seed(seed)

    def ids(count: int) -> list[int]:
        return torch.randint(0, 1024, (count,), generator=random).tolist()

    lengths = torch.randint(32, 256, (shorts,), generator=random).tolist()
    prompts = [("long", 0.0, ids(min(long_len, engine.context_len - 2)))]
    prompts += [("short", 0.3 * (i + 1), ids(length)) for i, length in enumerate(lengths)]
    begin = time.perf_counter()
    waiting = list(enumerate(prompts))
    while len(first_s) < len(prompts):
        now = time.perf_counter() - begin
        while waiting and waiting[0][1][1] <= now:
            number, (_, at, prompt) = waiting.pop(0)
            sampling = Sampling(max_tokens=2, temperature=0.0, ignore_eos=True)
            request = Request(
                str(number), sampling, 1e18, begin + at, prompt_ids=prompt, prompt_complete=True
            )
            request.hands_off = True
            engine.submit(Start(request))
        engine.step(wait_s=0.01)
    load = engine.load()
    ttfts = [(kind, first_s[str(n)] - begin - at) for n, (kind, at, _) in enumerate(prompts)]
    return ttfts, 1 - load["model_seconds"] / load["step_seconds"]


# A simulated worker.


@dataclass(slots=True)
class _Simulated:
    name: str
    arrived_s: float
    length: int
    blocks: list[int]
    matched: int = 0  # blocks
    stored: int = 0
    running: bool = False

    def view(self) -> RequestView:
        pages = -(-self.stored // BLOCK)
        ready = self.length - self.stored
        return RequestView(
            self.name, self.arrived_s, 0, self.stored, self.length, ready, False,
            full_pages=pages if self.running else 0, swa_pages=0, shared_pages=0 if self.running else pages,
        )  # fmt: skip


def _simulate(args: argparse.Namespace) -> list[dict[str, Any]]:
    try:
        lines = args.trace.read_bytes().splitlines()
        trace = [orjson.loads(line) for line in lines if line]
        requests = [
            (entry["timestamp"] / 1e3, int(entry["input_length"]), list(entry["hash_ids"])) for entry in trace
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--trace {args.trace}: {error}") from None
    if not requests:
        raise ConfigError(f"--trace {args.trace}: no requests")
    requests.sort(key=lambda request: request[0])
    uncached = _uncached_tokens(requests)
    rate = sum(uncached) / max(requests[-1][0] - requests[0][0], 1e-3) / args.load
    rows = []
    for policy in args.policies:
        order = make_order(policy, lambda: rate / args.stretch)
        times = _serve(requests, order, rate, args.batch_tokens)
        source = f"{args.trace.stem}, one worker of {rate:,.0f} tokens/s, load {args.load}"
        for kind, low, high in (
            ("up to 4k", 0, 4096),
            ("4k to 16k", 4097, 16384),
            ("above 16k", 16385, 1 << 60),
        ):
            found = [t for t, (_, length, _) in zip(times, requests, strict=True) if low <= length <= high]
            if found:
                rows.append(_row(source, policy, kind, found) | {"load": args.load})
        rows.append(_row(source, policy, "all", times) | {"load": args.load})
    return rows


_Trace = Sequence[tuple[float, int, list[int]]]


def _uncached_tokens(requests: _Trace) -> list[int]:
    """Return what an unlimited cache leaves to compute of each prompt, its last token at least."""
    seen: set[int] = set()
    left = []
    for _, length, blocks in requests:
        matched = next((i for i, block in enumerate(blocks) if block not in seen), len(blocks))
        left.append(length - min(matched * BLOCK, length - 1))
        seen.update(blocks)
    return left


def _serve(requests: _Trace, order: Order, rate: float, batch_tokens: int) -> list[float]:
    """Return the TTFT of each request, with memory for all; a step takes its tokens / rate and 5 ms."""
    limits = Limits(batch_tokens, 256, BLOCK, 128)
    seen: set[int] = set()
    inside: dict[str, _Simulated] = {}
    ttft_s = [0.0] * len(requests)
    now, coming = 0.0, 0
    while coming < len(requests) or inside:
        if not inside:
            now = max(now, requests[coming][0])
        while coming < len(requests) and requests[coming][0] <= now:
            at, length, blocks = requests[coming]
            inside[str(coming)] = _Simulated(str(coming), at, length, blocks)
            coming += 1
        for request in inside.values():
            if not request.running:
                while request.matched < len(request.blocks) and request.blocks[request.matched] in seen:
                    request.matched += 1
                request.stored = min(request.matched * BLOCK, request.length - 1)
        running = [r.view() for r in inside.values() if r.running]
        waiting = [r.view() for r in inside.values() if not r.running]
        plan = plan_step(running, waiting, _NO_LIMIT, limits, now_s=now, order=order)
        now += 0.005 + sum(plan.steps.values()) / rate
        for name, count in plan.steps.items():
            request = inside[name]
            request.running = True
            request.stored += count
            if request.stored == request.length:
                ttft_s[int(name)] = now - request.arrived_s
                seen.update(request.blocks)
                del inside[name]
    return ttft_s
