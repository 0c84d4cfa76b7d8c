"""What every served architecture tells about itself: one `LayerSpec` per layer and the common figures.

Used by the llm processes, the planner and nano's trainer. The engine, the pools and the planner read nothing
else of a model's configuration. Knows no torch and no config.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class LayerSpec:
    """Everything one layer's attention and feed-forward part depend on.

    `window` counts the keys a query sees, itself included; None means all earlier ones.
    `scale` multiplies q.k before the softmax.
    """

    full: bool
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    rotary_dim: int
    rope_theta: float
    window: int | None
    has_sink: bool
    moe: bool
    intermediate: int
    scale: float


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A decoder-only model with one spec per layer, and one that all `mtp_layers` MTP modules share.

    MTP module k has layer id num_layers + k. `weight_block` are the rows and columns that share one fp8
    scale, `qkv_shards` the number of slices that a fused qkv tensor interleaves.
    """

    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    rms_norm_eps: float
    tie_word_embeddings: bool
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None = None
    special_token_ids: Mapping[str, int] = field(default_factory=dict)
    mtp_layers: int = 0
    mtp_spec: LayerSpec | None = None
    num_experts: int = 0
    experts_per_token: int = 0
    qkv_shards: int = 1
    weight_block: tuple[int, int] = (128, 128)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def mtp_specs(self) -> tuple[LayerSpec, ...]:
        """The MTP modules' specs, one a module."""
        return (self.mtp_spec,) * self.mtp_layers if self.mtp_spec is not None else ()
