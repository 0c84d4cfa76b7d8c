"""The audio tokenizer's encoder (mel frames to 25 Hz features) and its residual quantiser.

Encoder process. Segments of any length are packed without padding. Knows nothing of the LLM side
of the audio path, of files or of requests.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transom.encoder.models.attention import Segments, Window, rotate, segment_attention
from transom.encoder.models.config import TokenizerEncoderConfig


class TokenizerAttention(nn.Module):
    """Multi-head attention inside segments under the layer's mask; k has no bias."""

    def __init__(self, cfg: TokenizerEncoderConfig, layer: int) -> None:
        super().__init__()
        dim = cfg.d_model
        self.heads = cfg.encoder_attention_heads
        self.window = Window(*cfg.window(layer))
        self.q_proj = nn.Linear(dim, dim)
        self.k_proj = nn.Linear(dim, dim, bias=False)
        self.v_proj = nn.Linear(dim, dim)
        self.out_proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, segments: Segments) -> Tensor:
        q, k, v = (
            torch.unflatten(proj(x), -1, (self.heads, -1)) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = segment_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, segments, self.window)
        projected: Tensor = self.out_proj(out.flatten(1))
        return projected


class TokenizerLayer(nn.Module):
    """Pre-LayerNorm transformer layer with a GELU feed-forward."""

    def __init__(self, cfg: TokenizerEncoderConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = TokenizerAttention(cfg, layer)
        self.self_attn_layer_norm = nn.LayerNorm(cfg.d_model, eps=cfg.layer_norm_eps)
        self.fc1 = nn.Linear(cfg.d_model, cfg.encoder_ffn_dim)
        self.fc2 = nn.Linear(cfg.encoder_ffn_dim, cfg.d_model)
        self.final_layer_norm = nn.LayerNorm(cfg.d_model, eps=cfg.layer_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, segments: Segments) -> Tensor:
        x = x + self.self_attn(self.self_attn_layer_norm(x), cos, sin, segments)
        out: Tensor = x + self.fc2(F.gelu(self.fc1(self.final_layer_norm(x))))
        return out


class ResidualQuantizer(nn.Module):
    """Nearest-code quantisation of what earlier codebooks left over, always in fp32.

    The codebooks (size, dim) are buffers: a trainer fills them in place, no gradient reaches them.
    """

    def __init__(self, sizes: Sequence[int], dim: int) -> None:
        super().__init__()
        self.count = len(sizes)
        for index, size in enumerate(sizes):
            self.register_buffer(f"codebook_{index}", torch.zeros(size, dim))

    def codebook(self, index: int) -> Tensor:
        """Return codebook `index` (size, dim), the live buffer."""
        return self.get_buffer(f"codebook_{index}")

    @torch.no_grad()
    def quantize(self, features: Tensor) -> Tensor:
        """Return the codes (frames, codebooks) of features (frames, dim)."""
        residual = features.float()
        codes = []
        for index in range(self.count):
            book = self.codebook(index).float()
            # |r - c|^2 without |r|^2, which is the same for every code.
            distance = book.square().sum(1) - 2.0 * residual @ book.t()
            nearest = distance.argmin(dim=1)
            residual = residual - book[nearest]
            codes.append(nearest)
        return torch.stack(codes, dim=1)

    def decode(self, codes: Tensor) -> Tensor:
        """Return the sum of the chosen codes' vectors (frames, dim)."""
        out = self.codebook(0).float()[codes[:, 0]]
        for index in range(1, codes.shape[1]):
            out = out + self.codebook(index).float()[codes[:, index]]
        return out


class AudioTokenizerEncoder(nn.Module):
    """Convolutions, transformer and down-sampling; parameter names are the hub's behind `encoder.`."""

    def __init__(self, cfg: TokenizerEncoderConfig) -> None:
        super().__init__()
        self.cfg = cfg
        dim = cfg.d_model
        self.conv1 = nn.Conv1d(cfg.n_mels, dim, cfg.kernel_size, padding=1)
        self.conv2 = nn.Conv1d(dim, dim, cfg.kernel_size, stride=cfg.stride_size, padding=1)
        self.layers = nn.ModuleList(TokenizerLayer(cfg, index) for index in range(cfg.encoder_layers))
        self.layer_norm = nn.LayerNorm(dim, eps=cfg.layer_norm_eps)
        pool = nn.Conv1d(dim, dim, cfg.avg_pooler, stride=cfg.avg_pooler, bias=False)
        self.down_sample_layer = nn.ModuleList([pool])
        self.down_sample_norm = nn.LayerNorm(dim, eps=cfg.layer_norm_eps)
        self.quantizer = ResidualQuantizer(cfg.codebook_size, dim)

    def features(self, mels: Sequence[Tensor]) -> list[Tensor]:
        """Encode segments of (frames, n_mels) into (ceil(frames / 4), d_model) each; differentiable.

        4 stands for stride_size * avg_pooler of the released model.
        """
        for mel in mels:
            if mel.ndim != 2 or mel.shape[0] < 1 or mel.shape[1] != self.cfg.n_mels:
                raise ValueError(f"mel {tuple(mel.shape)}: must be (frames >= 1, {self.cfg.n_mels})")
        lens = [-(-mel.shape[0] // self.cfg.stride_size) for mel in mels]
        segments, order = Segments.sort(lens)
        x = self._convolve([mels[index] for index in order])
        x = self._transform(x, segments)
        ordered = self._down_sample(x, [lens[index] for index in order])
        outputs: list[Tensor] = [x] * len(mels)
        for index, output in zip(order, ordered, strict=True):
            outputs[index] = output
        return outputs

    def tokenize(self, mels: Sequence[Tensor]) -> list[Tensor]:
        """Return the codes (25 Hz frames, codebooks) of each segment."""
        with torch.no_grad():
            features = self.features(mels)
            codes = self.quantizer.quantize(torch.cat(features))
        return list(torch.split(codes, [part.shape[0] for part in features]))

    def _convolve(self, mels: Sequence[Tensor]) -> Tensor:
        """Run both convolutions over all segments laid out in one line: (packed frames, d_model).

        Each segment starts on a multiple of the stride and is followed by silence of at least the
        padding, so that it sees exactly what it would see alone.
        """
        stride = self.cfg.stride_size
        slots = [-(-(mel.shape[0] + 1) // stride) * stride for mel in mels]
        weight = self.conv1.weight
        line = torch.cat([F.pad(mel, (0, 0, 0, slot - mel.shape[0])) for mel, slot in zip(mels, slots)])
        live = torch.cat([torch.arange(slot) < mel.shape[0] for mel, slot in zip(mels, slots)])
        x = F.gelu(self.conv1(line.to(weight.dtype).t().unsqueeze(0)))
        x = x * live.to(weight.device, weight.dtype)
        x = F.gelu(self.conv2(x)).squeeze(0).t()
        parts = torch.split(x[: sum(slots) // stride], [slot // stride for slot in slots])
        kept = [part[: -(-mel.shape[0] // stride)] for part, mel in zip(parts, mels)]
        scale = self.cfg.d_model**0.5 if self.cfg.scale_embedding else 1.0
        return torch.cat(kept) * scale

    def _transform(self, x: Tensor, segments: Segments) -> Tensor:
        half = self.cfg.d_model // self.cfg.encoder_attention_heads // 2
        frequencies = self.cfg.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
        positions = torch.cat([torch.arange(length).repeat(count) for count, length in segments.runs])
        angles = (positions.unsqueeze(1) * frequencies).float().to(x.device)
        cos, sin = angles.cos(), angles.sin()
        skipped = None
        for index, layer in enumerate(self.layers):
            x = layer(x, cos, sin, segments)
            if index + 1 == self.cfg.encoder_skip_layer_id:
                skipped = x
        out: Tensor = self.layer_norm(x if skipped is None else x + skipped)
        return out

    def _down_sample(self, x: Tensor, lens: Sequence[int]) -> list[Tensor]:
        pool = self.cfg.avg_pooler
        padded = [F.pad(part, (0, 0, 0, -part.shape[0] % pool)) for part in torch.split(x, list(lens))]
        # A convolution whose stride is its width is a linear map of the joined frames.
        weight = self.down_sample_layer[0].get_parameter("weight")  # (out, in, pool)
        frames = torch.unflatten(torch.cat(padded), 0, (-1, pool)).transpose(1, 2).flatten(1)
        pooled = self.down_sample_norm(F.gelu(F.linear(frames, weight.flatten(1))))
        return list(torch.split(pooled, [part.shape[0] // pool for part in padded]))
