"""The Gemma 3 text model: hybrid full/SWA blocks with normed queries and keys and GeGLU (llm processes).

Source: the paper and transformers' `gemma3_text`. Runs on flat packed tokens; attention is the backend's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from transom.kernels.rms_norm import rms_norm
from transom.kernels.rope import apply_rope
from transom.kernels.weights import Slot
from transom.llm.model.attention import AttentionBackend
from transom.llm.model.causal_lm import CausalLM
from transom.llm.model.gemma3_config import Gemma3Config
from transom.llm.model.mimo_v2 import RopeTables, qkv_sizes, rope_tables
from transom.llm.model.parts import DecoderParts, LayerParts
from transom.llm.model.spec import LayerSpec


class GemmaNorm(nn.Module):
    """RMSNorm that scales by 1 + weight, in fp32 whatever the dtype of its input."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x.float(), self.factors, self.eps).to(x.dtype)

    @property
    def factors(self) -> torch.Tensor:
        """What the normed row is multiplied by, in fp32."""
        return 1 + self.weight.float()


class Attention(nn.Module):
    """Attention of one layer; `qkv_proj` holds all q rows, then all k rows, then all v rows."""

    def __init__(self, config: Gemma3Config, spec: LayerSpec, layer: int) -> None:
        super().__init__()
        self.spec, self.layer = spec, layer
        self.sizes = qkv_sizes(spec)
        self.qkv_proj = nn.Linear(config.hidden_size, sum(self.sizes), bias=False)
        self.o_proj = nn.Linear(spec.heads * spec.v_head_dim, config.hidden_size, bias=False)
        self.q_norm = GemmaNorm(spec.head_dim, config.rms_norm_eps)
        self.k_norm = GemmaNorm(spec.head_dim, config.rms_norm_eps)

    def forward(self, x: torch.Tensor, rope: RopeTables, attn: AttentionBackend) -> torch.Tensor:
        spec = self.spec
        cos, sin = rope[spec.rope_theta, spec.rotary_dim]
        q, k, v = self.qkv_proj(x).split(self.sizes, dim=-1)
        out = attn.attend(
            self.layer,
            spec,
            apply_rope(self.q_norm(q.view(-1, spec.heads, spec.head_dim)), cos, sin),
            apply_rope(self.k_norm(k.view(-1, spec.kv_heads, spec.head_dim)), cos, sin),
            v.view(-1, spec.kv_heads, spec.v_head_dim),
            None,
        )
        projected: torch.Tensor = self.o_proj(out.flatten(1))
        return projected


class GeGLU(nn.Module):
    """`gate_up_proj` holds the gate rows, then the up rows; the gate's GELU is the tanh approximation."""

    def __init__(self, hidden_size: int, intermediate: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(hidden_size, 2 * intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        out: torch.Tensor = self.down_proj(functional.gelu(gate, approximate="tanh") * up)
        return out


class DecoderLayer(nn.Module):
    """Attention and feed-forward part, each normed before and after."""

    def __init__(self, config: Gemma3Config, spec: LayerSpec, layer: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, spec, layer)
        self.mlp = GeGLU(config.hidden_size, spec.intermediate)
        self.input_layernorm = GemmaNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = GemmaNorm(config.hidden_size, config.rms_norm_eps)
        self.pre_feedforward_layernorm = GemmaNorm(config.hidden_size, config.rms_norm_eps)
        self.post_feedforward_layernorm = GemmaNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: torch.Tensor, rope: RopeTables, attn: AttentionBackend) -> torch.Tensor:
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), rope, attn))
        out: torch.Tensor = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return out


class Gemma3ForCausalLM(CausalLM):
    """The text model. A checkpoint of the multimodal one is not read."""

    config: Gemma3Config

    def __init__(self, config: Gemma3Config) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, spec, i) for i, spec in enumerate(config.layers))
        self.norm = GemmaNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.mtp = nn.ModuleList()
        self.tie()

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Return (tokens, hidden): the rows times sqrt(hidden), a factor rounded to the rows' dtype."""
        rows: torch.Tensor = self.embed_tokens(ids)
        return rows * torch.tensor(self.config.hidden_size**0.5, dtype=rows.dtype, device=rows.device)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, attn: AttentionBackend) -> torch.Tensor:
        """Return hidden states (tokens, hidden) after the final norm for embeddings x (tokens, hidden)."""
        rope = rope_tables(self.config.layers, positions)
        for layer in self.layers:
            x = layer(x, rope, attn)
        out: torch.Tensor = self.norm(x)
        return out

    def parts(self) -> DecoderParts:
        layers = []
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            attention = layer.self_attn
            layers.append(
                LayerParts(
                    spec=attention.spec,
                    input_norm=layer.input_layernorm.factors,
                    qkv=attention.qkv_proj.weight,
                    q_norm=attention.q_norm.factors,
                    k_norm=attention.k_norm.factors,
                    output=attention.o_proj.weight,
                    post_attention_norm=layer.post_attention_layernorm.factors,
                    mlp_norm=layer.pre_feedforward_layernorm.factors,
                    activation="gelu_tanh",
                    gate_up=layer.mlp.gate_up_proj.weight,
                    down=layer.mlp.down_proj.weight,
                    post_mlp_norm=layer.post_feedforward_layernorm.factors,
                )
            )
        return DecoderParts(layers=layers, norm=self.norm.factors, embed_scale=self.config.hidden_size**0.5)

    def slots(self, is_in_checkpoint: Callable[[str], bool]) -> dict[str, Slot]:
        """Map the hub's tensor names to views of the parameters."""
        slots = {
            "model.embed_tokens.weight": Slot(self.embed_tokens.weight),
            "model.norm.weight": Slot(self.norm.weight),
        }
        if not self.config.tie_word_embeddings:
            slots["lm_head.weight"] = Slot(self.lm_head.weight)
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            prefix, attention, mlp = f"model.layers.{i}.", layer.self_attn, layer.mlp
            q, k, v = torch.split(attention.qkv_proj.weight, attention.sizes)
            gate, up = mlp.gate_up_proj.weight.chunk(2)
            parts = {
                **{f"self_attn.{name}_proj": part for name, part in (("q", q), ("k", k), ("v", v))},
                "self_attn.o_proj": attention.o_proj.weight,
                "self_attn.q_norm": attention.q_norm.weight,
                "self_attn.k_norm": attention.k_norm.weight,
                "mlp.gate_proj": gate,
                "mlp.up_proj": up,
                "mlp.down_proj": mlp.down_proj.weight,
                **{name: part.weight for name, part in layer.named_children() if isinstance(part, GemmaNorm)},
            }
            slots |= {f"{prefix}{name}.weight": Slot(part) for name, part in parts.items()}
        return slots
