from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from transom.encoder.models.audio_tokenizer import AudioTokenizerEncoder, ResidualQuantizer
from transom.encoder.models.config import TokenizerEncoderConfig


def make_encoder(**changes):
    values = {
        "d_model": 16,
        "encoder_layers": 4,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 24,
        "encoder_skip_layer_id": 3,
        "encoder_attn_window_size": [3, 0],
        "n_mels": 6,
        "num_quantizers": 3,
        "codebook_size": [8, 4, 4],
    }
    torch.manual_seed(0)
    encoder = AudioTokenizerEncoder(TokenizerEncoderConfig.from_dict({**values, **changes}))
    with torch.no_grad():
        for name, parameter in encoder.named_parameters():
            parameter.normal_(0, 0.4) if "norm" not in name else parameter.uniform_(0.5, 1.5)
        for index in range(3):
            encoder.quantizer.codebook(index).normal_(0, 1)
    return encoder


def oracle(encoder, mel, masks):
    """One segment, one head, one query at a time in float64; masks(layer, i, j) says what i sees."""
    cfg = encoder.cfg
    w = {name: value.detach().double() for name, value in encoder.state_dict().items()}

    def norm(x, name):
        return F.layer_norm(x, (cfg.d_model,), w[f"{name}.weight"], w[f"{name}.bias"], 1e-5)

    x = F.gelu(F.conv1d(mel.double().T[None], w["conv1.weight"], w["conv1.bias"], padding=1))
    x = F.gelu(F.conv1d(x, w["conv2.weight"], w["conv2.bias"], stride=2, padding=1))[0].T
    count, heads = x.shape[0], cfg.encoder_attention_heads
    dim = cfg.d_model // heads
    saved = None
    for index in range(cfg.encoder_layers):
        name = f"layers.{index}"
        h = norm(x, f"{name}.self_attn_layer_norm")
        q = (h @ w[f"{name}.self_attn.q_proj.weight"].T + w[f"{name}.self_attn.q_proj.bias"]).view(
            -1, heads, dim
        )
        k = (h @ w[f"{name}.self_attn.k_proj.weight"].T).view(-1, heads, dim)
        v = (h @ w[f"{name}.self_attn.v_proj.weight"].T + w[f"{name}.self_attn.v_proj.bias"]).view(
            -1, heads, dim
        )
        for t in (q, k):
            for position in range(count):
                for pair in range(dim // 2):
                    angle = position * 10000.0 ** (-2 * pair / dim)
                    a, b = t[position, :, pair].clone(), t[position, :, pair + dim // 2].clone()
                    t[position, :, pair] = a * math.cos(angle) - b * math.sin(angle)
                    t[position, :, pair + dim // 2] = b * math.cos(angle) + a * math.sin(angle)
        out = torch.zeros_like(v)
        for head in range(heads):
            for i in range(count):
                seen = [j for j in range(count) if masks(index, i, j)]
                weights = (k[seen, head] @ q[i, head] / math.sqrt(dim)).softmax(0)
                out[i, head] = weights @ v[seen, head]
        joined = out.reshape(count, -1) @ w[f"{name}.self_attn.out_proj.weight"].T
        x = x + joined + w[f"{name}.self_attn.out_proj.bias"]
        h = norm(x, f"{name}.final_layer_norm") @ w[f"{name}.fc1.weight"].T + w[f"{name}.fc1.bias"]
        x = x + F.gelu(h) @ w[f"{name}.fc2.weight"].T + w[f"{name}.fc2.bias"]
        if index == 2:
            saved = x
    x = norm(x + saved, "layer_norm")
    x = torch.cat((x, torch.zeros(count % 2, cfg.d_model, dtype=x.dtype)))
    pooled = F.gelu(F.conv1d(x.T[None], w["down_sample_layer.0.weight"], stride=2))[0].T
    return norm(pooled, "down_sample_norm")


def hybrid(layer, i, j):
    return j <= i and (layer % 2 == 1 or i - j <= 3)


MASKS = {
    "config": ({}, hybrid),
    "bidirectional": ({"bidirectional": True}, lambda layer, i, j: True),
    "all windowed": ({"hybrid_attention": False}, lambda layer, i, j: 0 <= i - j <= 3),
    "not causal": (
        {"encoder_causal": False, "encoder_attn_window_size": [2, 1]},
        lambda layer, i, j: layer % 2 == 1 or -1 <= i - j <= 2,
    ),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("frames", [1, 2, 3, 5, 8, 33])
def test_features_equal_a_plain_loop_implementation(name, frames):
    changes, masks = MASKS[name]
    encoder = make_encoder(**changes)
    mel = torch.randn(frames, 6, generator=torch.Generator().manual_seed(frames))
    (got,) = encoder.features([mel])
    assert got.shape == (-(-frames // 4), 16)
    torch.testing.assert_close(got.double(), oracle(encoder, mel, masks), atol=1e-4, rtol=1e-4)


@settings(max_examples=25, deadline=None)
@given(lens=st.lists(st.integers(1, 21), min_size=1, max_size=6))
def test_packed_segments_equal_single_ones(lens):
    encoder = make_encoder()
    mels = [torch.randn(n, 6, generator=torch.Generator().manual_seed(i)) for i, n in enumerate(lens)]
    packed = encoder.features(mels)
    for mel, got in zip(mels, packed, strict=True):
        torch.testing.assert_close(got, encoder.features([mel])[0], atol=1e-5, rtol=1e-5)


def test_every_parameter_learns():
    encoder = make_encoder()
    mels = [torch.randn(9, 6), torch.randn(13, 6)]
    torch.cat(encoder.features(mels)).square().sum().backward()
    for name, parameter in encoder.named_parameters():
        assert parameter.grad is not None, name
        # A layer norm's scale just before another norm may have a tiny but live gradient.
        assert float(parameter.grad.abs().sum()) > 0, name


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), frames=st.integers(1, 9))
def test_codes_equal_brute_force(seed, frames):
    torch.manual_seed(seed)
    quantizer = ResidualQuantizer([7, 5, 3], 4)
    for index in range(3):
        quantizer.codebook(index).normal_()
    features = torch.randn(frames, 4)
    got = quantizer.quantize(features)
    for frame in range(frames):
        rest = features[frame].double()
        for index in range(3):
            book = quantizer.codebook(index).double()
            distances = [float((rest - code).square().sum()) for code in book]
            chosen = int(got[frame, index])
            assert distances[chosen] <= min(distances) + 1e-5
            rest = rest - book[chosen]
    torch.testing.assert_close(quantizer.decode(got)[0] + rest_of(quantizer, features, got), features[0])


def rest_of(quantizer, features, codes):
    return features[0] - sum(quantizer.codebook(i)[codes[0, i]] for i in range(3))


def test_quantiser_works_in_fp32_on_half_precision_features():
    quantizer = ResidualQuantizer([2], 1)
    quantizer.codebook(0).copy_(torch.tensor([[1.0], [1.001]]))
    assert quantizer.quantize(torch.tensor([[1.0]], dtype=torch.bfloat16)).tolist() == [[0]]


def test_more_codebooks_bring_the_sum_closer():
    encoder = make_encoder()
    features = torch.randn(50, 16)
    codes = encoder.quantizer.quantize(features)
    # Fill the next codebook with residual means, as k-means would: the error can only shrink.
    first = encoder.quantizer.decode(codes[:, :1])
    residual = features - first
    encoder.quantizer.codebook(1).zero_()
    encoder.quantizer.codebook(1)[0] = residual.mean(0)
    codes = encoder.quantizer.quantize(features)
    both = encoder.quantizer.decode(codes[:, :2])
    assert float((features - both).square().sum()) <= float(residual.square().sum())


@pytest.mark.parametrize("mel", [torch.zeros(0, 6), torch.zeros(4, 5), torch.zeros(6)])
def test_wrong_mels_are_refused(mel):
    with pytest.raises(ValueError, match="frames >= 1, 6"):
        make_encoder().features([mel])
