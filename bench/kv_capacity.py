"""`transom bench kv-capacity`: KV bytes a request with a single pool and with dual pools, formula and fact.

All known models by the planner's formulas; for nano real pools are allocated and filled until they refuse.
Counts bytes, times nothing: one run gives the same figures on every machine.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from transom.bench.origin import origin
from transom.bench.report import append_rows
from transom.commands.base import make_console, write_json
from transom.errors import ConfigError
from transom.hub import NANO_NAME
from transom.llm.capacity import PoolPlan, answer_margin, token_bytes
from transom.llm.model.spec import DecoderConfig
from transom.llm.plan import (
    KV_DTYPES,
    PlanOptions,
    dual_fit,
    dual_pool_plan,
    find_model,
    request_bytes,
    single_fit,
    single_pool_pages,
)

EXAMPLES = (
    "transom bench kv-capacity",
    "transom bench kv-capacity --kv-dtype fp8 --page-size 64 --json",
    "transom bench kv-capacity --out bench/results/kv_capacity.jsonl",
)
MODELS = ("mimo-v2.5-pro", "mimo-v2.5", "mimo-v2-flash", NANO_NAME)
CONTEXTS = (4096, 16384, 32768, 131072, 1048576)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--kv-dtype", choices=tuple(KV_DTYPES), default="bf16", help="of the KV pools (default %(default)s)"
    )
    parser.add_argument(
        "--page-size", type=int, default=16, metavar="N", help="tokens in a page (default %(default)s)"
    )
    parser.add_argument(
        "--pool-mb", type=int, default=320, metavar="MB",
        help="size of nano's real pools; contexts that need more are not measured (default %(default)s)",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="FILE", help="append the rows to this JSONL file")


def run(args: argparse.Namespace) -> int:
    for flag, value in (("--page-size", args.page_size), ("--pool-mb", args.pool_mb)):
        if value < 1:
            raise ConfigError(f"{flag} {value}: must be at least 1")
    rows = [
        measure(model, context, args.kv_dtype, args.page_size, args.pool_mb * 1_000_000)
        for model in MODELS
        for context in CONTEXTS
    ]
    about = origin("kv-capacity")
    if args.out:
        append_rows(args.out, [about | row for row in rows])
    if args.json:
        write_json(about | {"rows": rows})
    else:
        _show(rows)
    return 0


def measure(model: str, context_len: int, kv_dtype: str, page_size: int, pool_bytes: int) -> dict[str, Any]:
    """Return one row; what was not measured in real pools is None."""
    config = find_model(model).config
    options = PlanOptions(
        gpu_memory_bytes=pool_bytes, context_len=context_len, kv_dtype=kv_dtype, page_size=page_size
    )
    planned = request_bytes(config, options)
    row: dict[str, Any] = {
        "model": model,
        "context_len": context_len,
        "kv_dtype": kv_dtype,
        "page_size": page_size,
        "single_bytes": planned.single_theory,
        "dual_bytes": planned.dual_theory,
        "ratio": planned.ratio_theory,
        "ratio_decoding": planned.ratio,
        "pool_bytes": None,
        "held_single_bytes": None,
        "held_dual_bytes": None,
        "held_ratio": None,
        "requests_single": None,
        "requests_dual": None,
        "planned_requests_single": None,
        "planned_requests_dual": None,
    }
    single = single_fit(config, options, pool_bytes, 1).requests
    if model != NANO_NAME or not single:
        return row
    held_single = fill_single(config, options, pool_bytes)
    held_dual = fill_dual(config, options, pool_bytes)
    return row | {
        "pool_bytes": pool_bytes,
        "held_single_bytes": held_single.request_bytes,
        "held_dual_bytes": held_dual.request_bytes,
        "held_ratio": held_single.request_bytes / held_dual.request_bytes,
        "requests_single": held_single.requests,
        "requests_dual": held_dual.requests,
        "planned_requests_single": single,
        "planned_requests_dual": dual_fit(config, options, pool_bytes, 1).requests,
    }


@dataclass(frozen=True)
class Held:
    """What real pools held when they refused the next request. `request_bytes`: the pages of one request."""

    requests: int
    request_bytes: int
    pool_bytes: int


def fill_dual(config: DecoderConfig, options: PlanOptions, budget_bytes: int) -> Held:
    """Allocate the engine's pools and admit requests of `context_len` tokens until they are refused."""
    return _fill(config, options, dual_pool_plan(config, options, budget_bytes), slides=True)


def fill_single(config: DecoderConfig, options: PlanOptions, budget_bytes: int) -> Held:
    """Fill as `fill_dual` does, but give every layer every page and release nothing: no windowing."""
    pages = single_pool_pages(config, options, budget_bytes)
    width = KV_DTYPES[options.kv_dtype]
    full, swa = (token_bytes([s for s in config.layers if s.full is kind], width) for kind in (True, False))
    return _fill(config, options, PoolPlan(options.page_size, pages, pages, full, swa), slides=False)


def _fill(config: DecoderConfig, options: PlanOptions, plan: PoolPlan, *, slides: bool) -> Held:
    # Late: help must not wait for torch.
    import torch

    from transom.llm.pools import DualPools, PoolExhaustedError, RequestKV

    dtype = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "fp32": torch.float32}[options.kv_dtype]
    margin = answer_margin(plan.page_size)
    pools = DualPools(config, plan, dtype=dtype, device=torch.device("cpu"), margin=margin)
    stores = (pools.full, pools.swa)
    allocated = sum(x.nbytes for store in stores for x in (store.k, store.v))
    admitted: list[RequestKV] = []
    try:
        while True:
            kv = RequestKV()
            for end in range(options.chunk, options.context_len + options.chunk, options.chunk):
                pools.extend(kv, min(end, options.context_len))
                kv.length = min(end, options.context_len)
                if slides:
                    pools.slide(kv)
            admitted.append(kv)
    except PoolExhaustedError:
        pools.release(kv)
    pools.check_integrity(admitted)
    assert admitted, f"{plan.total_bytes} bytes hold no request of {options.context_len} tokens"
    first = admitted[0]
    used = first.count * plan.full_token_bytes + first.swa_count * plan.swa_token_bytes
    return Held(len(admitted), used * plan.page_size, allocated)


def _show(rows: list[dict[str, Any]]) -> None:
    console = make_console()
    plain = not console.is_terminal
    table = Table(
        box=None if plain else box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2 if plain else 1, 0, 0)
    )
    table.add_column("model", no_wrap=True)
    for name in ("context", "single\nMB", "dual\nMB", "ratio", "held\nratio", "held\nrequests", "planned"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        measured = ["-"] * 3
        if row["held_ratio"] is not None:
            measured = [f"{row['held_ratio']:.3f}"]
            measured += [f"{row[f'{key}_single']} / {row[f'{key}_dual']}" for key in _COUNTS]
        sizes = [f"{row[key] / 1e6:,.1f}" for key in ("single_bytes", "dual_bytes")]
        table.add_row(row["model"], str(row["context_len"]), *sizes, f"{row['ratio']:.3f}", *measured)
    console.print(table)
    console.print("\nMB of KV a request; held: real pools of nano, requests in a single pool / in dual pools")


_COUNTS = ("requests", "planned_requests")
