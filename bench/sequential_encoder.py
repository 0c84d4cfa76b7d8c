"""The baseline of encoder load: one item at a time, download -> PIL -> CPU preprocessing -> forward.

Own process: `python -m transom.bench.sequential_encoder`. Takes and answers the wire of our encoder, so
that load, transport and towers are the same; shares nothing of its decoding, batching or caching.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import io
import logging
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import aiohttp
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps

from transom.config import StageConfig, add_flags, config_from_args
from transom.encoder.config import EncoderConfig
from transom.encoder.engine import Patches, Towers, choose_device
from transom.encoder.expand import Expander
from transom.encoder.media import wire
from transom.encoder.media.audio import decode_audio
from transom.encoder.preprocess import MelPreprocessor
from transom.encoder.sound import SoundCutter
from transom.errors import ConfigError, MediaError, TransomError
from transom.hub import resolve_model
from transom.media_key import content_key
from transom.messages import EmbeddingChunk, EncodeDone, EncodeJob, RequestFailed, TensorMeta
from transom.stage import Stage, run_stage
from transom.transport import Received, Transport

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Waiting:
    job: EncodeJob
    data: memoryview | None
    received_s: float


class SequentialStage(Stage):
    """An encoder as first written: a queue, and a loop that sees one item through before the next."""

    name = "encoder"
    totals = frozenset({"served", "failed"})

    def __init__(self, config: EncoderConfig) -> None:
        self._config = config
        self._queue: asyncio.Queue[_Waiting] = asyncio.Queue()
        self._served = self._failed = 0
        self._loop_task: asyncio.Task[None] | None = None

    async def start(self, transport: Transport) -> None:
        config = self._config
        self._transport = transport
        if config.threads:
            torch.set_num_threads(config.threads)
        folder = Path(resolve_model(config.model))
        device, dtype = choose_device(config.device, config.dtype)
        self._towers = await asyncio.to_thread(Towers, folder, device, dtype)
        self._expander = Expander.from_folder(folder)
        self._processor = _image_processor(self._towers.processor_cfg)
        self._http = aiohttp.ClientSession()
        self._loop_task = asyncio.create_task(self._run())

    async def handle(self, received: Received) -> None:
        message = received.message
        if isinstance(message, EncodeJob):
            data = received.frames[0] if received.frames else None
            self._queue.put_nowait(_Waiting(message, data, time.monotonic()))

    async def _run(self) -> None:
        while True:
            item = await self._queue.get()
            try:
                await self._serve(item)
                self._served += 1
            except (TransomError, OSError, ValueError, aiohttp.ClientError) as error:
                self._failed += 1
                failure = error if isinstance(error, TransomError) else MediaError(str(error))
                job = item.job
                self._transport.send(
                    job.gateway,
                    RequestFailed(request_id=job.request_id, error=failure.info(), stage=self.name),
                )

    async def _serve(self, item: _Waiting) -> None:
        job, started = item.job, time.monotonic()
        timings = {"queue": 1000 * (started - item.received_s)}
        data: Any = item.data
        if data is None:
            assert job.url is not None
            async with self._http.get(job.url) as response:
                response.raise_for_status()
                data = await response.read()
            timings["fetch"] = 1000 * (time.monotonic() - started)
        # A thread keeps the socket alive; nothing else runs meanwhile.
        rows, stages = await asyncio.to_thread(self._encode, job, bytes(data))
        chunk = EmbeddingChunk(
            request_id=job.request_id,
            item_index=job.item_index,
            chunk_index=0,
            last=True,
            content_key=content_key(data, job.modality, job.options, "sequential", self._towers.dtype),
            token_ids=self._tokens(job, len(rows)),
            pad_ids=self._expander.ids.pads(job.modality),
            rows=TensorMeta(self._towers.dtype, rows.shape),
        )
        await self._transport.send_wait(job.reply_to, chunk, [rows.reshape(-1).view(np.uint8).data])
        done = EncodeDone(
            request_id=job.request_id,
            item_index=job.item_index,
            modality=job.modality,
            content_key=chunk.content_key,
            media_tokens=len(rows),
            timings_ms=timings | stages | {"total": 1000 * (time.monotonic() - item.received_s)},
        )
        self._transport.send(job.gateway, done)

    def _tokens(self, job: EncodeJob, rows: int) -> list[int]:
        return self._expander.audio(rows) if job.modality == "audio" else self._expander.image(rows)

    def _encode(self, job: EncodeJob, data: bytes) -> tuple[NDArray[Any], dict[str, float]]:
        started = time.monotonic()
        if job.modality == "image":
            picture = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
            decoded = time.monotonic()
            values = self._processor(images=[picture], return_tensors="pt")
            grid = cast(Any, tuple(int(n) for n in values["image_grid_thw"][0]))
            pixels = values["pixel_values"].to(self._towers.device)
            prepared = time.monotonic()
            rows = self._towers.to_host(self._towers.vision([Patches(pixels, grid)])[0])
        elif job.modality == "audio":
            cfg = self._towers.audio_cfg
            audio_job = wire.AudioJob(
                sampling_rate=cfg.mel.sampling_rate,
                piece_samples=cfg.audio_segment_size * cfg.mel.hop_length,
                max_audio_s=self._config.max_audio_s,
            )
            pieces = list(decode_audio(memoryview(data), audio_job, []))
            decoded = time.monotonic()
            cutter, mel = SoundCutter(cfg), MelPreprocessor(cfg.mel, self._towers.device)
            windows = [window for samples, last in pieces for window in cutter.push(samples, last)]
            mels = [mel(window.samples, window.skip, window.frames) for window in windows]
            prepared = time.monotonic()
            rows = np.concatenate([self._towers.to_host(self._towers.audio([one])[0]) for one in mels])
        else:
            raise MediaError("the sequential encoder takes pictures and sound")
        ended = time.monotonic()
        return rows, {
            "decode": 1000 * (decoded - started),
            "preprocess": 1000 * (prepared - decoded),
            "forward": 1000 * (ended - prepared),
        }

    def peer_lost(self, address: str) -> None:
        """Nothing depends on a peer: what is sent to one that is gone is dropped."""

    def load(self) -> dict[str, float]:
        return {"items": self._queue.qsize(), "served": self._served, "failed": self._failed}

    async def drain(self) -> None:
        """Drop what waits: a benchmark has had its answers."""

    async def close(self) -> None:
        if self._loop_task is not None:
            self._loop_task.cancel()
            await asyncio.gather(self._loop_task, return_exceptions=True)
            await self._http.close()


def _image_processor(cfg: Any) -> Any:
    """Return the stock processor of the model family, with the checkpoint's sizes."""
    try:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    except ImportError:
        raise ConfigError("the sequential encoder needs transformers: pip install transformers") from None
    return Qwen2VLImageProcessorPil(
        patch_size=cfg.patch_size,
        temporal_patch_size=cfg.temporal_patch_size,
        merge_size=cfg.merge_size,
        size={"shortest_edge": cfg.image_min_pixels, "longest_edge": cfg.image_max_pixels},
        image_mean=list(cfg.image_mean),
        image_std=list(cfg.image_std),
    )


def main(argv: list[str] | None = None) -> int:
    """Entry of the process: takes the settings of an encoder."""
    parser = argparse.ArgumentParser(prog="sequential_encoder", description=__doc__)
    add_flags(parser, EncoderConfig)
    config = config_from_args(EncoderConfig, "encoder", parser.parse_args(argv))
    make = functools.partial(SequentialStage, config)
    return run_stage(make, cast(StageConfig, config), name="encoder")


if __name__ == "__main__":
    sys.exit(main())
