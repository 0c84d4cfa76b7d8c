"""Settings of an encoder process. Loads no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass

from transom.config import StageConfig, setting

_MOST_DECODERS = 16  # unless told otherwise: each takes 60 MB of memory while it does nothing


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(StageConfig):
    """Limits are per item unless they say otherwise; a limit that is passed is a 400 that names it."""

    dtype: str = setting("auto", "weights and embeddings; auto is bfloat16 on cuda, else float32",
                         choices=("auto", "float32", "bfloat16"))  # fmt: skip

    ranks: int = setting(
        1, "processes that embed, one a device; on the CPU they share `threads`", ge=1, le=64, metavar="N"
    )  # fmt: skip
    rank_timeout_s: float = setting(
        300.0, "a rank whose forward takes longer is ended and replaced", ge=0.1, le=36000
    )

    announce_to: tuple[str, ...] = setting(
        (), "inbox of a gateway that takes encoders which announce themselves", metavar="ADDR"
    )

    decode_workers: int = setting(
        0, "processes that decode media, one of them for pictures alone; 0: a core each, at most 16, and one",
        ge=0, le=256,
    )  # fmt: skip
    decode_threads: int = setting(1, "threads of one video decoder", ge=1, le=64)
    video_decoder: str = setting(
        "pyav", "what decodes videos; torchcodec needs the extra `video` and FFmpeg's shared libraries",
        choices=("pyav", "torchcodec"),
    )  # fmt: skip
    decode_timeout_s: float = setting(60.0, "a decoder silent for so long is killed", ge=0.1, le=3600)
    decode_memory_mb: int = setting(4096, "address space of a decode process; 0: no limit", ge=0, le=1048576)

    batch_patches: int = setting(16384, "patches in one vision forward", ge=1, le=10_000_000)
    batch_mel_frames: int = setting(24000, "mel frames in one audio forward", ge=1, le=10_000_000)
    forward_ms: float = setting(
        400.0, "time that a forward of several pieces is meant to take; batches shrink to it", ge=1, le=60000
    )
    max_wait_ms: float = setting(4.0, "longest wait for more items while arrivals are dense", ge=0, le=1000)
    unit_window: int = setting(8, "video units that one decode job takes", ge=1, le=1024)

    max_queued_items: int = setting(1024, "items in the process; more are answered 429", ge=1, le=1_000_000)
    max_queued_mb: int = setting(1024, "bytes of media waiting or in work; more are 429", ge=1, le=1_000_000)

    max_image_pixels: int = setting(100_000_000, "pixels of an image, from its header", ge=1, le=10**10)
    full_decode_pixels: int = setting(
        16_000_000, "images above are decoded at reduced scale where the model needs less", ge=1, le=10**10
    )
    reduced_jpeg: bool = setting(
        False, "decode every JPEG at the smallest of its scales that the model needs: faster, slightly softer"
    )
    max_media_mb: float = setting(512.0, "size of one media file", ge=0.001, le=65536)
    max_video_s: float = setting(7200.0, "length of a video", ge=0.1, le=864000)
    max_audio_s: float = setting(7200.0, "length of a sound", ge=0.1, le=864000)
    max_visual_tokens: int = setting(1_000_000, "language-model tokens of an image or video", ge=1, le=10**8)

    fetch_workers: int = setting(1, "processes that download media", ge=1, le=16)
    fetch_concurrency: int = setting(64, "downloads at a time", ge=1, le=4096)
    fetch_connect_s: float = setting(5.0, "time to connect", ge=0.01, le=600)
    fetch_read_s: float = setting(15.0, "longest silence of a server", ge=0.01, le=600)
    fetch_total_s: float = setting(60.0, "time for a whole download, redirects included", ge=0.01, le=3600)
    fetch_max_redirects: int = setting(5, "redirects followed", ge=0, le=10)
    fetch_schemes: tuple[str, ...] = setting(("http", "https"), "schemes", choices=("http", "https"))
    fetch_ports: tuple[int, ...] = setting((80, 443), "ports; 0: any", ge=0, le=65535)
    fetch_domains: tuple[str, ...] = setting(
        ("*",), "domains: host, *.domain or *; none: no download at all", metavar="DOMAIN"
    )
    media_folders: tuple[str, ...] = setting(
        (), "folder below which file: URLs may be read; none: no file: URLs", metavar="FOLDER"
    )
    fetch_dns_servers: tuple[str, ...] = setting(
        (), "DNS server that names of URLs are asked of, ADDRESS or ADDRESS:PORT; none: as the system does",
        metavar="SERVER",
    )  # fmt: skip
    allow_private_addresses: bool = setting(False, "also fetch from loopback, private and reserved addresses")

    embedding_cache_mb: int = setting(
        256, "embeddings in shared memory, for all encoders of the machine together; 0: none",
        ge=0, le=1_048_576,
    )  # fmt: skip
    embedding_cache_keep: bool = setting(
        False, "leave the embeddings there when the last encoder stops, for the next start"
    )
    embedding_cache_scope: str = setting(
        "", "encoders of one user, checkpoint and dtype share embeddings if this is equal too", metavar="NAME"
    )

    @property
    def decode_processes(self) -> int:
        """The number of decode workers."""
        return self.decode_workers or min(len(os.sched_getaffinity(0)), _MOST_DECODERS) + 1
