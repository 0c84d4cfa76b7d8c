"""Planned weights against the parameters of the real modules, built without memory."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from transom.kernels.weights import grid_shape
from transom.llm.footprint import weight_bytes
from transom.llm.model.loader import empty_model
from transom.llm.plan import find_model

MODELS = ("mimo-nano", "mimo-v2-flash", "mimo-v2.5", "mimo-v2.5-pro")
# What a published checkpoint quantises: everything that is a matrix of attention input or of an FFN.
QUANTISED = ("qkv_proj.weight", "q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight",
             "up_proj.weight", "down_proj.weight")  # fmt: skip


@pytest.mark.parametrize(
    ("name", "dtype", "mtp"),
    [(name, "bf16", True) for name in MODELS] + [("mimo-nano", "bf16", False), ("mimo-nano", "fp32", True)],
)
def test_unquantised_weights_are_the_models_parameters(name: str, dtype: str, mtp: bool) -> None:
    config = find_model(name).config
    served = config if mtp else dataclasses.replace(config, mtp_layers=0)
    model = empty_model(served, torch.bfloat16 if dtype == "bf16" else torch.float32, "meta")
    tensors = [*model.parameters(), *model.buffers()]
    assert weight_bytes(config, dtype, mtp=mtp).total == sum(x.nbytes for x in tensors)


@pytest.mark.parametrize(("name", "fused"), [("mimo-v2.5", True), ("mimo-v2-flash", False)])
def test_fp8_weights_are_the_published_tensors(name: str, fused: bool) -> None:
    config = find_model(name).config
    model = empty_model(config, torch.bfloat16, "meta")
    total = 0
    for tensor, slot in model.slots(lambda _: fused).items():
        rows, columns = slot.target.shape[0], slot.target.shape[-1]
        size = slot.target.nbytes
        if tensor.endswith(QUANTISED):
            # Split k scales restart at each head in full layers only.
            layer = int(tensor.split(".")[2]) if tensor.startswith("model.layers.") else config.num_layers
            restarts = fused or (config.layers + config.mtp_specs)[layer].full
            grid = slot.grids[0 if restarts else -1] if slot.grids else (rows,)
            scales = grid_shape(grid, (rows, columns), config.weight_block)
            size = rows * columns + 4 * scales[0] * scales[1]
        total += size
    assert weight_bytes(config, "fp8", mtp=True).total == total


def test_ep_divides_experts_only_and_rounds_up() -> None:
    config = find_model("mimo-v2.5-pro").config
    one, eight, seven = (weight_bytes(config, "fp8", ep=ep) for ep in (1, 8, 7))
    assert eight.experts * 8 == one.experts
    assert seven.experts * 384 == one.experts * 55
    assert dataclasses.replace(eight, experts=0) == dataclasses.replace(one, experts=0)
