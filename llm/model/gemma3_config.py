"""Configuration of a Gemma 3 text model (`gemma3_text`), read from its config.json (llm processes).

Knows the spellings of transformers 4 and 5. Knows no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transom.errors import ConfigError
from transom.llm.model.reader import ConfigReader
from transom.llm.model.spec import DecoderConfig, LayerSpec

_KINDS = {"full_attention": True, "sliding_attention": False}
_DEFAULT_PATTERN = 6
_DEFAULT_THETA = {True: 1_000_000.0, False: 10_000.0}


@dataclass(frozen=True, kw_only=True)
class Gemma3Config(DecoderConfig):
    """A Gemma 3 text model: five layers with a window to each full one, all dense."""

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Gemma3Config:
        """Build from a parsed config.json. Raise ConfigError naming the key and its value."""
        return _Reader(raw).config()


class _Reader(ConfigReader):
    def config(self) -> Gemma3Config:
        self.refuse_other(
            {
                "hidden_activation": ("gelu_pytorch_tanh", None),
                "attention_bias": (False, None),
                "attn_logit_softcapping": (None,),
                "final_logit_softcapping": (None,),
                "use_bidirectional_attention": (False, None),
            }
        )
        return Gemma3Config(
            vocab_size=self.integer("vocab_size", low=1),
            hidden_size=self.integer("hidden_size", low=1),
            layers=tuple(self._spec(full) for full in self._kinds()),
            rms_norm_eps=self.number("rms_norm_eps", default=1e-6),
            tie_word_embeddings=bool(self.raw.get("tie_word_embeddings", True)),
            max_position_embeddings=self.integer("max_position_embeddings", default=131_072, low=1),
            eos_token_ids=self.eos_token_ids(),
            pad_token_id=self.raw.get("pad_token_id"),
        )

    def _kinds(self) -> list[bool]:
        """Return which layers are full."""
        listed = self.raw.get("layer_types")
        if listed is None:
            each = self.integer(
                "sliding_window_pattern", "_sliding_window_pattern", default=_DEFAULT_PATTERN, low=1
            )
            return [(layer + 1) % each == 0 for layer in range(self.num_layers)]
        if not isinstance(listed, list) or len(listed) != self.num_layers:
            raise ConfigError(
                f"layer_types must list one value per layer ({self.num_layers}), not {listed!r}"
            )
        wrong = [kind for kind in listed if kind not in _KINDS]
        if wrong:
            raise ConfigError(f"layer_types holds {wrong[0]!r}; allowed: {sorted(_KINDS)}")
        return [_KINDS[kind] for kind in listed]

    def _spec(self, full: bool) -> LayerSpec:
        heads = self.integer("num_attention_heads", low=1)
        kv_heads = self.integer("num_key_value_heads", low=1)
        head_dim = self.integer("head_dim", default=256, low=2)
        if heads % kv_heads or head_dim % 2:
            raise ConfigError(f"{heads} heads of {head_dim} cannot share {kv_heads} KV heads, or are odd")
        return LayerSpec(
            full=full,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            v_head_dim=head_dim,
            rotary_dim=head_dim,
            rope_theta=self._theta(full),
            window=None if full else self.integer("sliding_window", low=1),
            has_sink=False,
            moe=False,
            intermediate=self.integer("intermediate_size", low=1),
            scale=self.number("query_pre_attn_scalar", default=256) ** -0.5,
        )

    def _theta(self, full: bool) -> float:
        parameters = self.raw.get("rope_parameters")
        if isinstance(parameters, Mapping):
            name = "full_attention" if full else "sliding_attention"
            entry = parameters.get(name, parameters)
            self._refuse_scaling(f"rope_parameters.{name}", entry)
            if "rope_theta" in entry:
                return float(entry["rope_theta"])
        if full:
            self._refuse_scaling("rope_scaling", self.raw.get("rope_scaling") or {})
        return self.number("rope_theta" if full else "rope_local_base_freq", default=_DEFAULT_THETA[full])

    def _refuse_scaling(self, key: str, entry: Mapping[str, Any]) -> None:
        kind = entry.get("rope_type", entry.get("type", "default"))
        if kind != "default":
            raise ConfigError(f"{key}: rope type {kind!r} is not supported; allowed: 'default'")
