"""A decoder's weights as the fused kernels take them, whatever its architecture's modules look like.

Filled in by the architectures, packed by transom.llm.model.fused. Tensors are views of the parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from transom.llm.model.spec import LayerSpec


@dataclass(frozen=True, kw_only=True)
class RouterParts:
    """Sigmoid router: weight (experts, hidden), a bias (experts) that takes part in the choice only."""

    weight: torch.Tensor
    bias: torch.Tensor
    top_k: int
    normalise: bool
    scale: float


@dataclass(frozen=True, kw_only=True)
class LayerParts:
    """`x += post_attention(o(attention(input(x))))`, then `x += post_mlp(mlp(mlp_norm(x)))`.

    Norms are the factors by which the normed row is multiplied; None leaves a norm out. `qkv` holds all q
    rows, all k rows, all v rows; `gate_up` the gate rows, then the up rows. With a router both mlp weights
    have the expert in front.
    """

    spec: LayerSpec
    input_norm: torch.Tensor
    qkv: torch.Tensor
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    value_scale: float = 1.0
    sink: torch.Tensor | None = None
    output: torch.Tensor
    post_attention_norm: torch.Tensor | None = None
    mlp_norm: torch.Tensor
    router: RouterParts | None = None
    activation: str = "silu"
    gate_up: torch.Tensor
    down: torch.Tensor
    post_mlp_norm: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class DecoderParts:
    """All of a decoder but its head and embedding; `embed_scale` multiplies the embedding's rows."""

    layers: Sequence[LayerParts]
    norm: torch.Tensor
    embed_scale: float = 1.0
