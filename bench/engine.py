"""`transom bench engine`: speed of one engine in this process, and where the time of its steps goes.

No sockets and no tokenizer: what is left is the scheduler, the kernels and the sampler. CPU time stands
beside the clock's, so that a busy machine is seen; the parts of a step are CPU time of their thread.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from transom.bench.origin import device_name, origin
from transom.bench.report import append_rows
from transom.bench.tiny_model import write_checkpoint
from transom.commands.base import make_console, write_json
from transom.errors import ConfigError
from transom.kernels.native_ops import NativeOps
from transom.llm import runner as runner_module
from transom.llm.build import build_engine
from transom.llm.config import PrefillConfig
from transom.llm.engine import Engine
from transom.llm.model.causal_lm import CausalLM
from transom.llm.model.fused import FusedModel
from transom.llm.paged_attention import PagedAttention
from transom.llm.request import Event, FailedEvent, Request, Start, TokenEvent
from transom.messages import Sampling

EXAMPLES = (
    "transom bench engine",
    "transom bench engine --model tiny-hybrid --profile",
    "transom bench engine --model tiny-dense --requests 16 --prompt-len 512 --output-len 64 --json",
    "transom bench engine --page-sizes 1 4 16 64 --shared-len 384 --kv-dtype fp8",
)
MADE_HERE = ("tiny-hybrid", "tiny-dense")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", default="mimo-nano", metavar="MODEL",
        help=f"checkpoint, or a random one made for the run: {', '.join(MADE_HERE)} (default %(default)s)",
    )  # fmt: skip
    parser.add_argument("--requests", type=int, default=16, metavar="N", help="at once (default %(default)s)")
    parser.add_argument("--prompt-len", type=int, default=512, metavar="N", help="(default %(default)s)")
    parser.add_argument(
        "--shared-len",
        type=int,
        default=0,
        metavar="N",
        help="tokens that all prompts begin with (default 0)",
    )
    parser.add_argument("--output-len", type=int, default=64, metavar="N", help="(default %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="runs (default %(default)s)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="(default %(default)s)")
    parser.add_argument("--device", default="auto", metavar="DEVICE", help="(default %(default)s)")
    parser.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="(default %(default)s)"
    )
    parser.add_argument(
        "--kv-dtype", choices=("auto", "float32", "bfloat16", "fp8"), default="auto",
        help="of the KV pools (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--page-sizes", type=int, nargs="+", default=[16], metavar="N",
        help="tokens in a page; several are measured in turn, run by run (default 16)",
    )  # fmt: skip
    parser.add_argument("--kernels", choices=("auto", "torch"), default="auto", help="(default %(default)s)")
    parser.add_argument(
        "--overlap",
        choices=("auto", "on", "off"),
        default="auto",
        help="plan a step while one is computed (default %(default)s)",
    )
    parser.add_argument(
        "--cuda-graphs",
        choices=("auto", "on", "off", "padded"),
        default="auto",
        help="record decode steps as CUDA graphs (default %(default)s)",
    )
    parser.add_argument(
        "--profile", action="store_true", help="show the parts of a step; slows it down a bit"
    )
    parser.add_argument("--out", default="", metavar="FILE", help="append one JSON row to this file")


class Profile:
    """Adds up the time inside named parts; a part counts what is nested in it only once, where it is."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: defaultdict[str, int] = defaultdict(int)
        self._of_thread = threading.local()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        inner: list[float] = self._of_thread.__dict__.setdefault("inner", [0.0])
        begin = time.thread_time()
        inner.append(0.0)
        try:
            yield
        finally:
            elapsed = time.thread_time() - begin
            self.seconds[name] += elapsed - inner.pop()
            inner[-1] += elapsed
            self.calls[name] += 1

    def wrap(self, stack: ExitStack, owner: Any, attribute: str, name: str) -> None:
        """Time every call of `owner.attribute` as part `name` until `stack` closes."""
        inner: Callable[..., Any] = getattr(owner, attribute)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                return inner(*args, **kwargs)

        setattr(owner, attribute, timed)
        stack.callback(setattr, owner, attribute, inner)

    def watch(self, stack: ExitStack, model: CausalLM | FusedModel) -> None:
        """Name the parts of an engine's steps."""
        if isinstance(model, FusedModel):
            for attribute, name in _NATIVE_PARTS.items():
                self.wrap(stack, NativeOps, attribute, name)
            self.wrap(stack, FusedModel, "place", "index work")
        else:
            for module in model.modules():
                name = _PARTS.get(type(module).__name__, "")
                if name:
                    self.wrap(stack, module, "forward", name)
            self.wrap(stack, PagedAttention, "__init__", "index work")
            self.wrap(stack, PagedAttention, "attend", "attention and KV")
        self.wrap(stack, model, "embed", "embed")
        self.wrap(stack, model, "logits", "head")
        self.wrap(stack, runner_module, "sample", "sampler")
        self.wrap(stack, runner_module.ModelRunner, "prepare", "batch on the host")
        self.wrap(stack, runner_module.ModelRunner, "compute", "rest of the forward")
        for attribute, name in (
            ("_plan", "plan"),
            ("_make_step", "pages"),
            ("_advance", "after the forward"),
        ):
            self.wrap(stack, Engine, attribute, name)


_PARTS = {
    "RMSNorm": "norm",
    "Attention": "qkv, rope, output projection",
    "DenseMLP": "dense feed-forward",
    "MoE": "experts",
}


_NATIVE_PARTS = {
    "linear": "qkv, output projection, head",
    "rope_and_store": "rope and KV write",
    "rotate_queries": "rope and KV write",
    "attention": "attention",
    "gated_mlp": "dense feed-forward",
    "moe": "experts",
    "rms_norm": "norm",
}


class Load:
    """Runs the same requests again and again, with other tokens each time."""

    def __init__(self, args: argparse.Namespace, folder: str, page_size: int) -> None:
        self._args = args
        self._ends: dict[str, list[float]] = {}
        config = PrefillConfig(
            model=folder,
            threads=args.threads,
            device=args.device,
            dtype=args.dtype,
            kv_dtype=args.kv_dtype,
            page_size=page_size,
            kernels=args.kernels,
            kernel_build_wait_s=600,
            kv_memory_gb=1.0,
            overlap=args.overlap,
            cuda_graphs=args.cuda_graphs,
            max_running_requests=max(args.requests, 1),
        )
        self.engine, self.model = build_engine(config, self._take)
        self._generator = torch.Generator().manual_seed(0)
        self._round = 0

    def _take(self, events: list[Event]) -> None:
        now = time.perf_counter()
        for event in events:
            if isinstance(event, FailedEvent):
                raise ConfigError(f"a request failed: {event.error.message}")
            if isinstance(event, TokenEvent):
                self._ends[event.request_id].append(now)

    def run(self, output_len: int) -> dict[str, float]:
        """Run one round to its end; return its figures."""
        args = self._args
        self._round += 1
        self._ends = {f"{self._round}-{i}": [] for i in range(args.requests)}
        vocab = self.model.config.vocab_size
        shared = torch.randint(vocab, (args.shared_len,), generator=self._generator).tolist()
        for name in self._ends:
            own = torch.randint(vocab, (args.prompt_len - args.shared_len,), generator=self._generator)
            sampling = Sampling(max_tokens=output_len, temperature=0.0, ignore_eos=True)
            prompt = [*shared, *own.tolist()]
            self.engine.submit(
                Start(Request(name, sampling, 1e12, time.time(), prompt_ids=prompt, prompt_complete=True))
            )
        before = self.engine.load()
        begin, cpu = time.perf_counter(), time.process_time()
        while any(len(times) < output_len for times in self._ends.values()):
            self.engine.step()
        wall_s, cpu_s = time.perf_counter() - begin, time.process_time() - cpu
        after = self.engine.load()
        step_s, model_s = (after[name] - before[name] for name in ("step_seconds", "model_seconds"))
        firsts = [times[0] - begin for times in self._ends.values()]
        lasts = [times[-1] - times[0] for times in self._ends.values()]
        return {
            "wall_s": wall_s,
            "cpu_s": cpu_s,
            "idle_share": 1 - model_s / step_s,
            "output_tokens_per_s": args.requests * output_len / wall_s,
            "output_tokens_per_cpu_s": args.requests * output_len / cpu_s,
            "ttft_p50_ms": statistics.median(firsts) * 1e3,
            "prefill_tokens_per_s": args.requests * args.prompt_len / max(firsts),
            "tpot_p50_ms": statistics.median(lasts) / max(output_len - 1, 1) * 1e3,
            "cached_tokens": after["cache_hit_tokens"] - before["cache_hit_tokens"],
        }


def run(args: argparse.Namespace) -> int:
    """Run the load; print the medians, and the parts of a step when asked."""
    if min(args.requests, args.output_len, args.repeats) < 1 or not 0 <= args.shared_len < args.prompt_len:
        raise ConfigError(
            "--requests, --output-len and --repeats must be >= 1 and --shared-len < --prompt-len"
        )
    if args.profile and len(args.page_sizes) > 1:
        raise ConfigError("--profile takes one of --page-sizes")
    if min(args.page_sizes) < 1 or len(set(args.page_sizes)) < len(args.page_sizes):
        raise ConfigError("--page-sizes must be >= 1 and differ")
    with ExitStack() as stack:
        folder = args.model
        if args.model in MADE_HERE:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            write_checkpoint(Path(folder), moe=args.model == "tiny-hybrid")
        loads = {page_size: Load(args, folder, page_size) for page_size in args.page_sizes}
        for load in loads.values():
            load.run(min(args.output_len, 4))
        profile = Profile()
        if args.profile:
            profile.watch(stack, loads[args.page_sizes[0]].model)
        runs: dict[int, list[dict[str, float]]] = {page_size: [] for page_size in loads}
        for _ in range(args.repeats):
            for page_size, load in loads.items():
                runs[page_size].append(load.run(args.output_len))
    reports = [_report(args, page_size, rows, profile) for page_size, rows in runs.items()]
    if args.out:
        append_rows(args.out, reports)
    if args.json:
        write_json(reports[0] if len(reports) == 1 else {"rows": reports})
    else:
        _show(reports, profile, args.repeats)
    return 0


def _report(
    args: argparse.Namespace, page_size: int, rows: list[dict[str, float]], profile: Profile
) -> dict[str, Any]:
    medians = {name: round(statistics.median(row[name] for row in rows), 3) for name in rows[0]}
    return origin("engine", device_name(args.device)) | {
        "torch": torch.__version__,
        **{
            name: getattr(args, name)
            for name in ("model", "requests", "prompt_len", "shared_len", "output_len")
        },
        **{name: getattr(args, name) for name in ("repeats", "threads", "dtype", "kv_dtype", "kernels")},
        "overlap": args.overlap,
        "cuda_graphs": args.cuda_graphs,
        "page_size": page_size,
        **medians,
        "parts_s": {name: round(s / args.repeats, 4) for name, s in profile.seconds.items()},
    }


_SHOWN = (
    "wall_s", "cpu_s", "output_tokens_per_s", "output_tokens_per_cpu_s", "ttft_p50_ms",
    "prefill_tokens_per_s", "tpot_p50_ms", "idle_share", "cached_tokens",
)  # fmt: skip


def _show(reports: list[dict[str, Any]], profile: Profile, repeats: int) -> None:
    console = make_console()
    first = reports[0]
    table = Table(
        "median of the runs",
        *(f"pages of {report['page_size']}" for report in reports),
        title=f"{first['model']} on {first['device']}",
    )
    for name in _SHOWN:
        table.add_row(name, *(f"{report[name]:,}" for report in reports))
    console.print(table)
    if profile.seconds:
        parts = Table("part", "seconds a run", "share", "calls a run", title="where the time goes")
        total = sum(profile.seconds.values())
        for name, seconds in sorted(profile.seconds.items(), key=lambda item: -item[1]):
            calls = profile.calls[name] // repeats
            parts.add_row(name, f"{seconds / repeats:.3f}", f"{seconds / total:.1%}", f"{calls:,}")
        console.print(parts)
