"""The MiMo-V2 language model: embeddings, hybrid full/SWA blocks, MTP modules, head (llm processes, trainer).

Runs on flat packed tokens. Knows neither requests nor KV caches: attention is the backend's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.nn import functional

from transom.kernels.moe import route_tokens, run_experts, swiglu
from transom.kernels.rms_norm import rms_norm
from transom.kernels.rope import apply_rope, rope_table
from transom.kernels.weights import Slot
from transom.llm.model.attention import AttentionBackend
from transom.llm.model.causal_lm import CausalLM
from transom.llm.model.config import MiMoV2Config
from transom.llm.model.parts import DecoderParts, LayerParts, RouterParts
from transom.llm.model.spec import LayerSpec

RopeTables = Mapping[tuple[float, int], tuple[torch.Tensor, torch.Tensor]]


def rope_tables(specs: Sequence[LayerSpec], positions: torch.Tensor) -> RopeTables:
    """One (cos, sin) per distinct rotary setting, so that layers share what they have in common."""
    keys = {(spec.rope_theta, spec.rotary_dim) for spec in specs}
    return {key: rope_table(positions, *key) for key in keys}


def qkv_sizes(spec: LayerSpec) -> list[int]:
    """Rows of q, k and v in the fused projection."""
    return [spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.kv_heads * spec.v_head_dim]


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    """Attention of one layer. `qkv_proj` holds all q rows, then all k rows, then all v rows."""

    def __init__(self, config: MiMoV2Config, spec: LayerSpec, layer: int) -> None:
        super().__init__()
        self.spec = spec
        self.layer = layer
        self.value_scale = config.value_scale
        self.sizes = qkv_sizes(spec)
        self.qkv_proj = nn.Linear(config.hidden_size, sum(self.sizes), bias=False)
        self.o_proj = nn.Linear(spec.heads * spec.v_head_dim, config.hidden_size, bias=False)
        self.attention_sink_bias = nn.Parameter(torch.zeros(spec.heads)) if spec.has_sink else None

    def forward(self, x: torch.Tensor, rope: RopeTables, attn: AttentionBackend) -> torch.Tensor:
        spec = self.spec
        cos, sin = rope[spec.rope_theta, spec.rotary_dim]
        q, k, v = self.qkv_proj(x).split(self.sizes, dim=-1)
        out = attn.attend(
            self.layer,
            spec,
            apply_rope(q.view(-1, spec.heads, spec.head_dim), cos, sin),
            apply_rope(k.view(-1, spec.kv_heads, spec.head_dim), cos, sin),
            v.view(-1, spec.kv_heads, spec.v_head_dim) * self.value_scale,
            self.attention_sink_bias,
        )
        projected: torch.Tensor = self.o_proj(out.flatten(1))
        return projected


class DenseMLP(nn.Module):
    """SwiGLU; `gate_up_proj` holds the gate rows, then the up rows."""

    def __init__(self, hidden_size: int, intermediate: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(hidden_size, 2 * intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(swiglu(self.gate_up_proj(x)))
        return out


class Router(nn.Module):
    """Choose the experts of each token. Weights and bias stay fp32 in a half-precision model.

    `e_score_correction_bias` is no parameter of the loss: a trainer steps it by the load it observes.
    """

    weight: nn.Parameter
    e_score_correction_bias: torch.Tensor

    def __init__(self, config: MiMoV2Config) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        nn.init.normal_(self.weight, std=0.02)
        self.register_buffer("e_score_correction_bias", torch.zeros(config.num_experts))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (weights fp32, expert ids), each (tokens, experts_per_token)."""
        return route_tokens(
            functional.linear(x.float(), self.weight),
            self.e_score_correction_bias,
            self.config.experts_per_token,
            normalise=self.config.norm_topk_prob,
            scale=self.config.routed_scaling_factor,
        )

    def parts(self) -> RouterParts:
        return RouterParts(
            weight=self.weight,
            bias=self.e_score_correction_bias,
            top_k=self.config.experts_per_token,
            normalise=self.config.norm_topk_prob,
            scale=self.config.routed_scaling_factor,
        )


class MoE(nn.Module):
    """Routed experts: gate_up (experts, 2 * intermediate, hidden), down (experts, hidden, intermediate)."""

    def __init__(self, config: MiMoV2Config, intermediate: int) -> None:
        super().__init__()
        experts, hidden = config.num_experts, config.hidden_size
        self.gate = Router(config)
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * intermediate, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, intermediate))
        nn.init.normal_(self.gate_up, std=hidden**-0.5)
        nn.init.normal_(self.down, std=intermediate**-0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, experts = self.gate(x)
        return run_experts(x, weights, experts, self.gate_up, self.down)


class DecoderLayer(nn.Module):
    def __init__(self, config: MiMoV2Config, spec: LayerSpec, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, spec, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = (
            MoE(config, spec.intermediate) if spec.moe else DenseMLP(config.hidden_size, spec.intermediate)
        )

    def forward(self, x: torch.Tensor, rope: RopeTables, attn: AttentionBackend) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope, attn)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out

    def parts(self) -> LayerParts:
        attention, mlp = self.self_attn, self.mlp
        router: RouterParts | None = None
        gate_up: torch.Tensor
        down: torch.Tensor
        if isinstance(mlp, MoE):
            router, gate_up, down = mlp.gate.parts(), mlp.gate_up, mlp.down
        else:
            assert isinstance(mlp, DenseMLP)
            gate_up, down = mlp.gate_up_proj.weight, mlp.down_proj.weight
        return LayerParts(
            spec=attention.spec,
            input_norm=self.input_layernorm.weight,
            qkv=attention.qkv_proj.weight,
            value_scale=attention.value_scale,
            sink=attention.attention_sink_bias,
            output=attention.o_proj.weight,
            mlp_norm=self.post_attention_layernorm.weight,
            router=router,
            gate_up=gate_up,
            down=down,
        )


class MTPModule(nn.Module):
    """One draft module: the target's hidden state and a later token's embedding in, a hidden state out."""

    def __init__(self, config: MiMoV2Config, spec: LayerSpec, layer: int) -> None:
        super().__init__()
        self.spec = spec
        self.enorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hnorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, spec, layer)
        self.pre_mlp_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = DenseMLP(config.hidden_size, spec.intermediate)
        self.final_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, embeds: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, attn: AttentionBackend
    ) -> torch.Tensor:
        """Return (tokens, hidden), normed, ready for the model's shared head.

        For module k and position i: `embeds` is the embedding of token i + 1 + k, `hidden` the target's state
        at i after its final norm, the same for every module (chaining the modules lowers acceptance); the
        result predicts token i + 2 + k.
        """
        rope = rope_tables([self.spec], positions)
        x = self.eh_proj(torch.cat([self.enorm(embeds), self.hnorm(hidden)], dim=-1))
        x = x + self.self_attn(self.input_layernorm(x), rope, attn)
        x = x + self.mlp(self.pre_mlp_layernorm(x))
        out: torch.Tensor = self.final_layernorm(x)
        return out


class MiMoV2ForCausalLM(CausalLM):
    """The target model and, in `mtp`, its draft modules, which share the embedding and the head."""

    # The encoder's share of a multimodal checkpoint.
    ignored_prefixes = ("visual.", "speech_embeddings.", "audio_encoder.", "audio_tokenizer.")
    config: MiMoV2Config

    def __init__(self, config: MiMoV2Config) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, spec, i) for i, spec in enumerate(config.layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tie()
        self.mtp = nn.ModuleList(
            MTPModule(config, spec, config.num_layers + k) for k, spec in enumerate(config.mtp_specs)
        )

    def parts(self) -> DecoderParts:
        layers = [layer.parts() for layer in self.layers if isinstance(layer, DecoderLayer)]
        return DecoderParts(layers=layers, norm=self.norm.weight)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, attn: AttentionBackend) -> torch.Tensor:
        """Return hidden states (tokens, hidden) after the final norm for embeddings x (tokens, hidden)."""
        rope = rope_tables(self.config.layers, positions)
        for layer in self.layers:
            x = layer(x, rope, attn)
        out: torch.Tensor = self.norm(x)
        return out

    def keep_fp32(self) -> Iterable[nn.Module]:
        """Return the routers: half precision changes which experts they choose."""
        return [module for module in self.modules() if isinstance(module, Router)]

    def slots(self, is_in_checkpoint: Callable[[str], bool]) -> dict[str, Slot]:
        """Map the hub's tensor names to views of the parameters, fused or split as the checkpoint has qkv."""
        # tensors.py names the parts of this module, so it cannot be imported before them.
        from transom.llm.model.tensors import language_model_slots

        return language_model_slots(self, is_in_checkpoint)
