"""What a fused backend computes: one interface for the compiled CPU kernels and the Triton kernels.

Used by the engine thread through transom.llm.model.fused. The torch modules are the reference; a backend must
give their results up to rounding.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt
import torch

Ints = npt.NDArray[np.int64]
# K (kv_heads, slots, head_dim) and V (kv_heads, slots, v_head_dim) of any dtype, or stored rows (kv_rows.py)
KV = tuple[torch.Tensor, torch.Tensor]
ACTIVATIONS = ("silu", "gelu_tanh")


@dataclass(frozen=True)
class Packed:
    """A weight (columns, depth), or one a group, in the layout of the backend that packed it."""

    data: torch.Tensor
    columns: int
    depth: int


@dataclass(frozen=True)
class Norm:
    """RMSNorm; the weight is fp32 whatever the model's dtype is."""

    weight: torch.Tensor
    eps: float


@dataclass(frozen=True)
class Router:
    """Sigmoid router with a bias that takes part in the choice of experts only. All fp32."""

    weight: Packed
    bias: torch.Tensor
    top_k: int
    normalise: bool
    scale: float


class Tables:
    """Where the rows of a step stand.

    `spans` (n, 4): first row, its position, rows, place in `pages` of the request's first page. `pages` are
    full-pool page tables, one behind the other; `map` turns full pages into SWA pages.
    """

    def __init__(self, spans: Ints, pages: Ints, map: Ints, page_size: int) -> None:
        assert spans.dtype == pages.dtype == map.dtype == np.int64
        self.spans = np.ascontiguousarray(spans)
        self.pages = pages
        self.map = map
        self.page_size = page_size

    def narrowed(self, rows: Ints) -> Self:
        """Return the tables of some rows, ascending, which are numbered anew from 0."""
        of = np.searchsorted(self.spans[:, 0], rows, side="right") - 1
        spans = np.empty((len(rows), 4), np.int64)
        spans[:, 0] = np.arange(len(rows))
        spans[:, 1] = self.spans[of, 1] + rows - self.spans[of, 0]
        spans[:, 2] = 1
        spans[:, 3] = self.spans[of, 3]
        return type(self)(spans, self.pages, self.map, self.page_size)


class FixedTables(Tables):
    """Tables of single tokens, always as many, in memory that stays where it is: a recorded step reads it."""

    @abstractmethod
    def fill(self, spans: Ints, pages: Ints) -> None:
        """Take over the rows of a step, behind those of earlier steps that the device still computes."""


class FusedOps(Protocol):
    """Rows are the tokens of a step, packed without padding; activations are fp32 or bf16."""

    name: str
    device: torch.device

    def fits_half(self, *weights: torch.Tensor) -> bool:
        """Tell whether these weights should be packed as bf16: it loses nothing and saves memory traffic."""
        ...

    def pack(self, weight: torch.Tensor, *, half: bool) -> Packed:
        """Lay out (columns, depth) or (groups, columns, depth)."""
        ...

    def pack_gate_up(self, weight: torch.Tensor, *, half: bool) -> Packed:
        """Lay out [all gate rows | all up rows]; `columns` of the result counts the gate rows."""
        ...

    def tables(self, spans: Ints, pages: Ints, map: Ints, page_size: int) -> Tables:
        """Return the tables of a step in the form that this backend reads."""
        ...

    def fixed_buffer(self, rows: int, entries: int) -> torch.Tensor:
        """Return memory for fixed tables of up to `rows` rows with `entries` pages in their page tables."""
        ...

    def fixed_tables(self, buffer: torch.Tensor, rows: int, map: Ints, page_size: int) -> FixedTables:
        """Return tables of `rows` rows in `buffer`, which those of several sizes may share in turn."""
        ...

    def linear(
        self,
        x: torch.Tensor,
        weight: Packed,
        *,
        norm: Norm | None = None,
        residual: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return residual + norm(x) @ weight.T, (rows, columns); `out` may be the residual."""
        ...

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
        """Return residual + down(act(gate(n)) * up(n)) with n = norm(x); `out` may be x or the residual."""
        ...

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
        """Return residual + the weighted experts of norm(x); `out` may be x or the residual."""
        ...

    def rms_norm(self, x: torch.Tensor, norm: Norm, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Return residual + norm(x)."""
        ...

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
        """Norm and rotate q in place, and k on its way to the pool; scale v on its way there.

        qkv is (rows, all q | all k | all v), with no q at all if `heads` is 0. cos and sin are fp32
        (positions, half), for all positions up to the last one used. `full` says which pool `kv` is of.
        """
        ...

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
        """Norm and rotate q (rows, heads * head_dim) in place."""
        ...

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
        """Attend causally from q (rows, ...), its heads in front; return (rows, heads * v_head_dim).

        `window` counts the keys that a query sees, itself included; `sink` (heads) is fp32.
        """
        ...
