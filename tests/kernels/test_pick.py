"""Which kernels a process gets, and what it does where those of its device can't run."""

from __future__ import annotations

import logging

import pytest
import torch

from transom.kernels import triton_ops as module
from transom.kernels.pick import KernelPick
from transom.kernels.triton_ops import TritonOps


def test_triton_that_cannot_run_is_told_and_left(caplog: pytest.LogCaptureFixture) -> None:
    if torch.cuda.is_available():
        pytest.skip("Triton runs here")
    with caplog.at_level(logging.INFO):
        assert KernelPick(torch.device("cuda"), "auto").ops(wait_s=0.0, threads=1) is None
    (record,) = [one for one in caplog.records if one.name == "transom.kernels.pick"]
    assert record.levelno == logging.WARNING
    assert "torch, since Triton can't run here: " in record.getMessage()


def test_the_check_of_triton_runs_a_kernel(triton_ops: TritonOps, monkeypatch: pytest.MonkeyPatch) -> None:
    triton_ops.check()

    def twice(self: TritonOps, x: torch.Tensor, norm: module.Norm) -> torch.Tensor:
        return 2 * x

    monkeypatch.setattr(TritonOps, "rms_norm", twice)
    with pytest.raises(RuntimeError, match="a wrong result"):
        triton_ops.check()
