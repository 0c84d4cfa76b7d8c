"""A clip encoded the plain way: decode all sampled frames, then cut them into patches, then embed them.

The baseline of `transom bench video`: one decoder, nothing overlaps, one unit in a forward. Same decoding,
preprocessing and towers as the encoder's.
"""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from transom.encoder.config import EncoderConfig
from transom.encoder.engine import Patches, Towers, choose_device
from transom.encoder.media.session import ClipSession
from transom.encoder.media.video import plan_clip
from transom.encoder.media.wire import SliceJob, VideoJob
from transom.encoder.models.config import ProcessorConfig
from transom.encoder.preprocess import FramePreprocessor
from transom.hub import resolve_model


@cache
def _towers(model: str) -> Towers:
    config = EncoderConfig()
    return Towers(Path(resolve_model(model)), *choose_device(config.device, config.dtype))


def _job(cfg: ProcessorConfig) -> VideoJob:
    config = EncoderConfig()
    return VideoJob(
        factor=cfg.factor,
        min_pixels=cfg.video_min_pixels,
        max_pixels=cfg.video_max_pixels,
        total_max_pixels=cfg.video_total_max_pixels,
        max_aspect_ratio=cfg.max_aspect_ratio,
        max_image_pixels=config.max_image_pixels,
        full_decode_pixels=config.full_decode_pixels,
        max_tokens=config.max_visual_tokens,
        fps=cfg.fps,
        min_frames=cfg.min_frames,
        max_frames=cfg.max_frames,
        temporal_patch=cfg.temporal_patch_size,
        max_video_s=float("inf"),
        threads=1,
        sound=None,
    )


def _decoded(cfg: ProcessorConfig, data: memoryview) -> tuple[list[NDArray[np.uint8]], tuple[int, int]]:
    """Return the units' frames and the size that the model wants."""
    job = _job(cfg)
    head = plan_clip(data, job)
    session = ClipSession(data)
    frames: list[NDArray[np.uint8]] = []
    for run in head.runs:
        whole = SliceJob(
            clip=0,
            first=run.first,
            goals=run.goals,
            keys=run.keys,
            begin=0,
            stop=len(run.goals),
            end=run.end,
            height=head.height,
            width=head.width,
            temporal_patch=job.temporal_patch,
            timed=head.timed,
            can_jump=head.can_jump,
            frame_ticks=head.frame_ticks,
            threads=job.threads,
        )
        frames += [unit for _, unit in session.units(whole)]
    session.close()
    return frames, head.target


def encode_in_steps(model: str, data: bytes) -> tuple[float, float]:
    """Return the seconds until the first and until the last embedding. The model loads before."""
    towers = _towers(model)
    started = time.perf_counter()
    frames, target = _decoded(towers.processor_cfg, memoryview(data))
    prepare = FramePreprocessor(towers.processor_cfg, towers.device)
    patches = [Patches(*prepare(unit, target)) for unit in frames]
    first_s = 0.0
    for unit in patches:
        towers.embed([unit])
        first_s = first_s or time.perf_counter() - started
    return first_s, time.perf_counter() - started
