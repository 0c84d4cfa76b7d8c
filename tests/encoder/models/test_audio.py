from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen2Config, Qwen2Model

from transom.encoder.models.audio import AudioEncoder
from transom.encoder.models.config import AudioConfig

AUDIO = {
    "out_hidden_size": 12,
    "audio_channels": 3,
    "audio_segment_size": 32,
    "group_size": 4,
    "input_local_dim": 16,
    "input_local_layers": 2,
    "input_local_attn_heads": 2,
    "input_local_head_dim": 10,
    "input_local_intermediate_size": 24,
    "speech_vocab_size": "9",
}
TOKENIZER = {
    "d_model": 16,
    "encoder_layers": 3,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "encoder_attn_window_size": [6, 0],
    "n_mels": 6,
    "num_quantizers": 4,
    "codebook_size": [8, 4],
}


def make_encoder(**changes):
    torch.manual_seed(0)
    encoder = AudioEncoder(AudioConfig.from_dicts({**AUDIO, **changes}, TOKENIZER))
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.normal_(0, 0.5)
        for index in range(4):
            encoder.tokenizer.quantizer.codebook(index).normal_()
    return encoder


def qwen2(encoder):
    cfg = encoder.cfg
    model = Qwen2Model(
        Qwen2Config(
            vocab_size=1,
            hidden_size=cfg.input_local_dim,
            intermediate_size=cfg.input_local_intermediate_size,
            num_hidden_layers=cfg.input_local_layers,
            num_attention_heads=cfg.input_local_attn_heads,
            num_key_value_heads=cfg.input_local_attn_heads,
            head_dim=cfg.input_local_head_dim,
            rope_parameters={"rope_type": "default", "rope_theta": 640000.0},
            rms_norm_eps=1e-6,
            pad_token_id=None,
        )
    )
    missing, unexpected = model.load_state_dict(encoder.input_local_transformer.state_dict(), strict=False)
    assert missing == ["embed_tokens.weight"]
    assert unexpected == []
    return model.eval()


@pytest.mark.parametrize("full", [True, False], ids=["bidirectional", "causal"])
def test_group_encoder_equals_qwen2(full):
    encoder = make_encoder(input_full_attention=full)
    x = torch.randn(5, 4, 16)
    visible = torch.ones(4, 4, dtype=torch.bool) if full else torch.ones(4, 4, dtype=torch.bool).tril()
    mask = torch.zeros(5, 1, 4, 4).masked_fill(~visible, float("-inf"))
    with torch.no_grad():
        expected = qwen2(encoder)(inputs_embeds=x, attention_mask=mask, use_cache=False).last_hidden_state
        torch.testing.assert_close(encoder.input_local_transformer(x), expected, atol=1e-4, rtol=1e-4)


def test_embeddings_are_summed_grouped_and_projected():
    encoder = make_encoder()
    codes = torch.tensor([[i % 5, 3 - i % 4, i // 2, 0] for i in range(6)])  # rows all differ
    padded = torch.cat((codes, codes[-1:], codes[-1:]))
    tables = [table.weight for table in encoder.speech_embeddings]
    x = sum(tables[channel][padded[:, channel]] for channel in range(3))
    with torch.no_grad():
        hidden = encoder.input_local_transformer(x.view(2, 4, 16)).reshape(2, 64)
        first, second = encoder.projection.mlp[0].weight, encoder.projection.mlp[2].weight
        expected = torch.nn.functional.gelu(hidden @ first.T) @ second.T
        torch.testing.assert_close(encoder.embed([codes])[0], expected, atol=1e-4, rtol=1e-4)


@given(frames=st.integers(1, 200))
def test_token_count_follows_from_the_mel_frames(frames):
    encoder = make_encoder()
    (embedding,) = encoder([torch.zeros(frames, 6)])
    assert embedding.shape == (encoder.cfg.tokens(frames), 12)
    full, rest = divmod(frames, 32)
    assert embedding.shape[0] == full * 2 + -(-rest // 16)


def test_an_item_alone_equals_the_item_in_a_batch_and_its_segments():
    encoder = make_encoder()
    mels = [torch.randn(n, 6) for n in (70, 1, 32, 33, 15)]
    codes = encoder.tokenize(mels)
    tokens = encoder.embed(codes)
    for mel, code, token in zip(mels, codes, tokens, strict=True):
        assert torch.equal(encoder.tokenize([mel])[0], code)
        torch.testing.assert_close(encoder.embed([code])[0], token, atol=1e-5, rtol=1e-5)
        parts = torch.cat(encoder.tokenize(list(mel.split(32))))
        assert torch.equal(parts, code)


def test_embedding_is_differentiable_down_to_every_parameter():
    encoder = make_encoder()
    codes = encoder.tokenize([torch.randn(40, 6)])
    encoder.embed(codes)[0].square().sum().backward()
    frozen = {f"tokenizer.{name}" for name, _ in encoder.tokenizer.named_parameters()}
    for name, parameter in encoder.named_parameters():
        assert (parameter.grad is None) == (name in frozen), name


def test_codes_carry_no_gradient_even_outside_no_grad():
    encoder = make_encoder()
    assert not encoder.tokenize([torch.randn(8, 6)])[0].is_floating_point()
    assert encoder.features([torch.randn(8, 6)])[0].requires_grad
