"""Bytes of a model's weights and of one step's activations on each GPU of a group (planner).

Pure arithmetic over a model config; knows no torch. Tests compare it with the model's real parameters.
"""

from __future__ import annotations

from dataclasses import dataclass

from transom.llm.capacity import pages_for
from transom.llm.model.spec import DecoderConfig, LayerSpec

WEIGHT_DTYPES = ("fp8", "bf16", "fp32")


@dataclass(frozen=True)
class Weights:
    """Bytes of weights on one GPU; `experts` is its share of the routed experts."""

    attention: int
    dense: int
    embedding: int
    experts: int
    other: int

    @property
    def total(self) -> int:
        return self.attention + self.dense + self.embedding + self.experts + self.other


def weight_bytes(
    config: DecoderConfig, dtype: str, *, ep: int = 1, tp: int = 1, mtp: bool = False
) -> Weights:
    """Return the bytes of weights on the fullest GPU of a group.

    Attention, dense FFN, embedding and head are split by tp; routers and norms are replicated; each GPU holds
    ceil(experts / ep) experts of a layer. fp8 is the layout of the published checkpoints: e4m3 for qkv, FFN
    and experts with one fp32 scale a block; the rest stays bf16. Routers are fp32 always.
    """
    hidden, plain = config.hidden_size, 4 if dtype == "fp32" else 2
    modules = config.mtp_layers if mtp else 0
    specs = [*config.layers, *config.mtp_specs[:modules]]
    attention = dense = experts = 0
    for spec in specs:
        attention += _attention_bytes(config, spec, dtype, plain)
        gate_up = 2 * _matrix(spec.intermediate, hidden, dtype, config.weight_block)
        ffn = gate_up + _matrix(hidden, spec.intermediate, dtype, config.weight_block)
        if spec.moe:
            experts += -(-config.num_experts // ep) * ffn
        else:
            dense += ffn
    moe_layers = sum(spec.moe for spec in specs)
    dense += modules * 2 * hidden * hidden * plain
    norms = (2 * config.num_layers + 1 + 5 * modules) * hidden * plain
    tables = (1 if config.tie_word_embeddings else 2) * config.vocab_size * hidden * plain
    routers = moe_layers * config.num_experts * (hidden + 1) * 4
    return Weights(-(-attention // tp), -(-dense // tp), -(-tables // tp), experts, norms + routers)


def activation_bytes(
    config: DecoderConfig, dtype: str, *, chunk: int, running_requests: int, tp: int = 1
) -> int:
    """Estimate the memory of one step: the widest layer's buffers for a chunk, and fp32 logits.

    chunk * (2 * hidden + widest) * dtype + running requests * vocabulary * 4. The widest of qkv + attention
    output, 3 * intermediate of a dense FFN, and experts a token * (3 * intermediate + 2 * hidden) of an MoE.
    """
    hidden, widest = config.hidden_size, 0
    for spec in config.layers:
        attention = sum(_qkv_rows(spec)) + spec.heads * spec.v_head_dim
        ffn = 3 * spec.intermediate
        if spec.moe:
            widest = max(widest, config.experts_per_token * (ffn + 2 * hidden))
        widest = max(widest, -(-attention // tp), -(-ffn // tp))
    width = 4 if dtype == "fp32" else 2
    return chunk * (2 * hidden + widest) * width + running_requests * config.vocab_size * 4


def _qkv_rows(spec: LayerSpec) -> tuple[int, int, int]:
    return spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.kv_heads * spec.v_head_dim


def _attention_bytes(config: DecoderConfig, spec: LayerSpec, dtype: str, plain: int) -> int:
    rows, shards = sum(_qkv_rows(spec)), config.qkv_shards
    # A fused qkv tensor restarts its scale blocks in each shard.
    qkv = shards * _matrix(rows // shards, config.hidden_size, dtype, config.weight_block)
    output = spec.heads * spec.v_head_dim * config.hidden_size * plain
    return qkv + output + (spec.heads * plain if spec.has_sink else 0)


def _matrix(rows: int, columns: int, dtype: str, block: tuple[int, int]) -> int:
    if dtype != "fp8":
        return rows * columns * (4 if dtype == "fp32" else 2)
    return rows * columns + pages_for(rows, block[0]) * pages_for(columns, block[1]) * 4
