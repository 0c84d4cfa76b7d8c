"""The vision tower: patches to LLM embeddings, full, row-window and column-window blocks.

Encoder process. Items of any size are packed without padding; one temporal slice of a grid is one
segment, and no segment sees another. Knows nothing of files, pixels' origin or requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transom.encoder.models.attention import Segments, Window, rotate, segment_attention
from transom.encoder.models.config import COLUMNS, VisionConfig

Grid = tuple[int, int, int]


@lru_cache(maxsize=512)
def _slice_positions(height: int, width: int, merge: int) -> Tensor:
    """Row and column of each patch of a slice, in merge-block order: (height * width, 2)."""
    rows = torch.arange(height).view(height // merge, merge, 1, 1).expand(-1, -1, width // merge, merge)
    columns = torch.arange(width).view(1, 1, width // merge, merge).expand(height // merge, merge, -1, -1)
    return torch.stack((rows, columns), dim=-1).transpose(1, 2).reshape(-1, 2)


@lru_cache(maxsize=512)
def _column_order(height: int, width: int, merge: int) -> Tensor:
    """Order of a slice's merge units that walks down the columns: (units,)."""
    return torch.arange(height // merge * (width // merge)).view(height // merge, -1).t().reshape(-1)


class PatchEmbed(nn.Module):
    """A bias-free linear over flattened patches, stored as the hub's 3-D convolution weight."""

    def __init__(self, cfg: VisionConfig) -> None:
        super().__init__()
        kernel = (cfg.temporal_patch_size, cfg.patch_size, cfg.patch_size)
        self.proj = nn.Conv3d(cfg.in_chans, cfg.hidden_size, kernel, stride=kernel, bias=False)

    def forward(self, pixels: Tensor) -> Tensor:
        """(patches, patch_dim) -> (patches, hidden)."""
        return F.linear(pixels.to(self.proj.weight.dtype), self.proj.weight.flatten(1))


class VisionAttention(nn.Module):
    """Grouped-query attention inside segments; non-full blocks have a window and sinks."""

    def __init__(self, cfg: VisionConfig, full: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads = cfg.num_heads, cfg.num_key_value_heads
        self.qk_dim, self.v_dim = cfg.qk_channels, cfg.kv_channels
        self.sizes = [self.heads * self.qk_dim, self.kv_heads * self.qk_dim, self.kv_heads * self.v_dim]
        self.qkv = nn.Linear(cfg.hidden_size, sum(self.sizes))
        self.proj = nn.Linear(self.heads * self.v_dim, cfg.hidden_size)
        reach = cfg.visual_token_window_size
        self.window = Window() if full else Window(reach, reach)
        self.first_key_sink = cfg.sink_mode == "first_key"
        self.sinks = nn.Parameter(torch.zeros(self.heads)) if cfg.use_sink and not full else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, segments: Segments) -> Tensor:
        q, k, v = torch.split(self.qkv(x), self.sizes, dim=-1)
        q = rotate(torch.unflatten(q, -1, (self.heads, self.qk_dim)), cos, sin)
        k = rotate(torch.unflatten(k, -1, (self.kv_heads, self.qk_dim)), cos, sin)
        v = torch.unflatten(v, -1, (self.kv_heads, self.v_dim))
        out = segment_attention(q, k, v, segments, self.window, self.sinks, self.first_key_sink)
        projected: Tensor = self.proj(out.flatten(1))
        return projected


class VisionMLP(nn.Module):
    """SwiGLU with biases."""

    def __init__(self, cfg: VisionConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(cfg.hidden_size, cfg.intermediate_size)
        self.up_proj = nn.Linear(cfg.hidden_size, cfg.intermediate_size)
        self.down_proj = nn.Linear(cfg.intermediate_size, cfg.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class VisionBlock(nn.Module):
    """Pre-norm block: attention, then SwiGLU, each with a residual."""

    def __init__(self, cfg: VisionConfig, full: bool) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(cfg.hidden_size, eps=cfg.rms_norm_eps)
        self.norm2 = nn.RMSNorm(cfg.hidden_size, eps=cfg.rms_norm_eps)
        self.attn = VisionAttention(cfg, full)
        self.mlp = VisionMLP(cfg)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, segments: Segments) -> Tensor:
        x = x + self.attn(self.norm1(x), cos, sin, segments)
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class PatchMerger(nn.Module):
    """LayerNorm, join the patches of a merge unit, two bias-free linears with an exact GELU between."""

    def __init__(self, cfg: VisionConfig) -> None:
        super().__init__()
        self.joined = cfg.hidden_size * cfg.merge_unit
        hidden = cfg.projection_hidden_size or self.joined
        self.ln_q = nn.LayerNorm(cfg.hidden_size, eps=cfg.rms_norm_eps, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(self.joined, hidden, bias=False),
            nn.GELU(),
            nn.Linear(hidden, cfg.out_hidden_size, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        """(patches, hidden) -> (patches / merge_unit, out_hidden)."""
        out: Tensor = self.mlp(self.ln_q(x).view(-1, self.joined))
        return out


class _Layout:
    """Where each merge unit of a packed batch goes, and the rotation of each patch."""

    def __init__(self, cfg: VisionConfig, grids: Sequence[Grid], device: torch.device) -> None:
        merge, unit = cfg.spatial_merge_size, cfg.merge_unit
        slices = [(height, width) for frames, height, width in grids for _ in range(frames)]
        lens = [height * width for height, width in slices]
        self.segments, order = Segments.sort(lens)
        starts = torch.tensor([0, *lens[:-1]]).cumsum(0) // unit
        length_order, columns, positions, first = [], [], [], 0
        for index in order:
            units = lens[index] // unit
            length_order.append(torch.arange(units) + starts[index])
            columns.append(_column_order(*slices[index], merge) + first)
            positions.append(_slice_positions(*slices[index], merge))
            first += units
        by_length, by_column = torch.cat(length_order), torch.cat(columns)
        is_sorted = order == sorted(order)
        self.by_length = None if is_sorted else by_length.to(device)
        self.back = None if is_sorted else by_length.argsort().to(device)
        self.to_columns = by_column.to(device)
        self.to_rows = by_column.argsort().to(device)
        angles = _rotary_angles(cfg, torch.cat(positions)).to(device)  # (patches, qk_dim / 2)
        self.rotation = {False: (angles.cos(), angles.sin())}
        if COLUMNS in cfg.vit_window_attn_types:
            turned = permute_units(angles, self.to_columns, unit)
            self.rotation[True] = (turned.cos(), turned.sin())


def permute_units(x: Tensor, order: Tensor, unit: int) -> Tensor:
    """Reorder whole merge units of (patches, ...)."""
    return torch.unflatten(x, 0, (-1, unit)).index_select(0, order).flatten(0, 1)


def _rotary_angles(cfg: VisionConfig, positions: Tensor) -> Tensor:
    """Half of a head's channels turn by the row, the other half by the column; none by time."""
    quarter = cfg.qk_channels // 4
    frequencies = cfg.rope_theta ** (-torch.arange(quarter, dtype=torch.float64) / quarter)
    return (positions.unsqueeze(-1) * frequencies).flatten(1).float()


class VisionTower(nn.Module):
    """The whole tower; parameter names are the hub's behind `visual.`."""

    def __init__(self, cfg: VisionConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.patch_embed = PatchEmbed(cfg)
        self.blocks = nn.ModuleList(VisionBlock(cfg, cfg.is_full(index)) for index in range(cfg.depth))
        self.merger = PatchMerger(cfg)

    def forward(self, pixels: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Embed packed items: (patches, patch_dim), grids of (t, h, w) patches -> (tokens, out_hidden).

        The result of an item does not depend on its neighbours, up to float rounding.
        """
        self._check(pixels, grids)
        unit = self.cfg.merge_unit
        layout = _Layout(self.cfg, grids, pixels.device)
        x = self.patch_embed(pixels)
        if layout.by_length is not None:
            x = permute_units(x, layout.by_length, unit)
        in_columns = False
        for block, kind in zip(self.blocks, self.cfg.vit_window_attn_types, strict=True):
            if (kind == COLUMNS) != in_columns:
                in_columns = kind == COLUMNS
                x = permute_units(x, layout.to_columns if in_columns else layout.to_rows, unit)
            x = block(x, *layout.rotation[in_columns], layout.segments)
        if in_columns:
            x = permute_units(x, layout.to_rows, unit)
        tokens: Tensor = self.merger(x)
        return tokens if layout.back is None else tokens.index_select(0, layout.back)

    def _check(self, pixels: Tensor, grids: Sequence[Grid]) -> None:
        merge = self.cfg.spatial_merge_size
        for grid in grids:
            if min(grid) < 1 or grid[1] % merge or grid[2] % merge:
                raise ValueError(f"grid {grid}: sides must be positive multiples of {merge}")
        expected = (sum(t * h * w for t, h, w in grids), self.cfg.patch_dim)
        if not grids or tuple(pixels.shape) != expected:
            raise ValueError(f"pixels {tuple(pixels.shape)} do not fit {len(grids)} grids: need {expected}")
