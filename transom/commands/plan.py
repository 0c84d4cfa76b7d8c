"""`transom plan`: how many requests fit a GPU group, with one KV pool and with the engine's two.

Arithmetic only: nothing is loaded, downloaded or allocated.
"""

from __future__ import annotations

import argparse
import math
import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from transom.commands.base import Parser, add_json_flag, examples, make_console, write_json
from transom.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from transom.llm.plan import CapacityPlan

_UNITS = {"": 1, "K": 1024, "M": 1024 * 1024}


def add_parsers(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "plan",
        help="plan KV capacity: requests that fit, GPUs that are needed",
        description="Compute what fits a group of GPUs with a single KV pool (every layer keeps every token)"
        " and with the engine's dual pools (SWA layers keep their window). Loads nothing, needs no GPU.\n"
        "KV memory of a GPU = gpu-memory * memory-fraction - weights - activations. The routed experts are"
        " divided by EP; attention, dense layers, embedding and head by TP, else replicated; each group of TP"
        " GPUs has its own pools, and requests and tokens are summed over the EP / TP groups.",
        epilog=examples(
            "transom plan --model mimo-v2.5-pro --gpu-memory 141 --context 128K --concurrency 64",
            "transom plan --model mimo-v2.5 --gpu-memory 80 --context 32K --kv-dtype fp8 --mtp",
            "transom plan --model mimo-nano --gpu-memory 1 --context 4K --kv-dtype fp32 --weight-dtype fp32",
            "transom plan --model ./checkpoint --gpu-memory 96 --context 1M --tp 2 --ep 8,16 --json",
        ),
    )
    _add_what(parser)
    _add_engine(parser)
    add_json_flag(parser)
    parser.set_defaults(run=_run)


def _add_what(parser: Parser) -> None:
    parser.add_argument(
        "--model", required=True, metavar="MODEL",
        help="mimo-nano, mimo-v2-flash, mimo-v2.5, mimo-v2.5-pro or a checkpoint folder",
    )  # fmt: skip
    parser.add_argument(
        "--gpu-memory", required=True, type=float, metavar="GB", help="memory of one GPU, in 10^9 bytes"
    )
    parser.add_argument(
        "--context", required=True, metavar="TOKENS", help="prompt and output of a request; 128K = 131072"
    )
    parser.add_argument(
        "--concurrency", type=int, default=1, metavar="N",
        help="requests that the group must hold at once (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--ep", default="", metavar="N,...",
        help="expert-parallel sizes, in GPUs (default: powers of two up to 128 that divide the experts)",
    )  # fmt: skip
    parser.add_argument(
        "--tp", type=int, default=1, metavar="N", help="GPUs that share one attention (default %(default)s)"
    )
    parser.add_argument(
        "--memory-fraction", type=float, default=0.9, metavar="F",
        help="share of the GPU's memory that may be used (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--activation-gb", type=float, default=None, metavar="GB",
        help="reserve for activations (default: estimated from --max-batch-tokens)",
    )  # fmt: skip


def _add_engine(parser: Parser) -> None:
    from transom.llm.footprint import WEIGHT_DTYPES
    from transom.llm.plan import KV_DTYPES, PlanOptions

    engine = PlanOptions(gpu_memory_bytes=1, context_len=1)
    parser.add_argument(
        "--weight-dtype", choices=WEIGHT_DTYPES, default=None,
        help="of the weights (default: fp8 if the checkpoint is quantised, else bf16)",
    )  # fmt: skip
    parser.add_argument(
        "--kv-dtype",
        choices=tuple(KV_DTYPES),
        default=engine.kv_dtype,
        help="of the KV pools (default %(default)s)",
    )
    for flag, default, text in (
        ("--page-size", engine.page_size, "tokens in a page"),
        (
            "--swa-release-interval",
            engine.release_interval,
            "decoded tokens between two releases of SWA slots",
        ),
        ("--max-batch-tokens", engine.chunk, "tokens computed in one step"),
        ("--max-running-requests", engine.running_requests, "rows of logits in one step"),
    ):
        parser.add_argument(
            flag, type=int, default=default, metavar="N", help=f"{text}, as the engine's (default {default})"
        )
    parser.add_argument("--mtp", action="store_true", help="count the MTP modules' weights and KV too")


def _run(args: argparse.Namespace) -> int:
    from transom.llm.plan import PlanOptions, find_model, plan_capacity

    model = find_model(args.model)
    options = PlanOptions(
        gpu_memory_bytes=_bytes("--gpu-memory", args.gpu_memory),
        context_len=parse_tokens(args.context),
        memory_fraction=args.memory_fraction,
        weight_dtype=args.weight_dtype or ("fp8" if model.quantized else "bf16"),
        kv_dtype=args.kv_dtype,
        page_size=args.page_size,
        release_interval=args.swa_release_interval,
        chunk=args.max_batch_tokens,
        running_requests=args.max_running_requests,
        activation_bytes=None
        if args.activation_gb is None
        else _bytes("--activation-gb", args.activation_gb),
        concurrency=args.concurrency,
        tp=args.tp,
        ep=_parse_sizes(args.ep),
        mtp=args.mtp,
    )
    plan = plan_capacity(model, options)
    if args.json:
        write_json(to_json(plan))
    else:
        _show(plan)
    return 0


def _bytes(flag: str, gigabytes: float) -> int:
    from transom.llm.plan import GB

    if not 0 <= gigabytes < math.inf:
        raise ConfigError(f"{flag}: {gigabytes:g} GB is no size")
    return int(gigabytes * GB)


def parse_tokens(text: str) -> int:
    """Return a token count: digits, and K or M for 1024 and 1024 * 1024. Raise ConfigError."""
    match = re.fullmatch(r"(\d{1,12})([KM]?)", text.strip().upper())
    if match is None:
        raise ConfigError(f"--context: {text!r} is no token count such as 4096, 128K or 1M")
    return int(match[1]) * _UNITS[match[2]]


def _parse_sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(sorted({int(part) for part in text.split(",")})) if text else ()
    except ValueError:
        raise ConfigError(f"--ep: {text!r} is no list of sizes such as 8,16,32") from None


def to_json(plan: CapacityPlan) -> dict[str, Any]:
    """Return the plan as plain data, with the ratios and sums that its classes compute."""
    value = asdict(plan)
    value["kv"]["token"] = plan.kv.token
    value["request"] |= {"ratio_theory": plan.request.ratio_theory, "ratio": plan.request.ratio}
    for row, size in zip(value["sizes"], plan.sizes):
        row["weights"]["total"] = size.weights.total
    return value


def _show(plan: CapacityPlan) -> None:
    console = make_console()
    options, kv, request = plan.options, plan.kv, plan.request
    lines = {
        plan.model: f"{options.context_len} tokens a request, KV {options.kv_dtype},"
        f" weights {options.weight_dtype}, pages of {options.page_size}",
        "KV a token": f"{kv.full_token:,} B in full + {kv.swa_token:,} B in SWA layers = {kv.token:,} B",
        "SWA a request": f"{kv.swa_fixed:,} B, the last {kv.window_len} tokens",
        "MTP a request": f"{kv.mtp_fixed:,} B, {'counted' if options.mtp else 'not counted (--mtp)'}",
        "one request": f"{_gb(request.single)} in a single pool, {_gb(request.dual)} in dual pools:"
        f" {request.ratio:.2f}x (in tokens, not pages: {request.ratio_theory:.3f}x)",
        "a GPU": f"{_gb(options.gpu_memory_bytes)} x {options.memory_fraction:g}, of which"
        f" {_gb(plan.activation_bytes)} for activations",
    }
    for label, text in lines.items():
        console.print(f"{label:15}{text}")
    console.print()
    console.print(_table(plan, plain=not console.is_terminal))
    console.print()
    console.print(
        f"smallest EP for {options.concurrency} x {options.context_len} tokens: single pool"
        f" {plan.smallest_single or 'none of these'}, dual pools {plan.smallest_dual or 'none of these'}"
    )


def _table(plan: CapacityPlan, *, plain: bool) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(
        box=None if plain else box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2 if plain else 1, 0, 0)
    )
    for name in (
        "EP", "weights\nGB/GPU", "KV\nGB/GPU", "single:\nrequests", "\ntokens", "dual:\nrequests", "\ntokens",
    ):  # fmt: skip
        table.add_column(name, justify="right", no_wrap=True)
    for size in plan.sizes:
        kv = f"{size.kv_bytes / 1e9:,.3f}" if size.kv_bytes > 0 else "-"
        fits = (size.single, size.dual)
        cells = [cell for fit in fits for cell in (f"{fit.requests:,}", f"{fit.tokens:,}")]
        table.add_row(str(size.ep), f"{size.weights.total / 1e9:,.3f}", kv, *cells)
    return table


def _gb(size: int) -> str:
    return f"{size / 1e9:,.3f} GB"
