"""The compiled CPU kernels as functions on tensors, and weights in the layout that they read.

Used by the engine thread, one call at a time. Each op has its reference in torch beside it in this package;
a row's result never depends on the rows computed with it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from transom.kernels.kv_rows import row_dim
from transom.kernels.ops import ACTIVATIONS, KV, FixedTables, Ints, Norm, Packed, Router, Tables

_PTR, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
# As in native.cpp.
_SIGNATURES: dict[str, tuple[Sequence[type], type | None]] = {
    "transom_lanes": ((), _INT),
    "transom_set_threads": ((_INT,), None),
    "transom_linear": (
        (_INT, _INT, _PTR, _LONG, _LONG, _LONG, _PTR, _FLOAT, _PTR, _LONG, _PTR, _LONG, _PTR, _LONG),
        None,
    ),
    "transom_gated_mlp": (
        (_INT, _INT, _PTR, _LONG, _LONG, _PTR, _FLOAT, _INT, _PTR, _LONG, _PTR, _PTR, _PTR),
        None,
    ),
    "transom_moe": (
        (
            *(_INT, _INT, _PTR, _LONG, _LONG, _PTR, _FLOAT),
            *(_PTR, _PTR, _LONG, _LONG, _INT, _FLOAT, _PTR, _PTR, _LONG, _PTR, _PTR),
        ),
        None,
    ),
    "transom_rope_and_store": (
        (
            *(_INT, _INT, _PTR, _LONG, _LONG, _LONG, _LONG, _LONG, _PTR, _PTR, _LONG, _PTR, _PTR),
            *(_FLOAT, _FLOAT, _PTR, _PTR, _LONG, _PTR, _LONG, _PTR, _PTR, _LONG),
        ),
        None,
    ),
    "transom_attention": (
        (
            *(_INT, _INT, _PTR, _LONG, _PTR, _PTR, _LONG, _PTR, _LONG, _PTR, _PTR),
            *(_LONG, _LONG, _LONG, _LONG, _LONG, _LONG, _FLOAT, _PTR, _PTR),
        ),
        None,
    ),
    "transom_rms_norm": ((_INT, _PTR, _LONG, _LONG, _PTR, _FLOAT, _PTR, _PTR), None),
}
DTYPES = (torch.float32, torch.bfloat16)
_KV_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.uint8: 2}


class NativeTables(Tables):
    """Tables with their addresses: ctypes takes longer to find one than an op takes to start."""

    def __init__(self, spans: Ints, pages: Ints, map: Ints, page_size: int) -> None:
        super().__init__(spans, pages, map, page_size)
        at = self.spans.ctypes.data, len(spans), pages.ctypes.data
        self.of_full = (*at, None, page_size)
        self.of_swa = (*at, map.ctypes.data, page_size)


class FixedNativeTables(NativeTables, FixedTables):
    """Copies what it is filled with: the addresses stay."""

    def fill(self, spans: Ints, pages: Ints) -> None:
        self.spans[:] = spans
        self.pages[: len(pages)] = pages


class NativeOps:
    """FusedOps of one compiled library. Tensors are on the CPU, fp32 or bf16, KV fp8 too; rows contiguous."""

    name = "compiled"
    device = torch.device("cpu")
    tables = NativeTables

    def __init__(self, path: Path, threads: int) -> None:
        self._library = ctypes.CDLL(str(path))
        for name, (arguments, result) in _SIGNATURES.items():
            function = getattr(self._library, name)
            function.argtypes, function.restype = arguments, result
        self.lanes: int = self._library.transom_lanes()
        self.set_threads(threads)

    def set_threads(self, threads: int) -> None:
        """Split ops over so many threads, the caller's included; shared by all users of the library."""
        self._library.transom_set_threads(threads)

    # Weights.

    def fits_half(self, *weights: torch.Tensor) -> bool:
        """Tell whether bf16 holds these weights exactly, as it does those of a bf16 checkpoint."""
        return all(bool((w.to(torch.bfloat16).to(w.dtype) == w).all()) for w in weights)

    def pack(self, weight: torch.Tensor, *, half: bool) -> Packed:
        """Lay out (columns, depth) or (groups, columns, depth) as bf16 (`half`) or fp32 panels."""
        return self._panels(weight, weight.shape[-2], half)

    def pack_gate_up(self, weight: torch.Tensor, *, half: bool) -> Packed:
        """Lay out [all gate rows | all up rows] so that a panel holds matching rows of both."""
        gate, up = weight.chunk(2, dim=-2)
        width = gate.shape[-2]
        pad = (0, 0, 0, -width % self.lanes)
        parts = [
            _cut(torch.nn.functional.pad(part, pad), self.lanes) for part in (gate, up)
        ]  # (..., panels, lanes, depth)
        return self._panels(torch.stack(parts, dim=-3).flatten(-4, -2), width, half)

    def _panels(self, weight: torch.Tensor, real: int, half: bool) -> Packed:
        columns = 2 * self.lanes
        padded = torch.nn.functional.pad(weight.detach(), (0, 0, 0, -weight.shape[-2] % columns))
        panels = _cut(padded, columns).transpose(-1, -2)
        dtype = torch.bfloat16 if half else torch.float32
        return Packed(panels.to(dtype).contiguous(), real, weight.shape[-1])

    # Tables that stay.

    def fixed_buffer(self, rows: int, entries: int) -> torch.Tensor:
        return torch.zeros(4 * rows + entries, dtype=torch.int64)

    def fixed_tables(self, buffer: torch.Tensor, rows: int, map: Ints, page_size: int) -> FixedNativeTables:
        spans, pages = np.split(buffer.numpy(), [4 * rows])
        return FixedNativeTables(spans.reshape(rows, 4), pages, map, page_size)

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
        rows, depth = x.shape
        assert depth == weight.depth, f"x has {depth} columns, the weight takes {weight.depth}"
        y = x.new_empty(rows, weight.columns) if out is None else out
        self._library.transom_linear(
            _half(x),
            _half(weight.data),
            x.data_ptr(),
            x.stride(0),
            rows,
            depth,
            norm.weight.data_ptr() if norm else None,
            norm.eps if norm else 0.0,
            weight.data.data_ptr(),
            weight.columns,
            residual.data_ptr() if residual is not None else None,
            residual.stride(0) if residual is not None else 0,
            y.data_ptr(),
            y.stride(0),
        )
        return y

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
        rows, depth = x.shape
        assert x.is_contiguous()
        assert depth == gate_up.depth == down.columns
        assert gate_up.data.dtype == down.data.dtype
        y = torch.empty_like(x) if out is None else out
        self._library.transom_gated_mlp(
            _half(x),
            _half(gate_up.data),
            x.data_ptr(),
            rows,
            depth,
            norm.weight.data_ptr() if norm else None,
            norm.eps if norm else 0.0,
            ACTIVATIONS.index(activation),
            gate_up.data.data_ptr(),
            gate_up.columns,
            down.data.data_ptr(),
            residual.data_ptr() if residual is not None else None,
            y.data_ptr(),
        )
        return y

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
        rows, depth = x.shape
        assert x.is_contiguous()
        assert depth == gate_up.depth == down.columns == router.weight.depth
        assert gate_up.data.dtype == down.data.dtype
        assert router.weight.data.dtype == torch.float32
        y = torch.empty_like(x) if out is None else out
        self._library.transom_moe(
            _half(x),
            _half(gate_up.data),
            x.data_ptr(),
            rows,
            depth,
            norm.weight.data_ptr() if norm else None,
            norm.eps if norm else 0.0,
            router.weight.data.data_ptr(),
            router.bias.data_ptr(),
            router.weight.columns,
            router.top_k,
            int(router.normalise),
            router.scale,
            gate_up.data.data_ptr(),
            down.data.data_ptr(),
            gate_up.columns,
            residual.data_ptr() if residual is not None else None,
            y.data_ptr(),
        )
        return y

    def rms_norm(self, x: torch.Tensor, norm: Norm, residual: torch.Tensor | None = None) -> torch.Tensor:
        assert x.is_contiguous()
        y = torch.empty_like(x)
        self._library.transom_rms_norm(
            _half(x),
            x.data_ptr(),
            x.shape[0],
            x.shape[1],
            norm.weight.data_ptr(),
            norm.eps,
            residual.data_ptr() if residual is not None else None,
            y.data_ptr(),
        )
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
        assert isinstance(tables, NativeTables)
        k, v = kv
        kv_heads, slots, head_dim, v_head_dim = *k.shape[:2], row_dim(k), row_dim(v)
        assert qkv.shape[1] == heads * head_dim + kv_heads * (head_dim + v_head_dim)
        self._library.transom_rope_and_store(
            _half(qkv),
            _KV_TYPES[k.dtype],
            qkv.data_ptr(),
            qkv.stride(0),
            heads,
            kv_heads,
            head_dim,
            v_head_dim,
            cos.data_ptr(),
            sin.data_ptr(),
            cos.shape[-1],
            q_norm.weight.data_ptr() if q_norm else None,
            k_norm.weight.data_ptr() if k_norm else None,
            q_norm.eps if q_norm else 0.0,
            value_scale,
            k.data_ptr(),
            v.data_ptr(),
            slots,
            *(tables.of_full if full else tables.of_swa),
        )

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
        assert isinstance(tables, NativeTables)
        self._library.transom_rope_and_store(
            _half(q),
            0,
            q.data_ptr(),
            q.stride(0),
            heads,
            0,
            q.shape[1] // heads,
            0,
            cos.data_ptr(),
            sin.data_ptr(),
            cos.shape[-1],
            norm.weight.data_ptr() if norm else None,
            None,
            norm.eps if norm else 0.0,
            1.0,
            None,
            None,
            0,
            *tables.of_full,
        )

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
        assert isinstance(tables, NativeTables)
        k, v = kv
        kv_heads, slots, head_dim, v_head_dim = *k.shape[:2], row_dim(k), row_dim(v)
        assert heads % kv_heads == 0
        out = q.new_empty(q.shape[0], heads * v_head_dim)
        self._library.transom_attention(
            _half(q),
            _KV_TYPES[k.dtype],
            q.data_ptr(),
            q.stride(0),
            k.data_ptr(),
            v.data_ptr(),
            slots,
            *(tables.of_full if full else tables.of_swa),
            heads,
            kv_heads,
            head_dim,
            v_head_dim,
            window or 0,
            scale,
            sink.data_ptr() if sink is not None else None,
            out.data_ptr(),
        )
        return out


def _cut(weight: torch.Tensor, rows: int) -> torch.Tensor:
    """Return (..., pieces, rows, depth)."""
    return weight.reshape(*weight.shape[:-2], -1, rows, weight.shape[-1])


def _half(x: torch.Tensor) -> int:
    assert x.dtype in DTYPES, f"{x.dtype} is neither float32 nor bfloat16"
    assert x.stride(-1) == 1, "rows must be contiguous"
    return int(x.dtype == torch.bfloat16)
