"""A decoder on fused kernels: the numbers of its torch modules in a handful of calls a layer.

Built from a loaded model, which it does not keep; used by the engine thread. Knows no requests and no
architecture: models say what they are made of (transom.llm.model.parts).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from transom.kernels.ops import KV, FusedOps, Ints, Norm, Packed, Router, Tables
from transom.kernels.rope import rope_table
from transom.llm.model.causal_lm import CausalLM
from transom.llm.model.parts import DecoderParts, LayerParts, RouterParts
from transom.llm.model.spec import LayerSpec
from transom.llm.pools import DualPools, RequestKV

_LEAST_POSITIONS = 1024

# pages of a request, position of its first new token, new tokens
Span = tuple[RequestKV, int, int]


@dataclass(frozen=True)
class _Layer:
    """One layer's weights as the backend wants them. `q` is apart from k and v in the last layer only."""

    spec: LayerSpec
    value_scale: float
    activation: str
    input_norm: Norm
    q: Packed | None
    kv: Packed
    q_norm: Norm | None
    k_norm: Norm | None
    sink: torch.Tensor | None
    output: Packed
    post_attention_norm: Norm | None
    mlp_norm: Norm
    router: Router | None
    gate_up: Packed
    down: Packed
    post_mlp_norm: Norm | None


def list_spans(spans: Sequence[Span], at: int = 0) -> tuple[Ints, list[Ints]]:
    """Return the spans as tables have them, (n, 4), and their page tables from `at` on."""
    rows, listed, pages = 0, [], []
    for kv, begin, count in spans:
        listed.append((rows, begin, count, at))
        pages.append(kv.pages[: kv.count])
        rows += count
        at += kv.count
    return np.array(listed), pages


@dataclass(frozen=True)
class Placement:
    """Where the rows of one step stand in the pools; the last of them is at `last_position` at most."""

    pools: DualPools
    tables: Tables
    last_position: int

    def kv(self, layer: int, spec: LayerSpec) -> KV:
        """Return K and V by slot of one layer."""
        store, index = self.pools.full if spec.full else self.pools.swa, self.pools.index_of[layer]
        return store.k_slots[index], store.v_slots[index]


class FusedModel:
    """The target model without its MTP modules."""

    def __init__(self, model: CausalLM, parts: DecoderParts, ops: FusedOps) -> None:
        self.config = model.config
        self.ops = ops
        self._embedding = model.embed_tokens.weight.detach()
        # Rounded to the weights' dtype, as the model's own module has it.
        self._embed_scale = torch.tensor(parts.embed_scale, dtype=self._embedding.dtype).item()
        eps = model.config.rms_norm_eps
        last = len(parts.layers) - 1
        self._layers = [_pack(layer, ops, eps, last=i == last) for i, layer in enumerate(parts.layers)]
        self._norm = Norm(parts.norm.detach().float(), eps)
        head = model.lm_head.weight
        self._head = ops.pack(head, half=ops.fits_half(head))
        self._rope: dict[tuple[float, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._positions = 0

    @property
    def weight_bytes(self) -> int:
        """Memory of the packed weights, the embedding left out."""
        packed = [self._head]
        for layer in self._layers:
            parts = layer.q, layer.kv, layer.output, layer.gate_up, layer.down
            packed += [part for part in parts if part is not None]
        return sum(p.data.numel() * p.data.element_size() for p in packed)

    def place(self, pools: DualPools, spans: Sequence[Span]) -> Placement:
        """Say where the rows of a step stand."""
        listed, pages = list_spans(spans)
        tables = self.ops.tables(listed, np.concatenate(pages), pools.swa_of, pools.page_size)
        return Placement(pools, tables, int((listed[:, 1] + listed[:, 2]).max()) - 1)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Return (tokens, hidden) for token ids (tokens,)."""
        rows = self._embedding.index_select(0, ids)
        return rows if self._embed_scale == 1.0 else rows * self._embed_scale

    def forward(self, x: torch.Tensor, placement: Placement, rows: Ints) -> torch.Tensor:
        """Store the KV of x (tokens, hidden), which is overwritten; return the normed states of `rows`.

        `rows` ascend. The last layer stores K and V of all tokens but computes the rest for `rows` alone.
        """
        self.reserve_positions(placement.last_position + 1)
        ops, tables = self.ops, placement.tables
        for i, layer in enumerate(self._layers):
            spec = layer.spec
            cos, sin = self._rope[spec.rope_theta, spec.rotary_dim]
            kv = placement.kv(i, spec)
            q = ops.linear(x, layer.kv, norm=layer.input_norm)
            heads = 0 if layer.q else spec.heads
            ops.rope_and_store(
                q, heads, cos, sin, kv, tables,
                full=spec.full, value_scale=layer.value_scale, q_norm=layer.q_norm, k_norm=layer.k_norm,
            )  # fmt: skip
            if layer.q is not None:
                if len(rows) != len(x):
                    x = x[torch.from_numpy(rows).to(x.device, non_blocking=True)]
                    tables = tables.narrowed(rows)
                if not len(x):
                    return x
                q = ops.linear(x, layer.q, norm=layer.input_norm)
                ops.rotate_queries(q, spec.heads, cos, sin, tables, norm=layer.q_norm)
            out = ops.attention(
                q, spec.heads, kv, tables,
                full=spec.full, scale=spec.scale, window=spec.window, sink=layer.sink,
            )  # fmt: skip
            if layer.post_attention_norm is None:
                ops.linear(out, layer.output, residual=x, out=x)
            else:
                x = ops.rms_norm(ops.linear(out, layer.output), layer.post_attention_norm, x)
            x = self._feed_forward(layer, x)
        return ops.rms_norm(x, self._norm)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return fp32 logits (rows, vocab)."""
        return self.ops.linear(hidden, self._head).float()

    def reserve_positions(self, positions: int) -> None:
        """Have the rotations of so many positions; they double, so that growing costs little a token.

        They stay where they are in memory until more are wanted.
        """
        if positions <= self._positions:
            return
        self._positions = max(_LEAST_POSITIONS, 1 << (positions - 1).bit_length())
        at = torch.arange(self._positions, device=self._embedding.device)
        keys = {(layer.spec.rope_theta, layer.spec.rotary_dim) for layer in self._layers}
        self._rope = {key: rope_table(at, *key) for key in keys}

    def _feed_forward(self, layer: _Layer, x: torch.Tensor) -> torch.Tensor:
        """Return x with the dense or the routed feed-forward part added; x may be overwritten."""
        ops, norm, gate_up, down = self.ops, layer.mlp_norm, layer.gate_up, layer.down
        post = layer.post_mlp_norm
        into = x if post is None else None
        if layer.router is None:
            activation = layer.activation
            y = ops.gated_mlp(x, gate_up, down, norm=norm, activation=activation, residual=into, out=into)
        else:
            y = ops.moe(x, layer.router, gate_up, down, norm=norm, residual=into, out=into)
        return y if post is None else ops.rms_norm(y, post, x)


def _pack(layer: LayerParts, ops: FusedOps, eps: float, *, last: bool) -> _Layer:
    half = ops.fits_half(layer.qkv, layer.output, layer.gate_up, layer.down)
    spec = layer.spec
    q_rows = spec.heads * spec.head_dim if last else 0

    def norm(weight: torch.Tensor) -> Norm:
        return Norm(weight.detach().float(), eps)

    def maybe_norm(weight: torch.Tensor | None) -> Norm | None:
        return None if weight is None else norm(weight)

    return _Layer(
        spec=spec,
        value_scale=layer.value_scale,
        activation=layer.activation,
        input_norm=norm(layer.input_norm),
        q=ops.pack(layer.qkv[:q_rows], half=half) if last else None,
        kv=ops.pack(layer.qkv[q_rows:], half=half),
        q_norm=maybe_norm(layer.q_norm),
        k_norm=maybe_norm(layer.k_norm),
        sink=None if layer.sink is None else layer.sink.detach().float(),
        output=ops.pack(layer.output, half=half),
        post_attention_norm=maybe_norm(layer.post_attention_norm),
        mlp_norm=norm(layer.mlp_norm),
        router=None if layer.router is None else _router(layer.router, ops),
        gate_up=ops.pack_gate_up(layer.gate_up, half=half),
        down=ops.pack(layer.down, half=half),
        post_mlp_norm=maybe_norm(layer.post_mlp_norm),
    )


def _router(parts: RouterParts, ops: FusedOps) -> Router:
    weight = ops.pack(parts.weight, half=False)
    return Router(weight, parts.bias.detach().float(), parts.top_k, parts.normalise, parts.scale)


def fused(model: CausalLM, ops: FusedOps) -> FusedModel | None:
    """Return the model on fused kernels, or None when its architecture has no parts for them."""
    parts = model.parts()
    return None if parts is None else FusedModel(model, parts, ops)
