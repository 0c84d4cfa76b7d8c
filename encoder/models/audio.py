"""The audio path: mel segments to codes to LLM embeddings (tokenizer, group encoder, projection).

Encoder process. Knows nothing of files, resampling or requests.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transom.encoder.models.attention import Segments, Window, rotate, segment_attention
from transom.encoder.models.audio_tokenizer import AudioTokenizerEncoder
from transom.encoder.models.config import AudioConfig


class GroupAttention(nn.Module):
    """Attention among the frames of one group; q, k and v have biases, o has none."""

    def __init__(self, cfg: AudioConfig) -> None:
        super().__init__()
        self.heads = cfg.input_local_attn_heads
        width = self.heads * cfg.input_local_head_dim
        self.window = Window() if cfg.input_full_attention else Window(ahead=0)
        self.q_proj = nn.Linear(cfg.input_local_dim, width)
        self.k_proj = nn.Linear(cfg.input_local_dim, width)
        self.v_proj = nn.Linear(cfg.input_local_dim, width)
        self.o_proj = nn.Linear(width, cfg.input_local_dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, groups: Segments) -> Tensor:
        q, k, v = (
            torch.unflatten(proj(x), -1, (self.heads, -1)) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = segment_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, groups, self.window)
        projected: Tensor = self.o_proj(out.flatten(1))
        return projected


class GroupMLP(nn.Module):
    """SwiGLU without biases."""

    def __init__(self, cfg: AudioConfig) -> None:
        super().__init__()
        dim, hidden = cfg.input_local_dim, cfg.input_local_intermediate_size
        self.gate_proj = nn.Linear(dim, hidden, bias=False)
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class GroupLayer(nn.Module):
    """A Qwen2-style layer."""

    def __init__(self, cfg: AudioConfig) -> None:
        super().__init__()
        self.self_attn = GroupAttention(cfg)
        self.mlp = GroupMLP(cfg)
        self.input_layernorm = nn.RMSNorm(cfg.input_local_dim, eps=cfg.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(cfg.input_local_dim, eps=cfg.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, groups: Segments) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, groups)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class GroupEncoder(nn.Module):
    """A small transformer that sees one group of frames at a time."""

    def __init__(self, cfg: AudioConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.layers = nn.ModuleList(GroupLayer(cfg) for _ in range(cfg.input_local_layers))
        self.norm = nn.RMSNorm(cfg.input_local_dim, eps=cfg.rms_norm_eps) if cfg.add_post_norm else None

    def forward(self, x: Tensor) -> Tensor:
        """(groups, group_size, dim) -> the same."""
        count, size = x.shape[:2]
        half = self.cfg.rotary_dim // 2
        frequencies = self.cfg.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = (torch.arange(size).unsqueeze(1) * frequencies).float().to(x.device).repeat(count, 1)
        cos, sin, groups = angles.cos(), angles.sin(), Segments(((count, size),))
        x = x.flatten(0, 1)
        for layer in self.layers:
            x = layer(x, cos, sin, groups)
        return torch.unflatten(x if self.norm is None else self.norm(x), 0, (count, size))


class AudioProjection(nn.Module):
    """Two bias-free linears with a GELU between."""

    def __init__(self, cfg: AudioConfig) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(cfg.input_local_dim * cfg.group_size, cfg.projection_dim, bias=False),
            nn.GELU(),
            nn.Linear(cfg.projection_dim, cfg.out_hidden_size, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.mlp(x)
        return out


class AudioEncoder(nn.Module):
    """The whole path. An item is one mel spectrogram of any length; long ones are cut into segments."""

    def __init__(self, cfg: AudioConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.tokenizer = AudioTokenizerEncoder(cfg.tokenizer)
        self.speech_embeddings = nn.ModuleList(
            nn.Embedding(cfg.speech_vocab(channel), cfg.input_local_dim)
            for channel in range(cfg.audio_channels)
        )
        self.input_local_transformer = GroupEncoder(cfg)
        self.projection = AudioProjection(cfg)

    def features(self, mels: Sequence[Tensor]) -> list[Tensor]:
        """Return the features before quantisation of each item: (25 Hz frames, d_model)."""
        segments = [torch.split(mel, self.cfg.audio_segment_size) for mel in mels]
        parts = iter(self.tokenizer.features([part for item in segments for part in item]))
        return [torch.cat([next(parts) for _ in item]) for item in segments]

    def tokenize(self, mels: Sequence[Tensor]) -> list[Tensor]:
        """Return the codes of each item (frames, n_mels): (25 Hz frames, codebooks)."""
        with torch.no_grad():
            features = self.features(mels)
            codes = self.tokenizer.quantizer.quantize(torch.cat(features))
        return list(torch.split(codes, [part.shape[0] for part in features]))

    def embed(self, codes: Sequence[Tensor]) -> list[Tensor]:
        """Embed each item's codes (25 Hz frames, codebooks): (tokens, out_hidden); differentiable."""
        size = self.cfg.group_size
        grouped = [_pad_to_groups(item, size) for item in codes]
        packed = torch.cat(grouped)
        x = self.speech_embeddings[0](packed[:, 0])
        for channel in range(1, self.cfg.audio_channels):
            x = x + self.speech_embeddings[channel](packed[:, channel])
        x = self.input_local_transformer(torch.unflatten(x, 0, (-1, size)))
        tokens: Tensor = self.projection(x.flatten(1))
        return list(torch.split(tokens, [item.shape[0] // size for item in grouped]))

    def forward(self, mels: Sequence[Tensor]) -> list[Tensor]:
        """Embed each item (frames, n_mels): (ceil(frames / 16), out_hidden) at the released sizes."""
        return self.embed(self.tokenize(mels))


def _pad_to_groups(codes: Tensor, size: int) -> Tensor:
    missing = -codes.shape[0] % size
    return codes if missing == 0 else torch.cat((codes, codes[-1:].expand(missing, -1)))
