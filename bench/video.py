"""A long clip from its bytes to embeddings: one step after the other, and in runs that decode side by side.

Runs in `transom bench video`; starts encoders of its own. The candidates take turns in every round, so that
a busy machine slows them alike; medians over rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import aiohttp
import av
import numpy as np
from rich.table import Table

from transom.bench.encoder_targets import own_device
from transom.bench.origin import origin
from transom.bench.processes import Child
from transom.bench.report import append_rows, progress_bar
from transom.bench.sequential_video import encode_in_steps
from transom.commands.base import make_console, write_json
from transom.errors import ConfigError, TransomError
from transom.messages import EmbeddingChunk, EncodeDone, EncodeJob, RequestFailed
from transom.transport import Transport

EXAMPLES = (
    "transom bench video",
    "transom bench video --seconds 600 --size 640x360 --decoders 1 2 4 --rounds 3 --out rows.jsonl",
)
_PATTERN_S = 60
_START_S = 300.0
_SHARE = "transom_encoder_first_chunk_decoded_ratio_sum"


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds until the first and the last embedding, and how much was decoded at the first."""

    first_s: float
    last_s: float
    decoded_share: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="mimo-nano", help="checkpoint (default %(default)s)")
    parser.add_argument(
        "--seconds", type=int, default=3600, metavar="N", help="length of the clip (default %(default)s)"
    )
    parser.add_argument("--size", default="320x180", metavar="WxH", help="of a frame (default %(default)s)")
    parser.add_argument(
        "--fps", type=int, default=24, metavar="N", help="frames a second (default %(default)s)"
    )
    parser.add_argument(
        "--keyframe-s", type=int, default=5, metavar="N", help="between keyframes (default %(default)s)"
    )
    parser.add_argument(
        "--decoders", type=int, nargs="+", default=[1, 2], metavar="N",
        help="decoders of a clip to compare (default 1 2)",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="(default %(default)s)")
    parser.add_argument("--out", metavar="FILE", help="append rows, one JSON object a line")


def run(args: argparse.Namespace) -> int:
    for name, value in (("seconds", args.seconds), ("rounds", args.rounds), ("decoders", min(args.decoders))):
        if value < 1:
            raise ConfigError(f"--{name} {value}: must be at least 1")
    rows = asyncio.run(measure(args))
    if args.out:
        append_rows(args.out, rows)
    if args.json:
        write_json({"benchmark": "video", "rows": rows})
    else:
        console = make_console()
        for part in tables(rows):
            console.print(part)
    return 0


async def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return one row a way to encode the clip."""
    data = await asyncio.to_thread(make_clip, args)
    found = await _measure(args, data)
    return [_row(args, len(data), name, times) for name, times in found.items()]


def make_clip(args: argparse.Namespace) -> bytes:
    """Return an H.264 clip: a minute of moving patterns, over and over."""
    try:
        width, height = (int(side) for side in args.size.split("x"))
    except ValueError:
        raise ConfigError(f"--size {args.size}: must be WxH, for example 320x180") from None
    pattern_s = min(_PATTERN_S, args.seconds)
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as output:
        stream = output.add_stream("libx264", rate=args.fps)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.options = {"g": str(args.fps * args.keyframe_s), "preset": "veryfast"}
        packets = [p for frame in _frames(width, height, pattern_s * args.fps) for p in stream.encode(frame)]
        packets += stream.encode(None)
        base = stream.codec_context.time_base
        assert base is not None
        timed = [(bytes(p), int(p.pts or 0), int(p.dts or 0), p.is_keyframe) for p in packets]
        for turn in range(args.seconds // pattern_s):
            shift = int(turn * pattern_s / base)
            for body, pts, dts, is_keyframe in timed:
                packet = av.Packet(body)
                packet.stream, packet.time_base = stream, Fraction(base)
                packet.pts, packet.dts, packet.is_keyframe = pts + shift, dts + shift, is_keyframe
                output.mux(packet)
    return buffer.getvalue()


def _frames(width: int, height: int, count: int) -> Iterator[av.VideoFrame]:
    noise = np.random.default_rng(0).integers(0, 40, (height, width, 3), dtype=np.uint8)
    y, x = np.mgrid[0:height, 0:width]
    for number in range(count):
        waves = 128 + 80 * np.sin((x + 3 * number) / 23) * np.cos((y - 2 * number) / 17)
        pixels = waves.astype(np.uint8)[..., None] + np.roll(noise, number, axis=1)
        yield av.VideoFrame.from_ndarray(pixels, format="rgb24")


async def _measure(args: argparse.Namespace, data: bytes) -> dict[str, list[Times]]:
    found: dict[str, list[Times]] = {"one step after the other": []}
    with ExitStack() as stack:
        log = stack.enter_context(tempfile.TemporaryFile())
        encoders: dict[str, Child] = {}
        for decoders in args.decoders:
            name = f"streamed, {decoders} decoder{'s' * (decoders > 1)}"
            argv = [
                sys.executable,
                "-m",
                "transom",
                "encoder",
                "--model",
                args.model,
                "--decode-workers",
                str(decoders + 1),
            ]
            argv += ["--embedding-cache-mb", "0", "--max-video-s", str(args.seconds + 60)]
            encoders[name] = stack.enter_context(Child(argv, log=log, limit_s=_START_S))
            found[name] = []
        async with _client() as transport:
            for streamed in encoders.values():  # nobody's first item is measured
                await _through(transport, streamed, data)
            with progress_bar("rounds", args.rounds, quiet=args.json) as tick:
                for number in range(args.rounds):
                    names = list(found)
                    for name in names[number % len(names) :] + names[: number % len(names)]:
                        child = encoders.get(name)
                        found[name].append(
                            await _through(transport, child, data)
                            if child is not None
                            else Times(*await asyncio.to_thread(encode_in_steps, args.model, data), 1.0)
                        )
                    tick()
    return found


class _client:
    """A transport that stands for gateway and prefill."""

    async def __aenter__(self) -> Transport:
        self._transport = Transport()
        await self._transport.start()
        return self._transport

    async def __aexit__(self, *_: object) -> None:
        await self._transport.close()


async def _through(transport: Transport, child: Child, data: bytes) -> Times:
    """Send the clip to an encoder and time its embeddings."""
    before = await _decoded_shares(child)
    job = EncodeJob(
        request_id=uuid.uuid4().hex,
        item_index=0,
        param="clip",
        modality="video",
        routing_key="clip",
        deadline_s=time.time() + 3600,
        gateway=transport.address,
        reply_to=transport.address,
    )
    started = time.perf_counter()
    first_s = last_s = 0.0
    transport.send(child.line["inbox"], job, [data])
    while True:
        message = (await transport.recv()).message
        if isinstance(message, EmbeddingChunk):
            last_s = time.perf_counter() - started
            first_s = first_s or last_s
        elif isinstance(message, RequestFailed):
            raise TransomError(f"the encoder refused the clip: {message.error.message}")
        elif isinstance(message, EncodeDone):
            return Times(first_s, last_s, await _decoded_shares(child) - before)


async def _decoded_shares(child: Child) -> float:
    async with aiohttp.ClientSession() as http, http.get(f"{child.line['http']}/metrics") as response:
        lines = (await response.text()).splitlines()
    return sum(float(line.split()[1]) for line in lines if line.startswith(f"{_SHARE} "))


def _row(args: argparse.Namespace, size_bytes: int, name: str, times: list[Times]) -> dict[str, Any]:
    return origin("video", own_device(())) | {
        "model": args.model,
        "cores": len(os.sched_getaffinity(0)),
        "what": name,
        "clip_s": args.seconds,
        "size": args.size,
        "fps": args.fps,
        "keyframe_s": args.keyframe_s,
        "clip_bytes": size_bytes,
        "rounds": len(times),
        "first_s": round(statistics.median(t.first_s for t in times), 3),
        "last_s": round(statistics.median(t.last_s for t in times), 3),
        "first_best_s": round(min(t.first_s for t in times), 3),
        "last_best_s": round(min(t.last_s for t in times), 3),
        "decoded_share_at_first": round(max(t.decoded_share for t in times), 4),
    }


def tables(rows: list[dict[str, Any]]) -> Iterator[str | Table]:
    """Yield what the rows say, to be printed."""
    table = Table("", "first embedding, s", "last embedding, s", "decoded at the first", "times faster")
    for row in rows:
        table.add_row(
            row["what"],
            f"{row['first_s']:.2f}",
            f"{row['last_s']:.2f}",
            f"{row['decoded_share_at_first']:.1%}",
            f"{rows[0]['first_s'] / row['first_s']:.1f} / {rows[0]['last_s'] / row['last_s']:.2f}",
        )
    yield table
    first = rows[0]
    yield (
        f"{first['clip_s']} s of {first['size']} at {first['fps']} frames/s,"
        f" {first['clip_bytes'] / 1e6:.0f} MB, {first['cores']} cores, medians of {first['rounds']}"
    )
