"""Settings of the gateway process: its workers, its HTTP side and the limits of a request.

Read by the command line and by the gateway; loads no tensor library.
"""

from __future__ import annotations

from dataclasses import dataclass

from transom.config import StageConfig, setting


@dataclass(frozen=True, kw_only=True)
class GatewayConfig(StageConfig):
    """Settings of `transom gateway`."""

    http_port: int = setting(8000, "port of the HTTP API; 0: any free one", ge=0, le=65535)
    encoder: tuple[str, ...] = setting((), "inbox address of an encoder", metavar="ADDR")
    accept_encoders: bool = setting(
        False, "also take encoders that announce themselves (`transom encoder --announce-to`)"
    )
    prefill: tuple[str, ...] = setting((), "inbox address of a prefill worker", metavar="ADDR")
    decode: tuple[str, ...] = setting(
        (), "inbox address of a decode worker; none: prefill workers decode too", metavar="ADDR"
    )
    served_model_name: tuple[str, ...] = setting(
        (), "name under which clients ask for the model; the first one is the main name", metavar="NAME"
    )
    api_keys_file: str = setting(
        "",
        "file with one API key a line, with limits of its own or not; empty: no keys asked",
        metavar="FILE",
    )
    key_requests_per_minute: int = setting(
        0, "requests a minute of one API key; 0: no limit", ge=0, le=1_000_000
    )
    key_max_inflight: int = setting(0, "requests at once of one API key; 0: no limit", ge=0, le=1_000_000)
    cors_origins: tuple[str, ...] = setting(
        (), "origin whose web pages may call the API; '*' for all", metavar="ORIGIN"
    )

    request_timeout_s: float = setting(600.0, "time a request may take in all", ge=0.1, le=86_400)
    body_timeout_s: float = setting(60.0, "time a client may take to send its body", ge=0.1, le=3600)
    write_timeout_s: float = setting(60.0, "time a client may leave a stream unread", ge=0.1, le=3600)
    keepalive_s: float = setting(15.0, "silence after which a stream gets a comment line", ge=0.05, le=3600)
    ping_interval_s: float = setting(0.5, "how often workers are asked for their load", ge=0.02, le=60)
    worker_timeout_s: float = setting(
        30.0, "silence after which a worker counts as lost and its requests fail", ge=0.1, le=600
    )

    max_body_mb: int = setting(64, "size of a request body", ge=1, le=4096)
    max_buffered_mb: int = setting(
        1024, "size of all request bodies, and of answers that are not streamed, held at once",
        ge=1, le=1_048_576,
    )  # fmt: skip
    max_media_items: int = setting(64, "media items of one request", ge=0, le=4096)
    max_request_pixels: int = setting(
        1_000_000_000, "pixels of all images of one request, and of one frame of each video", ge=1, le=10**12
    )
    max_request_video_s: float = setting(14_400.0, "length of all videos of one request", ge=0.1, le=10**7)
    max_request_audio_s: float = setting(
        14_400.0, "length of all sounds of one request, sound tracks of videos included", ge=0.1, le=10**7
    )
    max_request_visual_tokens: int = setting(
        1_000_000, "tokens of all images and videos of one request", ge=1, le=10**8
    )
    max_media_mb: int = setting(48, "decoded size of one inline media item", ge=1, le=4096)
    max_embedding_mb: int = setting(
        16, "embeddings of one item that /v1/media/embeddings gives out", ge=1, le=4096
    )
    max_unread_kb: int = setting(
        4096, "output of one choice that waits while its client reads nothing; more ends the stream",
        ge=16, le=1_048_576,
    )  # fmt: skip
    max_choices: int = setting(8, "choices (n) of one request", ge=1, le=128)
    max_inflight: int = setting(512, "choices in work at once; more wait or get 429", ge=1, le=1_000_000)
    max_queue_tokens: int = setting(
        2_000_000, "prompt and output tokens of all requests in work; more wait or get 429", ge=1
    )
    max_waiting: int = setting(
        256, "requests that wait for room, fairly between API keys; more get 429", ge=0, le=1_000_000
    )
    max_wait_s: float = setting(5.0, "how long a request waits for room before it gets 429", ge=0, le=3600)
    max_context: int = setting(0, "prompt and output tokens of one request; 0: as the model says", ge=0)
    kept_traces: int = setting(256, "timelines of requests that are kept to be looked at", ge=0, le=100_000)
    otel: bool = setting(
        False, "send a trace of each request by OpenTelemetry (extra otel; OTEL_* variables say where to)"
    )
    default_max_tokens: int = setting(1024, "output tokens when the client gives no limit", ge=1)
