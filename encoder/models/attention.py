"""Attention inside packed segments, with an optional window and sinks; shared by vision and audio.

Encoder process. Segments of equal length go through one batched SDPA call, long windowed segments
through a banded form whose cost is linear in the length. Knows nothing of images or sound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

# Below this length a dense (length x length) mask is cheaper than gathering bands.
BAND_FROM_LEN = 512
# Sinks ride in extra channels of q and k; whole groups of 8 keep the fused kernels usable.
SINK_CHANNELS = 8


@dataclass(frozen=True)
class Segments:
    """Packed segments in the order of their length: `runs` are (count, length), ascending."""

    runs: tuple[tuple[int, int], ...]

    @classmethod
    def sort(cls, lens: Sequence[int]) -> tuple[Segments, list[int]]:
        """Return the runs and the stable order that brings segments of equal length together."""
        order = sorted(range(len(lens)), key=lambda index: lens[index])
        counts: dict[int, int] = {}
        for length in sorted(lens):
            counts[length] = counts.get(length, 0) + 1
        return cls(tuple((count, length) for length, count in counts.items())), order


@dataclass(frozen=True)
class Window:
    """Keys that a query sees: `back` before and `ahead` after itself; None is no limit."""

    back: int | None = None
    ahead: int | None = None

    @property
    def limited(self) -> bool:
        return self.back is not None or self.ahead is not None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the leading dims of heads, half-split, in fp32 at least.

    x is (tokens, heads, head_dim); cos and sin are (tokens, rotary_dim / 2).
    """
    half = cos.shape[-1]
    wide = x.to(torch.promote_types(x.dtype, cos.dtype))
    first, second, rest = torch.split(wide, [half, half, x.shape[-1] - 2 * half], dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1).to(x.dtype)


def segment_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Segments,
    window: Window,
    sink: Tensor | None = None,
    first_key_sink: bool = True,
) -> Tensor:
    """Attend inside each segment; q, k, v (tokens, heads or kv_heads, dim) -> (tokens, heads, v_dim).

    `sink` (heads,) is added to the logit of the segment's key 0, or with `first_key_sink` off joins
    the softmax's denominator as a key without a value.
    """
    outputs = []
    start = 0
    for count, length in segments.runs:
        end = start + count * length
        queries, keys, values = (
            torch.unflatten(t[start:end], 0, (count, length)).transpose(1, 2) for t in (q, k, v)
        )
        out = _attend(queries, keys, values, window, sink, first_key_sink)  # (count, heads, length, v_dim)
        outputs.append(out.transpose(1, 2).flatten(0, 1))
        start = end
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, window: Window, sink: Tensor | None, first_key_sink: bool
) -> Tensor:
    heads, length, dim = q.shape[1:]
    v_dim = v.shape[-1]
    groups = heads // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scale = dim**-0.5
    extra_key = None
    if sink is not None:
        # q gets a channel of ones and key 0 (or an extra key) the channel sink / scale, so that the
        # dot product adds the sink to its logit without a per-head mask.
        q = torch.cat((q, q.new_ones(1).expand(*q.shape[:-1], 1)), dim=-1)
        column = (sink / scale).to(k.dtype).view(1, heads, 1, 1).expand(k.shape[0], heads, 1, 1)
        if first_key_sink:
            column = F.pad(column, (0, 0, 0, length - 1))
        else:
            extra_key = F.pad(column, (dim, SINK_CHANNELS - 1))
            column = column.new_zeros(1).expand(*k.shape[:-1], 1)
        k = torch.cat((k, column), dim=-1)
        q, k = F.pad(q, (0, SINK_CHANNELS - 1)), F.pad(k, (0, SINK_CHANNELS - 1))
    width = max(q.shape[-1], v_dim)
    q, k, v = (F.pad(t, (0, width - t.shape[-1])) if t.shape[-1] < width else t for t in (q, k, v))
    reach = (window.back or 0) + (window.ahead or 0)
    banded = window.back is not None and window.ahead is not None and length > BAND_FROM_LEN > reach
    attend = _banded if banded else _dense
    return attend(q, k, v, window, scale, extra_key)[..., :v_dim]


def _with_extra_key(
    k: Tensor, v: Tensor, mask: Tensor | None, extra_key: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    k = torch.cat((k, F.pad(extra_key, (0, k.shape[-1] - extra_key.shape[-1]))), dim=2)
    return k, F.pad(v, (0, 0, 0, 1)), None if mask is None else F.pad(mask, (0, 1), value=True)


def _dense(q: Tensor, k: Tensor, v: Tensor, window: Window, scale: float, extra_key: Tensor | None) -> Tensor:
    length = q.shape[2]
    causal = window.ahead == 0 and (window.back is None or window.back >= length - 1)
    mask = None
    if window.limited and (not causal or extra_key is not None):
        mask = _window_mask(length, window, str(q.device))
    if extra_key is not None:
        k, v, mask = _with_extra_key(k, v, mask, extra_key)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal and mask is None and length > 1, scale=scale
    )


@lru_cache(maxsize=64)
def _window_mask(length: int, window: Window, device: str) -> Tensor:
    # A mask made and cached in inference mode could not serve a later backward pass.
    with torch.inference_mode(False):
        index = torch.arange(length, device=device)
        distance = index.unsqueeze(0) - index.unsqueeze(1)  # key - query
        mask = torch.ones(length, length, dtype=torch.bool, device=device)
        if window.back is not None:
            mask &= distance >= -window.back
        if window.ahead is not None:
            mask &= distance <= window.ahead
        return mask


def _banded(
    q: Tensor, k: Tensor, v: Tensor, window: Window, scale: float, extra_key: Tensor | None
) -> Tensor:
    """Attend block by block of queries over only the keys that their window reaches."""
    count, heads, length, width = q.shape
    back, ahead = _limits(window)
    block = max(128, back + ahead)
    blocks = -(-length // block)
    span = block + back + ahead
    tail = blocks * block - length

    def bands(t: Tensor) -> Tensor:
        padded = F.pad(t, (0, 0, back, tail + ahead))
        return padded.unfold(2, span, block).permute(0, 2, 1, 4, 3).flatten(0, 1)

    queries = torch.unflatten(F.pad(q, (0, 0, 0, tail)), 2, (blocks, block)).transpose(1, 2).flatten(0, 1)
    keys, values = bands(k), bands(v)  # (count * blocks, heads, span, width)
    mask = _band_mask(length, block, window, str(q.device)).repeat(count, 1, 1).unsqueeze(1)
    if extra_key is not None:
        keys, values, padded_mask = _with_extra_key(
            keys, values, mask, extra_key.repeat_interleave(blocks, dim=0)
        )
        assert padded_mask is not None
        mask = padded_mask
    out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)
    out = out.view(count, blocks, heads, block, width).transpose(1, 2)
    return out.reshape(count, heads, blocks * block, width)[:, :, :length]


def _limits(window: Window) -> tuple[int, int]:
    assert window.back is not None
    assert window.ahead is not None
    return window.back, window.ahead


@lru_cache(maxsize=8)
def _band_mask(length: int, block: int, window: Window, device: str) -> Tensor:
    back, ahead = _limits(window)
    blocks = -(-length // block)
    query = torch.arange(blocks * block, device=device).view(blocks, block, 1)
    first = torch.arange(0, blocks * block, block, device=device).view(blocks, 1, 1) - back
    key = first + torch.arange(block + back + ahead, device=device)
    distance = key - query
    near = (distance >= -back) & (distance <= ahead)
    # Queries past the end are cut off later; they see their band so that no softmax row is empty.
    return near & (((key >= 0) & (key < length)) | (query >= length))
