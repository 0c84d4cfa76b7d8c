"""Triton kernels for CUDA: paged attention, rope with KV write, norm, gated activation, grouped experts.

One step's rows at a time, as transom.kernels.ops describes. Runs under TRITON_INTERPRET=1 on a CPU as well.
Knows no model.
"""
# mypy: ignore-errors
# The bodies are a language of their own that only looks like Python: types are the compiler's.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _dot(a, b, WIDE: tl.constexpr):
    """a @ b in fp32. WIDE: the interpreter multiplies bf16 by its bits, so that it is widened there first."""
    if WIDE:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _from_fp8(b):
    """Values of e4m3 bytes as fp32. By their bits, as not every GPU has a type for them."""
    bits = b.to(tl.int32)
    size = bits & 0x7F
    normal = ((size << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(size < 8, size.to(tl.float32) * 0.001953125, normal)
    return tl.where(bits > 127, -value, value)


@triton.jit
def _to_fp8(x):
    """e4m3 bytes of fp32 values, nearest, ties to even; beyond 448 the largest."""
    size = tl.minimum(tl.abs(x), 448.0)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below the least normal number steps are 2^-9: adding 1.5 * 2^14 rounds to them.
    small = (size + 24576.0).to(tl.int32, bitcast=True) - 0x46C00000
    code = tl.where(size < 0.015625, small, normal)
    return tl.where(x < 0.0, code | 0x80, code).to(tl.uint8)


@triton.jit
def attention_kernel(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, out_ptr,
    spans_ptr, tiles_ptr, pages_ptr, sink_ptr,
    q_row, slots, page_size, window, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr, V_PAD: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    KEYS: tl.constexpr, WINDOWED: tl.constexpr, SINK: tl.constexpr, WIDE: tl.constexpr,
    FP8: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr,
):  # fmt: skip
    """One run of TOKENS queries of one request, for the heads of one KV head: GROUP rows a token.

    K_ROW and V_ROW are the lengths of stored rows; with FP8 the scale pointers see the same memory as fp32.
    """
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    span = tl.load(tiles_ptr + tile * 2)
    begin = tl.load(tiles_ptr + tile * 2 + 1)
    first_row = tl.load(spans_ptr + span * 4)
    first_position = tl.load(spans_ptr + span * 4 + 1)
    count = tl.load(spans_ptr + span * 4 + 2)
    table = tl.load(spans_ptr + span * 4 + 3)

    r = tl.arange(0, ROWS)
    token = begin + r // GROUP
    head = kv_head * GROUP + r % GROUP
    real = (r < TOKENS * GROUP) & (token < count)
    position = first_position + token
    d = tl.arange(0, HEAD_PAD)
    e = tl.arange(0, V_PAD)
    q = tl.load(
        q_ptr + (first_row + token)[:, None] * q_row + (head * HEAD_DIM)[:, None] + d[None, :],
        mask=real[:, None] & (d < HEAD_DIM)[None, :],
        other=0.0,
    )
    if SINK:
        most = tl.load(sink_ptr + head, mask=real, other=0.0).to(tl.float32)
        total = tl.full([ROWS], 1.0, tl.float32)
    else:
        most = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, V_PAD], tl.float32)

    last = first_position + tl.minimum(begin + TOKENS, count) - 1
    low = first_position * 0
    if WINDOWED:
        low = tl.maximum(first_position + begin - window + 1, 0)
    base = kv_head.to(tl.int64) * slots
    for start in range(low // KEYS * KEYS, last + 1, KEYS):
        at = start + tl.arange(0, KEYS)
        there = (at >= low) & (at <= last)
        page = tl.load(pages_ptr + table + at // page_size, mask=there, other=0)
        slot = base + page * page_size + at % page_size
        k = tl.load(
            k_ptr + slot[None, :] * K_ROW + d[:, None],
            mask=there[None, :] & (d < HEAD_DIM)[:, None],
            other=0,
        )
        if FP8:
            by = tl.load(k_scale_ptr + slot * (K_ROW // 4) + HEAD_DIM // 4, mask=there, other=0.0)
            k = _from_fp8(k) * by[None, :]
        scores = _dot(q, k.to(q.dtype), WIDE) * scale
        seen = there[None, :] & (at[None, :] <= position[:, None])
        if WINDOWED:
            seen = seen & (at[None, :] > position[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(most, tl.max(scores, 1))
        # A row that has seen nothing yet has no maximum: weigh against 0 instead.
        against = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp(scores - against[:, None])
        shrink = tl.exp(most - against)
        total = total * shrink + tl.sum(weights, 1)
        v = tl.load(
            v_ptr + slot[:, None] * V_ROW + e[None, :],
            mask=there[:, None] & (e < V_DIM)[None, :],
            other=0,
        )
        if FP8:
            by = tl.load(v_scale_ptr + slot * (V_ROW // 4) + V_DIM // 4, mask=there, other=0.0)
            v = _from_fp8(v) * by[:, None]
        sums = sums * shrink[:, None] + _dot(weights.to(q.dtype), v.to(q.dtype), WIDE)
        most = higher

    out = sums / tl.where(real, total, 1.0)[:, None]
    tl.store(
        out_ptr + ((first_row + token) * HEADS + head)[:, None] * V_DIM + e[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=real[:, None] & (e < V_DIM)[None, :],
    )


@triton.jit
def rope_kernel(
    qkv_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, cos_ptr, sin_ptr, positions_ptr, slots_ptr,
    q_norm_ptr, k_norm_ptr,
    row_stride, slots, eps, value_scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr,
    HALF: tl.constexpr, HALF_PAD: tl.constexpr, HEAD_PAD: tl.constexpr, V_PAD: tl.constexpr,
    NORM: tl.constexpr, FP8: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr,
):  # fmt: skip
    """One head of one row: q heads stay where they are, k and v heads go to their slot (as in attention)."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    source = qkv_ptr + row * row_stride + head * HEAD_DIM
    position = tl.load(positions_ptr + row)
    kind = qkv_ptr.dtype.element_ty
    h = tl.arange(0, HALF_PAD)
    d = tl.arange(0, HEAD_PAD)
    # Masks are vectors from the start: a scalar one does not combine with them everywhere.
    head_h, head_d = head + 0 * h, head + 0 * d
    q_h, q_d = (h < HALF) & (head_h < HEADS), (d >= 2 * HALF) & (d < HEAD_DIM) & (head_d < HEADS)
    turned = (h < HALF) & (head_h < HEADS + KV_HEADS)
    past = (d >= 2 * HALF) & (d < HEAD_DIM) & (head_d < HEADS + KV_HEADS)
    k_h, k_d = turned & (head_h >= HEADS), past & (head_d >= HEADS)
    low = tl.load(source + h, mask=turned, other=0.0).to(tl.float32)
    high = tl.load(source + HALF + h, mask=turned, other=0.0).to(tl.float32)
    rest = tl.load(source + d, mask=past, other=0.0).to(tl.float32)
    if NORM:
        factor = 1.0 / tl.sqrt(
            (tl.sum(low * low, 0) + tl.sum(high * high, 0) + tl.sum(rest * rest, 0)) / HEAD_DIM + eps
        )
        low *= factor * (
            tl.load(q_norm_ptr + h, mask=q_h, other=0.0) + tl.load(k_norm_ptr + h, mask=k_h, other=0.0)
        )
        high *= factor * (
            tl.load(q_norm_ptr + HALF + h, mask=q_h, other=0.0)
            + tl.load(k_norm_ptr + HALF + h, mask=k_h, other=0.0)
        )
        rest *= factor * (
            tl.load(q_norm_ptr + d, mask=q_d, other=0.0) + tl.load(k_norm_ptr + d, mask=k_d, other=0.0)
        )
    cos = tl.load(cos_ptr + position * HALF + h, mask=turned, other=0.0)
    sin = tl.load(sin_ptr + position * HALF + h, mask=turned, other=0.0)
    first, second = low * cos - high * sin, high * cos + low * sin
    # q is rotated in place: all of it is read before any is written, by whichever warp.
    tl.debug_barrier()
    tl.store(source + h, first.to(kind), mask=q_h)
    tl.store(source + HALF + h, second.to(kind), mask=q_h)
    tl.store(source + d, rest.to(kind), mask=q_d)
    if KV_HEADS > 0:
        slot = tl.load(slots_ptr + row)
        at_k = (head - HEADS) * slots + slot
        to_k = k_ptr + at_k * K_ROW
        if FP8:
            # What is not finite must not get lost: the maximum may leave it out, the sum does not.
            wrong = tl.sum(first - first, 0) + tl.sum(second - second, 0) + tl.sum(rest - rest, 0)
            most = tl.maximum(tl.max(tl.abs(first), 0), tl.max(tl.abs(second), 0))
            most = tl.maximum(most, tl.max(tl.abs(rest), 0)) / 448.0 + wrong
            by = tl.where(most == 0.0, 1.0, most)
            first, second, rest = _to_fp8(first / by), _to_fp8(second / by), _to_fp8(rest / by)
            scale = most + 0.0 * h.to(tl.float32)
            tl.store(k_scale_ptr + at_k * (K_ROW // 4) + HEAD_DIM // 4 + h, scale, mask=k_h & (h < 1))
        pool = k_ptr.dtype.element_ty
        tl.store(to_k + h, first.to(pool), mask=k_h)
        tl.store(to_k + HALF + h, second.to(pool), mask=k_h)
        tl.store(to_k + d, rest.to(pool), mask=k_d)
        number = head - HEADS - KV_HEADS
        e = tl.arange(0, V_PAD)
        inside = (e < V_DIM) & (number + 0 * e >= 0)
        from_v = qkv_ptr + row * row_stride + (HEADS + KV_HEADS) * HEAD_DIM + number * V_DIM
        v = tl.load(from_v + e, mask=inside, other=0.0).to(tl.float32) * value_scale
        at_v = number * slots + slot
        if FP8:
            most = tl.max(tl.abs(v), 0) / 448.0 + tl.sum(v - v, 0)
            scale = most + 0.0 * e.to(tl.float32)
            tl.store(v_scale_ptr + at_v * (V_ROW // 4) + V_DIM // 4 + e, scale, mask=inside & (e < 1))
            v = _to_fp8(v / tl.where(most == 0.0, 1.0, most))
        tl.store(v_ptr + at_v * V_ROW + e, v.to(v_ptr.dtype.element_ty), mask=inside)


@triton.jit
def norm_kernel(
    x_ptr, weight_ptr, residual_ptr, out_ptr, eps,
    SIZE: tl.constexpr, PAD: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """residual + RMSNorm of one row."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, PAD)
    inside = d < SIZE
    x = tl.load(x_ptr + row * SIZE + d, mask=inside, other=0.0).to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(x * x, 0) / SIZE + eps)
    y = x * factor * tl.load(weight_ptr + d, mask=inside, other=0.0)
    if RESIDUAL:
        y += tl.load(residual_ptr + row * SIZE + d, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * SIZE + d, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _activate(x, GELU: tl.constexpr):
    if GELU:
        y = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        # tanh by exp of a negative number only
        e = tl.exp(-2.0 * tl.abs(y))
        t = (1.0 - e) / (1.0 + e)
        return 0.5 * x * (1.0 + tl.where(y < 0.0, -t, t))
    return x / (1.0 + tl.exp(-x))


@triton.jit
def gated_kernel(x_ptr, out_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr):
    """act(gate) * up for BLOCK columns of a row [gate | up]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gate = tl.load(x_ptr + row * 2 * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * WIDTH + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    y = _activate(gate, GELU) * up
    tl.store(out_ptr + row * WIDTH + column, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def experts_up_kernel(
    x_ptr, weight_ptr, out_ptr, expert_ptr, place_ptr,
    routed, top_k,
    DEPTH: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """silu(gate) * up of ROWS routed rows of one expert; `place` lists routed rows by expert, padded."""
    block = tl.program_id(0)
    expert = tl.load(expert_ptr + block)
    if expert >= 0:
        at = tl.load(place_ptr + block * ROWS + tl.arange(0, ROWS))
        real = at < routed
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < WIDTH
        weights = weight_ptr + expert.to(tl.int64) * 2 * WIDTH * DEPTH
        gate = tl.zeros([ROWS, COLUMNS], tl.float32)
        up = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, DEPTH, STEP):
            k = start + tl.arange(0, STEP)
            x = tl.load(
                x_ptr + (at // top_k)[:, None] * DEPTH + k[None, :],
                mask=real[:, None] & (k < DEPTH)[None, :],
                other=0.0,
            )
            mask = inside[None, :] & (k < DEPTH)[:, None]
            w = tl.load(weights + column[None, :] * DEPTH + k[:, None], mask=mask, other=0.0)
            gate += _dot(x, w, WIDE)
            w = tl.load(weights + (WIDTH + column)[None, :] * DEPTH + k[:, None], mask=mask, other=0.0)
            up += _dot(x, w, WIDE)
        y = _activate(gate, False) * up
        tl.store(
            out_ptr + at[:, None] * WIDTH + column[None, :],
            y.to(out_ptr.dtype.element_ty),
            mask=real[:, None] & inside[None, :],
        )


@triton.jit
def experts_down_kernel(
    hidden_ptr, weight_ptr, share_ptr, out_ptr, expert_ptr, place_ptr,
    routed,
    DEPTH: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Weighted down projection of ROWS routed rows of one expert, a row of its own each (fp32)."""
    block = tl.program_id(0)
    expert = tl.load(expert_ptr + block)
    if expert >= 0:
        at = tl.load(place_ptr + block * ROWS + tl.arange(0, ROWS))
        real = at < routed
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < DEPTH
        weights = weight_ptr + expert.to(tl.int64) * DEPTH * WIDTH
        y = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, WIDTH, STEP):
            k = start + tl.arange(0, STEP)
            x = tl.load(
                hidden_ptr + at[:, None] * WIDTH + k[None, :],
                mask=real[:, None] & (k < WIDTH)[None, :],
                other=0.0,
            )
            w = tl.load(
                weights + column[None, :] * WIDTH + k[:, None],
                mask=inside[None, :] & (k < WIDTH)[:, None],
                other=0.0,
            )
            y += _dot(x, w, WIDE)
        share = tl.load(share_ptr + at, mask=real, other=0.0)
        tl.store(
            out_ptr + at[:, None] * DEPTH + column[None, :],
            y * share[:, None],
            mask=real[:, None] & inside[None, :],
        )
