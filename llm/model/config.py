"""Configuration of a MiMo-V2 language model, read from a checkpoint's config.json.

Used by the llm processes and by nano's trainer. Turns the hub's spelling and transformers' spelling into one
`LayerSpec` per layer, so that nothing else asks which kind of layer it is looking at. Knows no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transom.errors import ConfigError
from transom.llm.model.reader import ConfigReader, read_json
from transom.llm.model.spec import DecoderConfig, LayerSpec


@dataclass(frozen=True, kw_only=True)
class MiMoV2Config(DecoderConfig):
    """A MiMo-V2 language model."""

    value_scale: float
    norm_topk_prob: bool
    routed_scaling_factor: float

    @classmethod
    def from_folder(cls, folder: str | Path) -> MiMoV2Config:
        """Read `folder/config.json`. Raise ConfigError when it is absent, no JSON or not a MiMo-V2 config."""
        return cls.from_dict(read_json(folder))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> MiMoV2Config:
        """Build from a parsed config.json. Raise ConfigError naming the key and its value."""
        return _Reader(raw).config()


_MODEL_TYPES = ("mimo_v2", "mimo_v2_flash")


class _Reader(ConfigReader):
    def config(self) -> MiMoV2Config:
        self._refuse_unsupported()
        full = self._pattern("hybrid_layer_pattern", "layer_types", {0: True, 1: False}, _FULL_NAMES)
        sparse = self._pattern("moe_layer_freq", "mlp_layer_types", {0: False, 1: True}, _SPARSE_NAMES)
        dense_size = self.integer("intermediate_size", low=1)
        moe_size = self.integer("moe_intermediate_size", default=dense_size, low=1)
        mtp_size = self.integer("mtp_intermediate_size", default=dense_size, low=1)
        layers = tuple(
            self._spec(is_full, moe=is_moe, intermediate=moe_size if is_moe else dense_size)
            for is_full, is_moe in zip(full, sparse)
        )
        experts = self.integer("n_routed_experts", "num_local_experts", default=0, low=0)
        per_token = self.integer("num_experts_per_tok", default=0, low=0)
        if any(sparse) and not 1 <= per_token <= experts:
            raise ConfigError(f"num_experts_per_tok = {per_token} must be in 1..n_routed_experts = {experts}")
        block = self.raw.get("quantization_config") or {}
        return MiMoV2Config(
            vocab_size=self.integer("vocab_size", low=1),
            hidden_size=self.integer("hidden_size", low=1),
            layers=layers,
            mtp_layers=self.integer("num_nextn_predict_layers", "num_mtp_layers", default=0, low=0),
            mtp_spec=self._spec(False, moe=False, intermediate=mtp_size),
            rms_norm_eps=self.number("layernorm_epsilon", "rms_norm_eps", default=1e-5),
            value_scale=self.number("attention_value_scale", default=1.0),
            num_experts=experts,
            experts_per_token=per_token,
            norm_topk_prob=bool(self.raw.get("norm_topk_prob", True)),
            routed_scaling_factor=self.number("routed_scaling_factor", default=1.0),
            qkv_shards=self.integer("qkv_shards", default=self.integer("num_key_value_heads", low=1), low=1),
            weight_block=_pair(block.get("weight_block_size") or (128, 128)),
            tie_word_embeddings=bool(self.raw.get("tie_word_embeddings", False)),
            max_position_embeddings=self.integer("max_position_embeddings", default=262144, low=1),
            eos_token_ids=self.eos_token_ids(),
            pad_token_id=self.raw.get("pad_token_id"),
            special_token_ids=self.token_ids(),
        )

    def _refuse_unsupported(self) -> None:
        allowed: dict[str, tuple[Any, ...]] = {
            "model_type": _MODEL_TYPES,
            "hidden_act": ("silu", None),
            "scoring_func": ("sigmoid", None),
            "topk_method": ("noaux_tc", None),
            "n_group": (1, None),
            "topk_group": (1, None),
            "n_shared_experts": (0, None),
            "attention_bias": (False, None),
        }
        self.refuse_other(allowed)

    def _pattern(
        self, hub: str, transformers: str, hub_values: Mapping[int, bool], names: Mapping[str, bool]
    ) -> tuple[bool, ...]:
        key, values = (hub, self.raw.get(hub)), (transformers, self.raw.get(transformers))
        name, listed = key if key[1] is not None else values
        table: Mapping[Any, bool] = hub_values if name == hub else names
        if not isinstance(listed, Sequence) or len(listed) != self.num_layers:
            raise ConfigError(f"{name} must list one value per layer ({self.num_layers}), not {listed!r}")
        wrong = [value for value in listed if value not in table]
        if wrong:
            raise ConfigError(f"{name} holds {wrong[0]!r}; allowed: {sorted(table)}")
        return tuple(table[value] for value in listed)

    def _spec(self, full: bool, *, moe: bool, intermediate: int) -> LayerSpec:
        heads, kv_heads = self._heads(full)
        swa = () if full else ("swa_head_dim",)
        swa_v = () if full else ("swa_v_head_dim",)
        head_dim = self.integer(*swa, "head_dim", low=1)
        theta, factor = self._rope(full)
        rotary_dim = int(head_dim * factor)
        if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
            raise ConfigError(
                f"partial_rotary_factor = {factor} rotates {rotary_dim} of {head_dim} dims; not even and > 0"
            )
        if heads % kv_heads:
            raise ConfigError(f"{heads} attention heads cannot share {kv_heads} KV heads evenly ({full=})")
        sink_key, sink_default = (
            ("add_full_attention_sink_bias", False) if full else ("add_swa_attention_sink_bias", True)
        )
        return LayerSpec(
            full=full,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            v_head_dim=self.integer(*swa_v, "v_head_dim", default=head_dim, low=1),
            rotary_dim=rotary_dim,
            rope_theta=theta,
            window=None if full else self._window(),
            has_sink=bool(self.raw.get(sink_key, sink_default)),
            moe=moe,
            intermediate=intermediate,
            scale=1.0 / math.sqrt(head_dim),
        )

    def _heads(self, full: bool) -> tuple[int, int]:
        heads = self.integer("num_attention_heads", low=1)
        kv_heads = self.integer("num_key_value_heads", low=1)
        if full:
            return heads, kv_heads
        # transformers has no SWA head fields: its SWA layers hold twice the KV heads of the full ones
        doubled = kv_heads * 2 if "layer_types" in self.raw else kv_heads
        return (
            self.integer("swa_num_attention_heads", default=heads, low=1),
            self.integer("swa_num_key_value_heads", default=doubled, low=1),
        )

    def _window(self) -> int:
        window = self.integer("sliding_window", "sliding_window_size", low=1)
        return self.integer("window_keys", default=window + 1, low=1)

    def _rope(self, full: bool) -> tuple[float, float]:
        """Return (theta, rotated share of head_dim)."""
        parameters = self.raw.get("rope_parameters")
        if isinstance(parameters, Mapping):
            entry = parameters.get("full_attention" if full else "sliding_attention", parameters)
            kind = entry.get("rope_type", "default")
            if kind != "default":
                raise ConfigError(
                    f"rope_parameters.rope_type = {kind!r} is not supported; allowed: 'default'"
                )
            if "rope_theta" in entry:
                return float(entry["rope_theta"]), float(entry.get("partial_rotary_factor", 0.334))
        scaling = self.raw.get("rope_scaling") or {}
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind != "default":
            raise ConfigError(f"rope_scaling type = {kind!r} is not supported; allowed: 'default'")
        theta = self.number("rope_theta") if full else self.number("swa_rope_theta", "rope_theta")
        return theta, self.number("partial_rotary_factor")


_FULL_NAMES = {"full_attention": True, "sliding_attention": False}
_SPARSE_NAMES = {"dense": False, "sparse": True}


def _pair(block: Sequence[int]) -> tuple[int, int]:
    if len(block) != 2 or min(block) < 1:
        raise ConfigError(f"quantization_config.weight_block_size = {block!r} must be two whole numbers >= 1")
    return int(block[0]), int(block[1])
