"""`transom bench kernels`: this machine's fused kernels against the torch references and dense baselines.

On a GPU the Triton kernels, on a CPU the compiled ones. Each case is first compared with a computation in
float64; what is off by more than rounding fails the run. Times: CUDA events, or CPU time of the process.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from rich.table import Table
from torch.nn import functional

from transom.bench.origin import origin
from transom.bench.report import append_rows
from transom.commands.base import make_console, write_json
from transom.errors import ConfigError, TransomError
from transom.kernels.moe import route_tokens, run_experts
from transom.kernels.ops import FusedOps, Norm, Router, Tables
from transom.kernels.pick import KernelPick
from transom.kernels.rope import apply_rope, rope_table
from transom.llm.build import pick_device, pick_dtype

EXAMPLES = (
    "transom bench kernels",
    "transom bench kernels --shapes v2.5 --dtype bfloat16 --out bench/results/kernels.jsonl",
)


_TORCH_ERROR = 0.1  # of the largest value; bfloat16 is off by a hundredth


@dataclass(frozen=True)
class Shapes:
    """Sizes of one layer of each kind; `contexts` are lengths of the requests' KV."""

    hidden: int
    heads: int
    kv_heads: int
    swa_kv_heads: int
    head_dim: int
    v_head_dim: int
    rotary_dim: int
    window: int
    intermediate: int
    experts: int
    top_k: int
    contexts: tuple[int, ...]
    decode_batch: int
    chunk: int


SHAPES = {
    "v2.5": Shapes(4096, 64, 4, 8, 192, 128, 64, 128, 2048, 256, 8, (1024, 8192, 32768), 16, 2048),
    "tiny": Shapes(512, 8, 2, 2, 64, 64, 32, 129, 256, 16, 2, (512, 4096), 16, 512),
    # Nothing is a power of two, a multiple of a vector or even.
    "odd": Shapes(52, 6, 2, 3, 20, 12, 6, 37, 44, 5, 3, (77,), 3, 45),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shapes", choices=tuple(SHAPES), default=None, help="layer sizes (default v2.5 on a GPU, else tiny)"
    )
    parser.add_argument("--device", default="auto", metavar="DEVICE", help="(default %(default)s)")
    parser.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="(default %(default)s)"
    )
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="on a CPU (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=20, metavar="N", help="a case (default %(default)s)")
    parser.add_argument("--out", default="", metavar="FILE", help="append one JSON row a case to this file")


@dataclass(frozen=True)
class Case:
    """`exact` is the float64 result of `fused`, `plain` the torch reference, `dense` the baseline."""

    name: str
    fused: Callable[[], torch.Tensor]
    exact: Callable[[], torch.Tensor]
    plain: Callable[[], torch.Tensor]
    dense: Callable[[], torch.Tensor]


class Bench:
    def __init__(self, ops: FusedOps, shapes: Shapes, device: torch.device, dtype: torch.dtype) -> None:
        self.ops, self.shapes, self.device, self.dtype = ops, shapes, device, dtype
        self._generator = torch.Generator(device).manual_seed(0)

    def random(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        x = torch.randn(shape, generator=self._generator, device=self.device) * scale
        return x.to(self.dtype)

    def cases(self) -> Iterator[Case]:
        """Yield the cases one by one: the large ones don't fit side by side."""
        shapes = self.shapes
        for context in shapes.contexts:
            for full in (True, False):
                kind = "full" if full else "window and sink"
                rows = [(context - 1, 1)] * shapes.decode_batch
                yield self._attention(f"decode attention, {kind}, {len(rows)} x {context}", rows, full)
                chunk = min(shapes.chunk, context)
                yield self._attention(
                    f"prefill attention, {kind}, {chunk} of {context}", [(context - chunk, chunk)], full
                )
        for rows_count in (shapes.decode_batch, shapes.chunk):
            yield self._rope(rows_count)
            yield self._moe(rows_count)

    def _tables(self, spans: list[tuple[int, int]], page_size: int = 16) -> tuple[Tables, int]:
        counts = [-(-(begin + count) // page_size) for begin, count in spans]
        total = sum(counts)
        pages = np.random.default_rng(0).permutation(total) + 1
        map = np.concatenate([[0], np.random.default_rng(1).permutation(total) + 1])
        starts = np.cumsum(counts) - counts
        rows = np.cumsum([count for _, count in spans]) - [count for _, count in spans]
        listed = [(r, begin, count, s) for r, s, (begin, count) in zip(rows, starts, spans)]
        tables = self.ops.tables(np.array(listed), pages.astype(np.int64), map.astype(np.int64), page_size)
        return tables, (total + 1) * page_size

    def _attention(self, name: str, spans: list[tuple[int, int]], full: bool) -> Case:
        s = self.shapes
        kv_heads = s.kv_heads if full else s.swa_kv_heads
        tables, slots = self._tables(spans)
        k, v = self.random(kv_heads, slots, s.head_dim), self.random(kv_heads, slots, s.v_head_dim)
        q = self.random(sum(count for _, count in spans), s.heads * s.head_dim)
        sink = None if full else torch.randn(s.heads, generator=self._generator, device=self.device)
        window, scale = None if full else s.window, s.head_dim**-0.5
        begin, count = spans[0]
        length = begin + count
        index = []
        for i in range(len(spans)):
            at = np.arange(length)
            pages = tables.pages[tables.spans[i, 3] + at // tables.page_size]
            pages = pages if full else tables.map[pages]
            index.append(torch.from_numpy(pages * tables.page_size + at % tables.page_size))
        places = torch.stack(index).to(self.device)  # (requests, keys)
        distance = torch.arange(begin, length)[:, None] - torch.arange(length)
        seen = ((distance >= 0) & (distance < (window or length))).to(self.device)
        queries = q.view(len(spans), count, s.heads, s.head_dim).transpose(1, 2)

        def softmax(dtype: torch.dtype) -> torch.Tensor:
            """Gather and spell the softmax out, a KV head at a time: all scores would not fit."""
            group = s.heads // kv_heads
            outputs = []
            for request, where in zip(queries, places):
                for head in range(kv_heads):
                    mine = slice(head * group, (head + 1) * group)
                    scores = request[mine].to(dtype) @ k[head, where].to(dtype).T * scale
                    scores = scores.masked_fill(~seen, float("-inf"))
                    if sink is not None:
                        column = sink[mine].to(dtype).view(-1, 1, 1).expand(-1, count, 1)
                        scores = torch.cat([scores, column], dim=-1)
                    outputs.append(scores.softmax(-1)[..., :length] @ v[head, where].to(dtype))
            out = torch.stack(outputs).view(len(spans), s.heads, count, s.v_head_dim)
            return out.transpose(1, 2).reshape(len(q), -1)

        pad = s.head_dim - s.v_head_dim
        dense_k = k[:, places].transpose(0, 1).contiguous()
        dense_v = functional.pad(v[:, places].transpose(0, 1), (0, pad)).contiguous()
        bias = torch.zeros(seen.shape, dtype=self.dtype, device=self.device).masked_fill(~seen, float("-inf"))

        def dense() -> torch.Tensor:
            """torch's own kernel on KV that lies in order already, sinks left out."""
            return functional.scaled_dot_product_attention(
                queries, dense_k, dense_v, attn_mask=bias, scale=scale, enable_gqa=True
            )

        return Case(
            name,
            lambda: self.ops.attention(
                q, s.heads, (k, v), tables, full=full, scale=scale, window=window, sink=sink
            ),
            lambda: softmax(torch.float64),
            lambda: softmax(self.dtype),
            dense,
        )

    def _rope(self, rows: int) -> Case:
        s = self.shapes
        tables, slots = self._tables([(0, rows)])
        sizes = [s.heads * s.head_dim, s.kv_heads * s.head_dim, s.kv_heads * s.v_head_dim]
        qkv = self.random(rows, sum(sizes))
        k = self.random(s.kv_heads, slots, s.head_dim)
        v = self.random(s.kv_heads, slots, s.v_head_dim)
        cos, sin = rope_table(torch.arange(rows, device=self.device), 1e4, s.rotary_dim)
        at = torch.arange(rows)
        slot = (
            torch.from_numpy(tables.pages)[at // tables.page_size] * tables.page_size + at % tables.page_size
        )
        slot = slot.to(self.device)

        def plain(dtype: torch.dtype) -> torch.Tensor:
            q_part, k_part, v_part = torch.split(qkv.to(dtype), sizes, dim=-1)
            q_out = apply_rope(q_part.view(rows, -1, s.head_dim), cos.to(dtype), sin.to(dtype))
            k_out = apply_rope(k_part.view(rows, -1, s.head_dim), cos.to(dtype), sin.to(dtype))
            v_out = v_part.view(rows, -1, s.v_head_dim) * 0.707
            if dtype == self.dtype:
                k.index_copy_(1, slot, k_out.transpose(0, 1))
                v.index_copy_(1, slot, v_out.transpose(0, 1))
            return torch.cat([x.flatten(1) for x in (q_out, k_out, v_out)], dim=-1)

        def fused() -> torch.Tensor:
            mine = qkv.clone()
            self.ops.rope_and_store(mine, s.heads, cos, sin, (k, v), tables, full=True, value_scale=0.707)
            new = [mine[:, : sizes[0]], *(x[:, slot].transpose(0, 1).flatten(1) for x in (k, v))]
            return torch.cat(new, dim=-1)

        return Case(
            f"rope and KV write, {rows} rows, results gathered", fused, lambda: plain(torch.float64),
            lambda: plain(self.dtype), lambda: plain(self.dtype),
        )  # fmt: skip

    def _moe(self, rows: int) -> Case:
        s = self.shapes
        gate = torch.randn(s.experts, s.hidden, generator=self._generator, device=self.device)
        gate *= s.hidden**-0.5  # larger logits round to a sigmoid of 1, and who is chosen is by chance
        x = _decided(self.random(4 * rows, s.hidden), gate, s.top_k, rows)
        gate_up = self.random(s.experts, 2 * s.intermediate, s.hidden, scale=s.hidden**-0.5)
        down = self.random(s.experts, s.hidden, s.intermediate, scale=s.intermediate**-0.5)
        bias = torch.zeros(s.experts, device=self.device)
        norm = Norm(torch.ones(s.hidden, device=self.device), 1e-5)
        half = self.ops.fits_half(gate_up, down)
        packed = self.ops.pack_gate_up(gate_up, half=half), self.ops.pack(down, half=half)
        router = Router(self.ops.pack(gate, half=False), bias, s.top_k, True, 1.0)

        def plain(dtype: torch.dtype, route: torch.dtype) -> torch.Tensor:
            n = functional.rms_norm(x.to(dtype), (s.hidden,), norm.weight.to(dtype), norm.eps)
            logits = n.to(route) @ gate.to(route).T
            shares, chosen = route_tokens(logits, bias.to(route), s.top_k, normalise=True, scale=1.0)
            if dtype != torch.float64 or gate_up.numel() < 1 << 28:
                return x.to(dtype) + run_experts(n, shares, chosen, gate_up.to(dtype), down.to(dtype))
            y = x.to(dtype)  # one expert at a time: all of them in float64 would not fit
            for expert in sorted(set(chosen.flatten().tolist())):
                token, place = (chosen == expert).nonzero(as_tuple=True)
                one = torch.zeros_like(token)[:, None]
                w = shares[token, place][:, None]
                mine = gate_up[expert : expert + 1].to(dtype), down[expert : expert + 1].to(dtype)
                y.index_add_(0, token, run_experts(n[token], w, one, *mine))
            return y

        width = s.top_k * s.intermediate
        wide = self.random(2 * width, s.hidden, scale=s.hidden**-0.5)
        back = self.random(s.hidden, width, scale=width**-0.5)

        def dense() -> torch.Tensor:
            """A dense layer with the arithmetic of the chosen experts."""
            a, b = functional.linear(x, wide).chunk(2, dim=-1)
            return x + functional.linear(functional.silu(a) * b, back)

        return Case(
            f"experts, {rows} rows of {s.top_k} in {s.experts}",
            lambda: self.ops.moe(x, router, *packed, norm=norm, residual=x),
            lambda: plain(torch.float64, torch.float64),
            lambda: plain(self.dtype, torch.float32),
            dense,
        )


def _decided(x: torch.Tensor, gate: torch.Tensor, top_k: int, rows: int) -> torch.Tensor:
    """Return those `rows` of x whose choice of experts is clearest.

    Where two experts are about equal rounding chooses, and another choice is no error of a kernel.
    """
    best = (functional.rms_norm(x.double(), x.shape[-1:]) @ gate.double().T).topk(top_k + 1, dim=-1).values
    return x[(best[:, -2] - best[:, -1]).topk(rows).indices.sort().values]


def measure(run: Callable[[], torch.Tensor], device: torch.device, repeats: int) -> float:
    """Return the median time of a run in microseconds."""
    for _ in range(3):
        run()
    times: list[float] = []
    for _ in range(repeats):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            run()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3)
        else:
            at = time.process_time()
            run()
            times.append((time.process_time() - at) * 1e6)
    return statistics.median(times)


@torch.inference_mode()
def run(args: argparse.Namespace) -> int:
    """Check and time every case; print a table, or one JSON object when asked."""
    if args.repeats < 3 or args.threads < 1:
        raise ConfigError("--repeats must be >= 3 and --threads >= 1")
    device = pick_device(args.device)
    dtype = pick_dtype(args.dtype, device)
    torch.set_num_threads(args.threads)
    ops = KernelPick(device, "auto").ops(wait_s=600, threads=args.threads)
    if ops is None:
        raise TransomError("there are no fused kernels on this machine; the log line above says why")
    shapes = args.shapes or ("v2.5" if device.type == "cuda" else "tiny")
    on_gpu = device.type == "cuda"
    about = origin("kernels", torch.cuda.get_device_name(device) if on_gpu else "") | {
        "torch": torch.__version__,
        "kernels": ops.name,
        "dtype": str(dtype).removeprefix("torch."),
        "shapes": shapes,
        "threads": args.threads,
        "repeats": args.repeats,
    }
    rows: list[dict[str, Any]] = []
    for case in Bench(ops, SHAPES[shapes], device, dtype).cases():
        exact = case.exact()
        error, torch_error = (
            float((x.double() - exact).abs().max() / exact.abs().max()) for x in (case.fused(), case.plain())
        )
        # A reference that is off itself would let anything pass.
        if not (torch_error < _TORCH_ERROR and error < max(4 * torch_error, 1e-4)):
            raise TransomError(
                f"{case.name}: off by {error:.2g} of the largest value, torch by {torch_error:.2g}"
            )
        fused, plain, dense = (measure(x, device, args.repeats) for x in (case.fused, case.plain, case.dense))
        rows.append(
            {
                "case": case.name,
                "error": error,
                "torch_error": torch_error,
                "fused_us": round(fused, 1),
                "torch_us": round(plain, 1),
                "dense_us": round(dense, 1),
            }
        )
    if args.out:
        append_rows(args.out, [about | row for row in rows])
    if args.json:
        write_json(about | {"rows": rows})
        return 0
    title = f"{ops.name} kernels on {about['device']}, {about['dtype']}: microseconds, error to float64"
    table = Table("case", "error", "torch's", "fused", "torch", "dense", "torch / fused", title=title)
    for row in rows:
        times = (row["fused_us"], row["torch_us"], row["dense_us"])
        table.add_row(
            row["case"], f"{row['error']:.1e}", f"{row['torch_error']:.1e}",
            *(f"{x:,.0f}" for x in times), f"{times[1] / times[0]:.1f}x",
        )  # fmt: skip
    make_console().print(table)
    return 0
