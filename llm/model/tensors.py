"""Which hub tensor is which part of the language model: one map for loading and for saving (llm, trainer)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from transom.kernels.weights import Slot, fused_qkv_order
from transom.llm.model.mimo_v2 import Attention, DecoderLayer, DenseMLP, MiMoV2ForCausalLM, MoE, MTPModule

MTP_PREFIX = "model.mtp."


def language_model_slots(model: MiMoV2ForCausalLM, is_fused: Callable[[str], bool]) -> dict[str, Slot]:
    """Map hub names to views of the model's parameters.

    `is_fused` tells by the name of a fused qkv tensor whether the checkpoint has it in place of q, k and v.
    """
    slots = {
        "model.embed_tokens.weight": Slot(model.embed_tokens.weight),
        "model.norm.weight": Slot(model.norm.weight),
    }
    if not model.config.tie_word_embeddings:
        slots["lm_head.weight"] = Slot(model.lm_head.weight)
    shards = model.config.qkv_shards
    for i, layer in enumerate(model.layers):
        assert isinstance(layer, DecoderLayer)
        prefix = f"model.layers.{i}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            slots[f"{prefix}{norm}.weight"] = Slot(getattr(layer, norm).weight)
        slots |= _attention_slots(f"{prefix}self_attn.", layer.self_attn, shards, is_fused)
        mlp = layer.mlp
        slots |= (
            _moe_slots(f"{prefix}mlp.", mlp) if isinstance(mlp, MoE) else _dense_slots(f"{prefix}mlp.", mlp)
        )
    for k, module in enumerate(model.mtp):
        assert isinstance(module, MTPModule)
        slots |= _mtp_slots(f"{MTP_PREFIX}layers.{k}.", module, shards, is_fused)
    return slots


def _mtp_slots(
    prefix: str, module: MTPModule, shards: int, is_fused: Callable[[str], bool]
) -> dict[str, Slot]:
    parts = ("enorm", "hnorm", "eh_proj", "input_layernorm", "pre_mlp_layernorm", "final_layernorm")
    slots = {f"{prefix}{part}.weight": Slot(getattr(module, part).weight) for part in parts}
    slots |= _attention_slots(f"{prefix}self_attn.", module.self_attn, shards, is_fused)
    return slots | _dense_slots(f"{prefix}mlp.", module.mlp)


def _attention_slots(
    prefix: str, attention: Attention, shards: int, is_fused: Callable[[str], bool]
) -> dict[str, Slot]:
    spec, weight = attention.spec, attention.qkv_proj.weight
    slots = {f"{prefix}o_proj.weight": Slot(attention.o_proj.weight)}
    if attention.attention_sink_bias is not None:
        slots[f"{prefix}attention_sink_bias"] = Slot(attention.attention_sink_bias)
    fused = f"{prefix}qkv_proj.weight"
    if is_fused(fused):
        rows = weight.shape[0]
        grids = ((rows // shards,) * shards, (rows,))
        slots[fused] = Slot(weight, fused_qkv_order(attention.sizes, shards), grids)
        return slots
    q, k, v = torch.split(weight, attention.sizes)
    k_grids = ((spec.head_dim,) * spec.kv_heads, (k.shape[0],))
    slots[f"{prefix}q_proj.weight"] = Slot(q)
    slots[f"{prefix}k_proj.weight"] = Slot(k, grids=k_grids)
    slots[f"{prefix}v_proj.weight"] = Slot(v)
    return slots


def _dense_slots(prefix: str, mlp: DenseMLP) -> dict[str, Slot]:
    gate, up = mlp.gate_up_proj.weight.chunk(2)
    return {
        f"{prefix}gate_proj.weight": Slot(gate),
        f"{prefix}up_proj.weight": Slot(up),
        f"{prefix}down_proj.weight": Slot(mlp.down_proj.weight),
    }


def _moe_slots(prefix: str, moe: MoE) -> dict[str, Slot]:
    slots = {
        f"{prefix}gate.weight": Slot(moe.gate.weight),
        f"{prefix}gate.e_score_correction_bias": Slot(moe.gate.e_score_correction_bias),
    }
    for e, (gate_up, down) in enumerate(zip(moe.gate_up.unbind(0), moe.down.unbind(0))):
        gate, up = gate_up.chunk(2)
        slots[f"{prefix}experts.{e}.gate_proj.weight"] = Slot(gate)
        slots[f"{prefix}experts.{e}.up_proj.weight"] = Slot(up)
        slots[f"{prefix}experts.{e}.down_proj.weight"] = Slot(down)
    return slots
