"""FusedOps on CUDA: Triton kernels, and torch's matrix products where those are the best there are.

Used by the engine thread. Importing it needs triton.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
from torch.nn import functional

from transom.kernels import triton_kernels as kernels
from transom.kernels.kv_rows import row_dim
from transom.kernels.moe import route_tokens
from transom.kernels.ops import KV, FixedTables, Ints, Norm, Packed, Router, Tables

_KEYS = 32  # keys of a tile
_QUERY_ROWS = 64  # rows (tokens * heads of a KV head) of a prefill tile
_LEAST_DOT = 16  # the least side that the tensor cores take
_EXPERT_ROWS = 16
_EXPERT_COLUMNS = 64


def _pad(size: int, least: int = _LEAST_DOT) -> int:
    return max(least, int(triton.next_power_of_2(size)))


def _places(spans: Ints, pages: Ints, map: Ints, page_size: int) -> Ints:
    """Return (3, rows): position, slot in the full pool and slot in the SWA pool of every row."""
    counts = spans[:, 2]
    within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    positions = np.repeat(spans[:, 1], counts) + within
    rows = pages[np.repeat(spans[:, 3], counts) + positions // page_size]
    offsets = positions % page_size
    return np.stack([positions, rows * page_size + offsets, map[rows] * page_size + offsets])


class DeviceTables(Tables):
    """Tables on the device, with the position and the slots of every row, which all layers share.

    `positions` (rows,); `device_spans` as `spans`. Page tables and slots are there for either pool.
    """

    def __init__(self, spans: Ints, pages: Ints, map: Ints, page_size: int, device: torch.device) -> None:
        super().__init__(spans, pages, map, page_size)
        self._device = device
        self.device_spans = self._upload(self.spans)
        self.positions, full, swa = self._upload(_places(self.spans, pages, map, page_size)).unbind()
        self._slots = {True: full, False: swa}
        self._pages = {True: self._upload(pages), False: self._upload(map[pages])}
        self._tiles: dict[int, torch.Tensor] = {}

    def slots(self, full: bool) -> torch.Tensor:
        return self._slots[full]

    def page_table(self, full: bool) -> torch.Tensor:
        return self._pages[full]

    @property
    def single(self) -> bool:
        """Whether each span is one token."""
        return bool((self.spans[:, 2] == 1).all())

    def tiles(self, tokens: int) -> torch.Tensor:
        """Return (n, 2): span and first row within it of every run of `tokens` rows."""
        if tokens not in self._tiles:
            counts = -(-self.spans[:, 2] // tokens)
            within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
            pairs = np.stack([np.repeat(np.arange(len(counts)), counts), within * tokens], axis=1)
            self._tiles[tokens] = self._upload(pairs)
        return self._tiles[tokens]

    def narrowed(self, rows: Ints) -> DeviceTables:
        plain = Tables(self.spans, self.pages, self.map, self.page_size).narrowed(rows)
        return DeviceTables(plain.spans, plain.pages, plain.map, plain.page_size, self._device)

    def _upload(self, array: Ints) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device, non_blocking=True)


_ROW_NUMBERS = 7  # that fixed tables keep of a row: its span, its position, its two slots


class FixedDeviceTables(DeviceTables, FixedTables):
    """Tables whose tensors are parts of `buffer`: rows, page table of the full pool, that of the SWA pool."""

    def __init__(self, buffer: torch.Tensor, rows: int, map: Ints, page_size: int) -> None:
        head = _ROW_NUMBERS * rows
        entries = (len(buffer) - head) // 2
        self._head, self._swa = buffer[: head + entries], buffer[head + entries :]
        spans = np.zeros((rows, 4), np.int64)
        spans[:, 0], spans[:, 2] = np.arange(rows), 1
        super().__init__(spans, np.zeros(entries, np.int64), map, page_size, buffer.device)
        self.tiles(1)
        self.device_spans = self._head[: 4 * rows].view(rows, 4)
        self.positions, full, swa = self._head[4 * rows : head].view(3, rows).unbind()
        self._slots = {True: full, False: swa}
        self._pages = {True: self._head[head:], False: self._swa}

    def fill(self, spans: Ints, pages: Ints) -> None:
        self.spans = spans
        places = _places(spans, pages, self.map, self.page_size)
        # One copy for nearly all: each costs more than its bytes do.
        packed = np.concatenate([spans.ravel(), places.ravel(), pages])
        self._head[: len(packed)].copy_(torch.from_numpy(packed), non_blocking=True)
        self._swa[: len(pages)].copy_(torch.from_numpy(self.map[pages]), non_blocking=True)


class TritonOps:
    """FusedOps; tensors are on one CUDA device, or on the CPU under Triton's interpreter."""

    name = "Triton"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._wide = device.type == "cpu"  # the interpreter's, see the kernels

    def check(self) -> None:
        """Compile and run one small kernel; raise what Triton raises, say without a C compiler."""
        weight = torch.ones(_LEAST_DOT, device=self.device)
        out = self.rms_norm(weight.unsqueeze(0), Norm(weight, 0.0))
        if not torch.allclose(out, torch.ones_like(out)):
            raise RuntimeError("a kernel gave a wrong result")

    # Weights stay as they are: cuBLAS and the expert kernels read rows.

    def fits_half(self, *weights: torch.Tensor) -> bool:
        return all(weight.dtype == torch.bfloat16 for weight in weights)

    def pack(self, weight: torch.Tensor, *, half: bool) -> Packed:
        data = weight.detach().to(torch.bfloat16 if half else torch.float32).contiguous()
        return Packed(data, weight.shape[-2], weight.shape[-1])

    def pack_gate_up(self, weight: torch.Tensor, *, half: bool) -> Packed:
        packed = self.pack(weight, half=half)
        return Packed(packed.data, packed.columns // 2, packed.depth)

    def tables(self, spans: Ints, pages: Ints, map: Ints, page_size: int) -> DeviceTables:
        return DeviceTables(spans, pages, map, page_size, self.device)

    def fixed_buffer(self, rows: int, entries: int) -> torch.Tensor:
        return torch.zeros(_ROW_NUMBERS * rows + 2 * entries, dtype=torch.int64, device=self.device)

    def fixed_tables(self, buffer: torch.Tensor, rows: int, map: Ints, page_size: int) -> FixedDeviceTables:
        return FixedDeviceTables(buffer, rows, map, page_size)

    # Ops.

    def linear(
        self,
        x: torch.Tensor,
        weight: Packed,
        *,
        norm: Norm | None = None,
        residual: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if norm is not None:
            x = self.rms_norm(x, norm)
        y = functional.linear(x, weight.data.to(x.dtype))
        return self._add(y, residual, out)

    def gated_mlp(
        self,
        x: torch.Tensor,
        gate_up: Packed,
        down: Packed,
        *,
        norm: Norm | None,
        activation: str = "silu",
        residual: torch.Tensor | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        both = self.linear(x, gate_up, norm=norm)
        hidden = both.new_empty(len(both), gate_up.columns)
        block = min(1024, _pad(gate_up.columns))
        self._launch(
            kernels.gated_kernel,
            (len(both), triton.cdiv(gate_up.columns, block)),
            both, hidden, WIDTH=gate_up.columns, BLOCK=block, GELU=activation == "gelu_tanh",
        )  # fmt: skip
        return self.linear(hidden, down, residual=residual, out=out)

    def moe(
        self,
        x: torch.Tensor,
        router: Router,
        gate_up: Packed,
        down: Packed,
        *,
        norm: Norm | None,
        residual: torch.Tensor | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        n = x if norm is None else self.rms_norm(x, norm)
        shares, chosen = route_tokens(
            functional.linear(n.float(), router.weight.data),
            router.bias, router.top_k, normalise=router.normalise, scale=router.scale,
        )  # fmt: skip
        experts, place = _blocks(chosen, router.weight.columns)
        routed, depth, width = chosen.numel(), gate_up.depth, gate_up.columns
        hidden = n.new_empty(routed, width)
        parts = torch.empty(routed, depth, dtype=torch.float32, device=n.device)
        sizes = {"DEPTH": depth, "WIDTH": width, "ROWS": _EXPERT_ROWS, "COLUMNS": _EXPERT_COLUMNS}
        sizes |= {"STEP": 32, "WIDE": self._wide}
        self._launch(
            kernels.experts_up_kernel,
            (len(experts), triton.cdiv(width, _EXPERT_COLUMNS)),
            n, gate_up.data, hidden, experts, place, routed, router.top_k, **sizes,
        )  # fmt: skip
        self._launch(
            kernels.experts_down_kernel,
            (len(experts), triton.cdiv(depth, _EXPERT_COLUMNS)),
            hidden, down.data, shares.contiguous(), parts, experts, place, routed, **sizes,
        )  # fmt: skip
        y = parts.view(-1, router.top_k, depth).sum(1).to(x.dtype)
        return self._add(y, residual, out)

    def rms_norm(self, x: torch.Tensor, norm: Norm, residual: torch.Tensor | None = None) -> torch.Tensor:
        assert x.is_contiguous()
        y = torch.empty_like(x)
        self._launch(
            kernels.norm_kernel,
            (len(x),),
            x, norm.weight, residual, y, norm.eps,
            SIZE=x.shape[1], PAD=_pad(x.shape[1]), RESIDUAL=residual is not None,
        )  # fmt: skip
        return y

    def rope_and_store(
        self,
        qkv: torch.Tensor,
        heads: int,
        cos: torch.Tensor,
        sin: torch.Tensor,
        kv: KV,
        tables: Tables,
        *,
        full: bool,
        value_scale: float = 1.0,
        q_norm: Norm | None = None,
        k_norm: Norm | None = None,
    ) -> None:
        assert isinstance(tables, DeviceTables)
        k, v = kv
        kv_heads, slots, _ = k.shape
        self._rope(
            qkv, (heads, kv_heads, row_dim(k), row_dim(v)), cos, sin, tables,
            (k, v, tables.slots(full), slots), value_scale, q_norm, k_norm,
        )  # fmt: skip

    def rotate_queries(
        self,
        q: torch.Tensor,
        heads: int,
        cos: torch.Tensor,
        sin: torch.Tensor,
        tables: Tables,
        *,
        norm: Norm | None = None,
    ) -> None:
        assert isinstance(tables, DeviceTables)
        shape = heads, 0, q.shape[1] // heads, 1
        nowhere = q, q, tables.positions, 0  # no KV heads: never written
        self._rope(q, shape, cos, sin, tables, nowhere, 1.0, norm, norm)

    def attention(
        self,
        q: torch.Tensor,
        heads: int,
        kv: KV,
        tables: Tables,
        *,
        full: bool,
        scale: float,
        window: int | None,
        sink: torch.Tensor | None,
    ) -> torch.Tensor:
        assert isinstance(tables, DeviceTables)
        k, v = kv
        kv_heads, slots, _ = k.shape
        head_dim, v_dim = row_dim(k), row_dim(v)
        group = heads // kv_heads
        tokens = 1 if tables.single else max(_QUERY_ROWS // group, 1)
        tiles = tables.tiles(tokens)
        out = q.new_empty(len(q), heads * v_dim)
        self._launch(
            kernels.attention_kernel,
            (len(tiles), kv_heads),
            q, k, v, _scales(k), _scales(v), out,
            tables.device_spans, tiles, tables.page_table(full),
            q if sink is None else sink,
            q.stride(0), slots, tables.page_size, window or 0, scale,
            HEADS=heads, GROUP=group, HEAD_DIM=head_dim, V_DIM=v_dim,
            HEAD_PAD=_pad(head_dim), V_PAD=_pad(v_dim), ROWS=_pad(tokens * group), TOKENS=tokens, KEYS=_KEYS,
            WINDOWED=window is not None, SINK=sink is not None, WIDE=self._wide,
            FP8=k.dtype == torch.uint8, K_ROW=k.shape[-1], V_ROW=v.shape[-1],
        )  # fmt: skip
        return out

    def _rope(
        self,
        qkv: torch.Tensor,
        shape: tuple[int, int, int, int],
        cos: torch.Tensor,
        sin: torch.Tensor,
        tables: DeviceTables,
        pool: tuple[torch.Tensor, torch.Tensor, torch.Tensor, int],
        value_scale: float,
        q_norm: Norm | None,
        k_norm: Norm | None,
    ) -> None:
        heads, kv_heads, head_dim, v_dim = shape
        k, v, slots, count = pool
        half = cos.shape[-1]
        assert (q_norm is None) == (k_norm is None)
        q_weight, k_weight = (norm.weight if norm else cos for norm in (q_norm, k_norm))
        self._launch(
            kernels.rope_kernel,
            (len(qkv), heads + 2 * kv_heads),
            qkv, k, v, _scales(k), _scales(v), cos, sin, tables.positions, slots,
            q_weight, k_weight, qkv.stride(0), count, q_norm.eps if q_norm else 0.0, value_scale,
            HEADS=heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim, V_DIM=v_dim,
            HALF=half, HALF_PAD=_pad(half, 1), HEAD_PAD=_pad(head_dim, 1), V_PAD=_pad(v_dim, 1),
            NORM=q_norm is not None, FP8=k.dtype == torch.uint8, K_ROW=k.shape[-1], V_ROW=v.shape[-1],
        )  # fmt: skip

    def _add(self, y: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor | None) -> torch.Tensor:
        if out is None:
            return y if residual is None else y.add_(residual)
        return out.copy_(y) if residual is None else torch.add(residual, y, out=out)

    def _launch(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        if all(grid):
            kernel[grid](*arguments, **constants)


def _scales(rows: torch.Tensor) -> torch.Tensor:
    """Return fp8 rows as fp32, of which the last of each is its scale; other rows as they are."""
    return rows.view(torch.float32) if rows.dtype == torch.uint8 else rows


def _blocks(chosen: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort routed rows by expert, each expert's share padded to whole blocks; nothing waits for the device.

    Return the expert of each block, -1 for blocks beyond the last, and the routed rows (token * top_k + k) of
    each block, padded with a number past the end.
    """
    flat = chosen.flatten()
    routed = flat.numel()
    order = flat.argsort(stable=True)
    counts = torch.zeros(experts, dtype=torch.int64, device=flat.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    ends = counts.cumsum(0)
    blocks_of = (counts + _EXPERT_ROWS - 1) // _EXPERT_ROWS
    block_ends = blocks_of.cumsum(0)
    most = min(routed, routed // _EXPERT_ROWS + experts)
    block = torch.arange(most, device=flat.device)
    expert = torch.searchsorted(block_ends, block, right=True)
    used = expert < experts
    expert = expert.clamp(max=experts - 1)
    start = (block - block_ends[expert] + blocks_of[expert]) * _EXPERT_ROWS + ends[expert] - counts[expert]
    at = start[:, None] + torch.arange(_EXPERT_ROWS, device=flat.device)
    inside = (at < ends[expert][:, None]) & used[:, None]
    place = torch.where(inside, order[at.clamp(max=max(routed - 1, 0))], routed)
    return torch.where(used, expert, -1), place
