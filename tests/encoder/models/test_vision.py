from __future__ import annotations

import math

import pytest
import torch

from transom.encoder.models.config import VisionConfig
from transom.encoder.models.vision import VisionTower

KINDS = [-1, 0, 1, 1, 0, 1, -1]


def make_tower(**changes):
    values = {
        "depth": 7,
        "hidden_size": 24,
        "intermediate_size": 40,
        "out_hidden_size": 20,
        "num_heads": 4,
        "num_key_value_heads": 2,
        "qk_channels": 8,
        "kv_channels": 8,
        "patch_size": 4,
        "fullatt_block_indexes": [0, 6],
        "vit_window_attn_types": KINDS,
        "visual_token_window_size": 5,
    }
    cfg = VisionConfig.from_dict({**values, **changes})
    torch.manual_seed(0)
    tower = VisionTower(cfg)
    with torch.no_grad():
        for name, parameter in tower.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_(0, 2)
            elif "norm" in name or "ln_q" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0, 0.2)
    return tower


def pixels_of(tower, grids, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(t * h * w, tower.cfg.patch_dim, generator=generator) for t, h, w in grids]


def rms(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def rotated(vector, row, column):
    """Rotate one head vector: pairs (i, i + d/2); the first half of the pairs by row, the rest by column."""
    pairs = vector.shape[0] // 2
    out = vector.clone()
    for i in range(pairs):
        position = row if i < pairs // 2 else column
        angle = position * 10000.0 ** -((i % (pairs // 2)) / (pairs // 2))
        a, b = vector[i], vector[i + pairs]
        out[i] = a * math.cos(angle) - b * math.sin(angle)
        out[i + pairs] = b * math.cos(angle) + a * math.sin(angle)
    return out


def oracle_attention(weights, cfg, prefix, x, places, limit):
    """x (patches, hidden) in the current order with its places; one head, one query at a time."""
    heads, kv_heads, dim = cfg.num_heads, cfg.num_key_value_heads, cfg.qk_channels
    mixed = x @ weights[f"{prefix}.qkv.weight"].T + weights[f"{prefix}.qkv.bias"]
    q = mixed[:, : heads * dim].reshape(-1, heads, dim)
    k = mixed[:, heads * dim : (heads + kv_heads) * dim].reshape(-1, kv_heads, dim)
    v = mixed[:, (heads + kv_heads) * dim :].reshape(-1, kv_heads, dim)
    sinks = weights.get(f"{prefix}.sinks")
    out = torch.zeros(x.shape[0], heads, dim, dtype=x.dtype)
    for head in range(heads):
        group = head // (heads // kv_heads)
        queries = [rotated(q[i, head], *place) for i, place in enumerate(places)]
        keys = [rotated(k[j, group], *place) for j, place in enumerate(places)]
        for i, query in enumerate(queries):
            seen = [j for j in range(len(keys)) if limit is None or abs(i - j) <= limit]
            logits = [(query @ keys[j]).item() / math.sqrt(dim) for j in seen]
            denominator = 0.0
            if sinks is not None and cfg.sink_mode == "first_key" and seen[0] == 0:
                logits[0] += sinks[head].item()
            if sinks is not None and cfg.sink_mode == "denominator":
                denominator = math.exp(sinks[head].item())
            powers = [math.exp(logit) for logit in logits]
            total = sum(powers) + denominator
            for j, power in zip(seen, powers, strict=True):
                out[i, head] += power / total * v[j, group]
    flat = out.reshape(x.shape[0], -1)
    return flat @ weights[f"{prefix}.proj.weight"].T + weights[f"{prefix}.proj.bias"]


def oracle(tower, pixels, grid):
    """Slice by slice; patches are looked up by their place, and orders are lists of places."""
    cfg = tower.cfg
    weights = {name: value.detach().double() for name, value in tower.state_dict().items()}
    frames, height, width = grid
    units = [(r, c) for r in range(height // 2) for c in range(width // 2)]
    rows = [(2 * r + dr, 2 * c + dc) for r, c in units for dr in (0, 1) for dc in (0, 1)]
    by_column = sorted(units, key=lambda unit: (unit[1], unit[0]))
    columns = [(2 * r + dr, 2 * c + dc) for r, c in by_column for dr in (0, 1) for dc in (0, 1)]
    results = []
    for frame in range(frames):
        part = pixels[frame * height * width : (frame + 1) * height * width].double()
        hidden = part @ weights["patch_embed.proj.weight"].flatten(1).T
        state = {place: hidden[i] for i, place in enumerate(rows)}
        for index, kind in enumerate(cfg.vit_window_attn_types):
            places = columns if kind == 1 else rows
            limit = None if index in cfg.fullatt_block_indexes else cfg.visual_token_window_size
            x = torch.stack([state[place] for place in places])
            name = f"blocks.{index}"
            normed = rms(x, weights[f"{name}.norm1.weight"])
            x = x + oracle_attention(weights, cfg, f"{name}.attn", normed, places, limit)
            normed = rms(x, weights[f"{name}.norm2.weight"])
            gate = normed @ weights[f"{name}.mlp.gate_proj.weight"].T + weights[f"{name}.mlp.gate_proj.bias"]
            up = normed @ weights[f"{name}.mlp.up_proj.weight"].T + weights[f"{name}.mlp.up_proj.bias"]
            mixed = gate / (1 + (-gate).exp()) * up
            x = x + mixed @ weights[f"{name}.mlp.down_proj.weight"].T + weights[f"{name}.mlp.down_proj.bias"]
            state = {place: x[i] for i, place in enumerate(places)}
        for r, c in units:
            four = [state[2 * r + dr, 2 * c + dc] for dr in (0, 1) for dc in (0, 1)]
            normed = [
                (p - p.mean()) / (p.var(correction=0) + 1e-6).sqrt() * weights["merger.ln_q.weight"]
                for p in four
            ]
            inner = torch.cat(normed) @ weights["merger.mlp.0.weight"].T
            inner = inner * 0.5 * (1 + torch.erf(inner / math.sqrt(2)))
            results.append(inner @ weights["merger.mlp.2.weight"].T)
    return torch.stack(results)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sink_mode": "denominator"},
        {"use_sink": False},
        # Starts and ends in column order: the way in and the way out are both taken.
        {"vit_window_attn_types": [1, 1, 0, -1, 0, 0, 1], "fullatt_block_indexes": [3]},
    ],
    ids=["first_key", "denominator", "no sinks", "columns outside"],
)
@pytest.mark.parametrize("grid", [(1, 4, 6), (2, 6, 2)])
def test_equals_a_plain_loop_implementation(changes, grid):
    tower = make_tower(**changes)
    (pixels,) = pixels_of(tower, [grid])
    got = tower(pixels, [grid]).double()
    torch.testing.assert_close(got, oracle(tower, pixels, grid), atol=2e-4, rtol=2e-4)


def test_the_sink_modes_and_the_windows_matter():
    grid = (1, 6, 6)
    results = []
    for changes in (
        {},
        {"sink_mode": "denominator"},
        {"use_sink": False},
        {"visual_token_window_size": 6},
        {"vit_window_attn_types": [-1, 0, 0, 0, 0, 0, -1]},
    ):
        tower = make_tower(**changes)
        state = make_tower().state_dict()
        tower.load_state_dict({key: value for key, value in state.items() if key in tower.state_dict()})
        with torch.no_grad():
            results.append(tower(pixels_of(tower, [grid])[0], [grid]))
    for index, left in enumerate(results):
        for right in results[index + 1 :]:
            assert float((left - right).abs().max()) > 1e-2


def test_a_packed_batch_equals_its_items_alone():
    tower = make_tower()
    grids = [(1, 12, 12), (1, 2, 2), (3, 4, 6), (1, 6, 4), (1, 2, 12), (2, 2, 2)]
    parts = pixels_of(tower, grids)
    packed = tower(torch.cat(parts), grids)
    alone = torch.cat([tower(part, [grid]) for part, grid in zip(parts, grids, strict=True)])
    assert packed.shape == (sum(t * h * w // 4 for t, h, w in grids), 20)
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=1e-5)


def test_frames_of_a_video_equal_still_pictures():
    tower = make_tower()
    (pixels,) = pixels_of(tower, [(3, 4, 6)])
    torch.testing.assert_close(
        tower(pixels, [(3, 4, 6)]), tower(pixels, [(1, 4, 6)] * 3), atol=1e-6, rtol=1e-6
    )


def test_a_large_picture_goes_through_bands_with_the_same_result(monkeypatch):
    tower = make_tower()
    grid = (1, 24, 26)
    (pixels,) = pixels_of(tower, [grid])
    banded = tower(pixels, [grid])
    monkeypatch.setattr("transom.encoder.models.attention.BAND_FROM_LEN", 10_000)
    torch.testing.assert_close(tower(pixels, [grid]), banded, atol=1e-5, rtol=1e-5)


def test_every_parameter_learns():
    tower = make_tower()
    grids = [(1, 4, 4), (2, 2, 6)]
    tower(torch.cat(pixels_of(tower, grids)), grids).square().sum().backward()
    for name, parameter in tower.named_parameters():
        assert parameter.grad is not None, name
        assert float(parameter.grad.abs().sum()) > 0, name


@pytest.mark.parametrize("sink_mode", ["first_key", "denominator"])
def test_gradients_equal_finite_differences(sink_mode):
    tower = make_tower(sink_mode=sink_mode).double()
    grid = (1, 4, 4)
    pixels = pixels_of(tower, [grid])[0].double()
    loss = tower(pixels, [grid]).square().sum()
    sinks = tower.blocks[2].attn.sinks
    (gradient,) = torch.autograd.grad(loss, sinks)
    for head in range(4):
        values = []
        for step in (1e-4, -1e-4):
            with torch.no_grad():
                sinks[head] += step
                values.append(tower(pixels, [grid]).square().sum().item())
                sinks[head] -= step
        assert (values[0] - values[1]) / 2e-4 == pytest.approx(gradient[head].item(), rel=1e-5)


def test_bf16_stays_close_to_fp32():
    tower = make_tower()
    grids = [(1, 8, 8), (1, 4, 6)]
    pixels = torch.cat(pixels_of(tower, grids))
    with torch.no_grad():
        exact = tower(pixels, grids)
        half = tower.to(torch.bfloat16)(pixels, grids)
    assert half.dtype == torch.bfloat16
    assert float((half.float() - exact).norm() / exact.norm()) < 0.05


@pytest.mark.parametrize(
    ("grids", "message"),
    [
        ([], "0 grids"),
        ([(1, 3, 4)], r"\(1, 3, 4\)"),
        ([(0, 4, 4)], r"\(0, 4, 4\)"),
        ([(1, 4, 4)], r"need \(16, 96\)"),
    ],
)
def test_pixels_that_do_not_fit_are_refused(grids, message):
    tower = make_tower()
    with pytest.raises(ValueError, match=message):
        tower(torch.zeros(8, 96), grids)
