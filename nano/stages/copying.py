"""Plant an induction circuit in an untrained or young language model, so that recall need not be discovered.

Used by training only. Left alone, a model of this size finds copying only after tens of millions of
tokens; planted, it has a rough one at once and training refines it. A layer with a window passes each
token's identity on to the next one; a full layer looks for the place after the same token and copies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from transom.llm.model.mimo_v2 import Attention, DecoderLayer, DenseMLP, MiMoV2ForCausalLM

# Score gaps of the planted heads, in units of the softmax: to the neighbours, and of an equal token.
PREVIOUS_GAP = 20.0
MATCH_SCORE = 32.0
RIDGE = 1e-3
# How loud the passed-on token is beside the rest of the stream.
LOUDNESS = 4.0


def plant_copying(
    model: MiMoV2ForCausalLM,
    tokens: Tensor,
    run: Callable[[], object],
    generator: torch.Generator,
    *,
    previous: int = 1,
    matching: Sequence[int] = (3, 6),
) -> None:
    """Overwrite half of the heads of layer `previous` and of the layers `matching`.

    `run` forwards the packed prompts of `tokens` through the model; what the planted heads read is fitted
    by least squares to what the model makes of those tokens.
    """
    with torch.no_grad():
        _keep_a_constant(model)
        size = 2 * model.config.layers[previous].v_head_dim
        identity = _token_codes(model, tokens, size, generator)
        _plant_previous(model, previous, identity, run)
        for layer in matching:
            _plant_matching(model, layer, tokens, identity, run, generator)


def _layer(model: MiMoV2ForCausalLM, index: int) -> DecoderLayer:
    layer = model.layers[index]
    assert isinstance(layer, DecoderLayer)
    return layer


def _keep_a_constant(model: MiMoV2ForCausalLM) -> None:
    """Make channel 0 the same for every token, and keep the first layer from writing to it."""
    model.embed_tokens.weight[:, 0] = 1.0
    first = _layer(model, 0)
    assert isinstance(first.mlp, DenseMLP)
    first.self_attn.o_proj.weight[0] = 0.0
    first.mlp.down_proj.weight[0] = 0.0


def _token_codes(model: MiMoV2ForCausalLM, tokens: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Return `size` random features of each token's embedding, of unit variance: (tokens, size)."""
    table = model.embed_tokens.weight
    codes = table @ torch.randn(table.shape[1], size, generator=generator)
    return ((codes - codes.mean(0)) / codes.std(0))[tokens]


def _inputs(model: MiMoV2ForCausalLM, layer: int, run: Callable[[], object]) -> tuple[Tensor, Tensor]:
    """Return what a layer's attention reads, after and before its norm: (tokens, hidden) each."""
    seen: list[Tensor] = []
    norm = _layer(model, layer).input_layernorm
    hook = norm.register_forward_hook(lambda _, given, out: seen.extend((out, given[0])))
    run()
    hook.remove()
    return seen[0], seen[1]


def _fit(inputs: Tensor, wanted: Tensor) -> Tensor:
    """Return the matrix (features, hidden) whose products with the inputs come closest to `wanted`."""
    gram = inputs.T @ inputs
    gram += RIDGE * gram.diagonal().mean() * torch.eye(len(gram))
    solved: Tensor = torch.linalg.solve(gram, inputs.T @ wanted)
    return solved.T


def _rows(attention: Attention) -> tuple[Tensor, Tensor, Tensor]:
    """Return views of the q, k and v weights: (heads, dims, hidden) each."""
    spec = attention.spec
    q, k, v = torch.split(attention.qkv_proj.weight, attention.sizes)
    return (
        q.view(spec.heads, spec.head_dim, -1),
        k.view(spec.kv_heads, spec.head_dim, -1),
        v.view(spec.kv_heads, spec.v_head_dim, -1),
    )


def _plant_previous(
    model: MiMoV2ForCausalLM, layer: int, identity: Tensor, run: Callable[[], object]
) -> None:
    """Make the first two KV heads of a layer look one token back and pass that token's code on."""
    attention = _layer(model, layer).self_attn
    spec, width = attention.spec, attention.spec.v_head_dim
    normed, _ = _inputs(model, layer, run)
    constant = float(normed[:, 0].median())
    half = spec.rotary_dim // 2
    steps = [spec.rope_theta ** (-i / half) for i in range(half)]
    strength = math.sqrt(PREVIOUS_GAP / spec.scale / sum(1 - math.cos(step) for step in steps)) / constant
    q, k, v = _rows(attention)
    group = spec.heads // spec.kv_heads
    q[: 2 * group], k[:2] = 0.0, 0.0
    for i, step in enumerate(steps):
        k[:2, i, 0] = strength
        q[: 2 * group, i, 0] = strength * math.cos(step)
        q[: 2 * group, i + half, 0] = -strength * math.sin(step)
    v[:2] = _fit(normed, identity).view(2, width, -1)
    if attention.attention_sink_bias is not None:
        attention.attention_sink_bias[: 2 * group] = -10.0
    _, stream = _inputs(model, layer + 1, run)
    quiet = torch.linalg.eigh(torch.cov(stream.T)).eigenvectors[:, : 2 * width]
    size = LOUDNESS * float(stream.square().mean().sqrt()) / attention.value_scale
    out = attention.o_proj.weight.view(-1, spec.heads, width)
    out[:, : 2 * group] = 0.0
    for index in range(2):
        out[:, index * group] = quiet[:, index * width : (index + 1) * width] * size


def _plant_matching(
    model: MiMoV2ForCausalLM,
    layer: int,
    tokens: Tensor,
    identity: Tensor,
    run: Callable[[], object],
    generator: torch.Generator,
) -> None:
    """Make the last KV head of a layer find the place after an equal token and copy what stands there."""
    attention = _layer(model, layer).self_attn
    spec = attention.spec
    normed, stream = _inputs(model, layer, run)
    half, quarter = spec.rotary_dim // 2, spec.rotary_dim // 4
    # The slow half of the rotating channels hardly turns within a prompt, so it may match as well.
    channels = [*range(quarter, half), *range(half + quarter, spec.head_dim)]
    here = _fit(normed, identity)[: len(channels)]
    before = _fit(normed[1:], identity[:-1])[: len(channels)]
    # What the fits miss is missing from the products of equal tokens, too.
    found = [float((x @ fit.T).square().mean()) for x, fit in ((normed, here), (normed, before))]
    gain = math.sqrt(MATCH_SCORE / spec.scale / len(channels) / (found[0] * found[1]))
    q, k, v = _rows(attention)
    group = spec.heads // spec.kv_heads
    q[-group:], k[-1] = 0.0, 0.0
    q[-group:, channels] = here * gain
    k[-1, channels] = before * gain
    embedded = model.embed_tokens.weight[tokens]
    basis = torch.linalg.qr(torch.randn(embedded.shape[1], spec.v_head_dim, generator=generator)).Q
    v[-1] = _fit(normed, embedded @ basis)
    size = float(stream.std() / embedded.std()) / group / attention.value_scale
    out = attention.o_proj.weight.view(-1, spec.heads, spec.v_head_dim)
    out[:, -group:] = (basis * size).unsqueeze(1)
