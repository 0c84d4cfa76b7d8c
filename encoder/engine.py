"""The towers of an encoder and the one thread that runs them over batches of pieces.

Encoder process. Embeds what it is handed, batched across requests; knows nothing of requests or bytes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from transom.encoder.batcher import Batcher, Lane, Piece
from transom.encoder.config import EncoderConfig
from transom.encoder.metrics import EncoderMetrics
from transom.encoder.models.config import AudioConfig, ProcessorConfig, VisionConfig
from transom.encoder.models.loader import load_audio, load_vision
from transom.encoder.preprocess import Grid
from transom.errors import TransomError
from transom.messages import Dtype

logger = logging.getLogger(__name__)

Rows = NDArray[Any]
_DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Patches:
    """A picture or a video unit."""

    pixels: Tensor  # (patches, patch_dim)
    grid: Grid


@dataclass(frozen=True, slots=True)
class _Work:
    payload: Patches | Tensor
    result: asyncio.Future[Rows]


class Towers:
    """The vision tower and the audio path of a checkpoint on one device."""

    def __init__(self, folder: Path, device: torch.device, dtype: Dtype) -> None:
        self.vision_cfg = VisionConfig.from_folder(folder)
        self.audio_cfg = AudioConfig.from_folder(folder)
        self.processor_cfg = ProcessorConfig.from_folder(folder)
        self.device = device
        self.dtype: Dtype = dtype
        self._vision = load_vision(folder, _DTYPES[dtype], device)
        self._audio = load_audio(folder, _DTYPES[dtype], device)

    @torch.inference_mode()
    def vision(self, items: list[Patches]) -> list[Rows]:
        """Embed pictures and units together: one (rows, hidden) array each."""
        pixels = items[0].pixels if len(items) == 1 else torch.cat([item.pixels for item in items])
        rows = self._vision(pixels, [item.grid for item in items])
        unit = self.vision_cfg.merge_unit
        counts = [item.grid[0] * item.grid[1] * item.grid[2] // unit for item in items]
        return self._to_arrays(rows.split(counts))

    @torch.inference_mode()
    def audio(self, mels: list[Tensor]) -> list[Rows]:
        """Embed mel segments together: one (rows, hidden) array each."""
        return self._to_arrays(self._audio(mels))

    def _to_arrays(self, parts: Any) -> list[Rows]:
        arrays = []
        for part in parts:
            host = part.to("cpu", _DTYPES[self.dtype]).contiguous()
            if self.dtype == "bfloat16":
                host = host.view(torch.uint16)
            # A copy: a view would keep the whole batch's result alive as long as one item's.
            arrays.append(np.array(host.numpy()))
        return arrays


def choose_device(config: EncoderConfig) -> tuple[torch.device, Dtype]:
    """Return the device and the dtype that the settings mean on this machine."""
    name = config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if config.dtype == "auto":
        return device, "bfloat16" if device.type == "cuda" else "float32"
    return device, "bfloat16" if config.dtype == "bfloat16" else "float32"


class Engine:
    """Batches pieces across items and embeds them in one thread. Methods run on the event loop."""

    def __init__(self, towers: Towers, config: EncoderConfig, metrics: EncoderMetrics) -> None:
        self._towers = towers
        self._metrics = metrics
        self._batcher: Batcher[_Work] = Batcher(
            {"vision": config.batch_patches, "audio": config.batch_mel_frames}, config.max_wait_ms / 1000
        )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="forward")
        self._wakeup = asyncio.Event()
        self._loop_task: asyncio.Task[None] | None = None
        self.upstream = 0  # items that may still hand in pieces
        self.batches = 0

    def start(self) -> None:
        """Begin to run batches."""
        self._loop_task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop after the running batch."""
        if self._loop_task is not None:
            self._loop_task.cancel()
            await asyncio.gather(self._loop_task, return_exceptions=True)
        await asyncio.to_thread(self._thread.shutdown)

    def submit(self, owner: Hashable, payload: Patches | Tensor) -> asyncio.Future[Rows]:
        """Queue one piece; the future gives its rows, or the error of this piece alone."""
        lane: Lane = "vision" if isinstance(payload, Patches) else "audio"
        cost = payload.pixels.shape[0] if isinstance(payload, Patches) else payload.shape[0]
        result: asyncio.Future[Rows] = asyncio.get_running_loop().create_future()
        self._batcher.add(Piece(owner, lane, int(cost), time.monotonic(), _Work(payload, result)))
        self._wakeup.set()
        return result

    def cancel(self, owner: Hashable) -> None:
        """Take the owner's queued pieces out; those in the running batch are lost work."""
        for piece in self._batcher.cancel(owner):
            piece.payload.result.cancel()

    def queued(self) -> dict[Lane, int]:
        """Queued cost by lane: patches, mel frames."""
        return self._batcher.queued

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            now = time.monotonic()
            batch = self._batcher.next(now, more_coming=self.upstream > 0)
            if not batch:
                wait_s = self._batcher.wait_s(now, more_coming=self.upstream > 0)
                self._wakeup.clear()
                try:
                    async with asyncio.timeout(wait_s):
                        await self._wakeup.wait()
                except TimeoutError:
                    pass
                continue
            results = await loop.run_in_executor(self._thread, self._forward, batch)
            self.batches += 1
            self._metrics.batch(batch[0].lane, len(batch), time.monotonic() - now)
            for piece, result in zip(batch, results, strict=True):
                future = piece.payload.result
                if future.done():
                    continue
                if isinstance(result, Exception):
                    future.set_exception(result)
                    # Its item may be gone: then nobody asks, and nobody has to.
                    future.exception()
                else:
                    future.set_result(result)

    def _forward(self, batch: list[Piece[_Work]]) -> list[Rows | Exception]:
        """Embed a batch; when it fails, embed its pieces one by one, so that only the bad one fails."""
        try:
            return list(self._embed(batch))
        except Exception as error:
            if len(batch) == 1:
                logger.exception("forward of one piece failed")
                return [TransomError(f"the encoder failed on this item ({type(error).__name__})")]
            logger.warning("forward of %d pieces failed (%s); trying one by one", len(batch), error)
            return [self._forward([piece])[0] for piece in batch]

    def _embed(self, batch: list[Piece[_Work]]) -> list[Rows]:
        payloads = [piece.payload.payload for piece in batch]
        if batch[0].lane == "vision":
            return self._towers.vision([p for p in payloads if isinstance(p, Patches)])
        return self._towers.audio([p for p in payloads if isinstance(p, Tensor)])
