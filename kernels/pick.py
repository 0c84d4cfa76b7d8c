"""Picks the fused kernels for a device: compiled C++ on a CPU, Triton on CUDA, none where neither can be had.

Runs at the start of llm processes: made before the model is loaded, asked after it.
"""

from __future__ import annotations

import importlib.util
import logging

import torch

from transom.kernels.native_build import Build, NoLibraryError
from transom.kernels.native_ops import NativeOps
from transom.kernels.ops import FusedOps

logger = logging.getLogger(__name__)


class KernelPick:
    """The kernels of one process. Compiling, if it is needed, starts at once in the background."""

    def __init__(self, device: torch.device, setting: str) -> None:
        self._device = device
        self._off = setting == "torch"
        self._build = None if self._off or device.type != "cpu" else Build()

    def ops(self, *, wait_s: float, threads: int) -> FusedOps | None:
        """Return the kernels, or None where torch computes; one log line says which and why."""
        if self._off:
            logger.info("kernels: torch, as set")
            return None
        if self._build is not None:
            try:
                found: FusedOps = NativeOps(self._build.wait(wait_s), threads)
            except (NoLibraryError, OSError) as error:
                logger.info("kernels: torch, since there are no compiled ones: %s", error)
                return None
        elif self._device.type == "cuda" and importlib.util.find_spec("triton") is not None:
            try:
                from transom.kernels.triton_ops import TritonOps

                found = TritonOps(self._device)
                found.check()
            except Exception as error:  # Triton raises what its compiler and driver raise
                logger.warning("kernels: torch, since Triton can't run here: %s", error)
                return None
        else:
            logger.info("kernels: torch, since none are written for %s without triton", self._device)
            return None
        logger.info("kernels: %s", found.name)
        return found
