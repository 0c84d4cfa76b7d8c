"""The fused kernel under Triton's interpreter, against the torch path and the stock processor; and compiled.

In processes of their own: whether kernels are interpreted is decided when Triton is imported.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

SETUP = """
import warnings
import numpy as np, torch
from transom.kernels.fused_patchify import fused_patchify
from transom.kernels.patchify import patchify, resize_frames
torch.set_num_threads(1)
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
def sizes(patch): return dict(patch_size=patch, temporal_patch_size=2, merge_size=2, mean=MEAN, std=STD)
seeded = torch.Generator().manual_seed(1)
def noise(*shape): return torch.randint(0, 256, (*shape, 3), dtype=torch.uint8, generator=seeded)
def levels(patches, patch):  # back to 0..255
    std = torch.tensor(STD).repeat_interleave(2 * patch * patch)
    return patches * std * 255
"""


def run_python(code: str, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def interpreted(code: str) -> None:
    """Run code in a process whose Triton interprets."""
    run_python(SETUP + code, TRITON_INTERPRET="1")


def test_it_equals_the_torch_path_within_one_level() -> None:
    interpreted("""
for patch, count, source, target in [
    (16, 1, (77, 131), (32, 64)), (16, 2, (40, 50), (64, 32)), (14, 3, (150, 61), (28, 28)),
    (4, 3, (16, 24), (16, 24)), (4, 1, (1, 300), (8, 16)), (4, 2, (32, 64), (16, 32)),
]:
    frames = noise(count, *source)
    wanted, grid = patchify(resize_frames(frames, *target), **sizes(patch))
    found, found_grid = fused_patchify(frames, *target, **sizes(patch))
    assert found_grid == grid, (found_grid, grid)
    assert found.shape == wanted.shape
    off = (levels(found, patch) - levels(wanted, patch)).abs()
    assert off.max() < 1.01, (patch, source, off.max())
    # The reference rounds after each side: halves, of which halving a picture is full, may part by one.
    assert off.mean() < 0.45, (patch, source, off.mean())
    if source == target:
        assert off.max() < 1e-3

# Against exact arithmetic only rounding of a half may differ.
frames = noise(1, 37, 53)
x = torch.nn.functional.interpolate(
    frames.permute(0, 3, 1, 2).double(), (32, 64), mode="bilinear", align_corners=False)
wanted, _ = patchify((x + 0.5).floor().to(torch.uint8), **sizes(16))
found, _ = fused_patchify(frames, 32, 64, **sizes(16))
off = (levels(found, 16) - levels(wanted, 16)).abs()
assert off.max() < 1.01 and (off > 0.5).float().mean() < 1e-3, (off.max(), (off > 0.5).float().mean())
half, _ = fused_patchify(frames, 32, 64, **sizes(16), dtype=torch.bfloat16)
# The interpreter cuts off what a GPU rounds.
assert half.dtype == torch.bfloat16
assert torch.allclose(half.float(), found, rtol=2**-7, atol=1e-7)

for frames, height, width, message in [
    (noise(1, 32, 32), 33, 32, "32x33"), (noise(1, 32, 32), 0, 32, "32x0"),
    (torch.zeros(1, 32, 32, 3), 32, 32, "float32"), (noise(0, 32, 32), 32, 32, "(0, 32"),
]:
    try:
        fused_patchify(frames, height, width, **sizes(16))
    except ValueError as error:
        assert message in str(error), error
    else:
        raise AssertionError(message)
""")


def test_it_agrees_with_the_stock_processor_within_one_level() -> None:
    interpreted("""
warnings.simplefilter("ignore")
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
# Pillow's bilinear takes means over what it shrinks; where it grows the two are the same function.
for source, target, resample in [((64, 32), (64, 32), 3), ((20, 25), (32, 64), 2)]:
    frames = noise(1, *source)
    processor = Qwen2VLImageProcessorPil(
        patch_size=16, temporal_patch_size=2, merge_size=2, resample=resample,
        size={"shortest_edge": target[0] * target[1], "longest_edge": target[0] * target[1]})
    expected = processor(images=[Image.fromarray(frames[0].numpy())], return_tensors="pt")
    grid = expected["image_grid_thw"][0].tolist()
    found, found_grid = fused_patchify(frames, grid[1] * 16, grid[2] * 16, **sizes(16))
    assert list(found_grid) == grid
    off = (levels(found, 16) - levels(expected["pixel_values"], 16)).abs()
    assert off.max() < 1.01, off.max()
    if source == target:
        assert off.max() < 1e-3
""")


def test_it_compiles_for_a_gpu() -> None:
    """No GPU is needed for that: Triton brings the assembler."""
    run_python(
        """
import triton
from triton.backends.compiler import GPUTarget
from transom.kernels.fused_patchify import _kernel
pointers = dict(frames_ptr="*u8", out_ptr="*fp32", scale_ptr="*fp32", shift_ptr="*fp32")
numbers = dict.fromkeys(["frame_count", "in_height", "in_width", "columns"], "i32")
numbers |= dict.fromkeys(["height_scale", "width_scale"], "fp32")
constants = dict(patch=16, merge=2, depth=2, block=256)
types = pointers | numbers | dict.fromkeys(constants, "constexpr")
signature = {name: types[name] for name in _kernel.arg_names}
source = triton.compiler.ASTSource(fn=_kernel, signature=signature, constexprs=constants)
compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
assert ".target sm_90" in compiled.asm["ptx"]
assert len(compiled.asm["cubin"]) > 1000
""",
        TRITON_INTERPRET="0",
    )
