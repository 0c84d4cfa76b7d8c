"""What processes say to each other: tagged msgspec structs in frame 0, tensors as raw frames after it.

The single place where the wire is defined; every process imports it. Never pickle, never torch.
A message says who gets the answer by address, so that no stage needs a table of requests of others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from transom.errors import ErrorInfo, ProtocolError

# Raise it whenever a process of the version before would go wrong with what this one sends: it skips fields
# that it doesn't know, so a new one is compatible only if doing without it is right (a figure, a hint). A
# field that changes what is computed, a new message, a changed meaning are not. 2: grammars and min_tokens.
# 3: sizes of media items.
PROTOCOL_VERSION = 3
MAX_HEADER_BYTES = 32 * 1024 * 1024
MAX_FRAMES = 4096

Modality = Literal["image", "video", "audio"]
Dtype = Literal["float32", "float16", "bfloat16", "int32", "int64", "uint8"]
FinishReason = Literal["stop", "length", "tool_calls", "abort"]

DTYPE_BYTES: dict[str, int] = {
    "float32": 4, "float16": 2, "bfloat16": 2, "int32": 4, "int64": 8, "uint8": 1,
}  # fmt: skip


class TensorMeta(msgspec.Struct, frozen=True):
    """Describes one raw frame: C-contiguous, little-endian."""

    dtype: Dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        count = 1
        for dim in self.shape:
            count *= dim
        return count * DTYPE_BYTES[self.dtype]


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to pick tokens. Defaults are greedy-free OpenAI semantics; `temperature` 0 means greedy.

    Randomness is a pure function of (seed, output index), so that a request gives the same tokens
    whichever process or batch draws them.
    """

    max_tokens: int
    min_tokens: int = 0  # before so many nothing ends the answer, unless its grammar leaves nothing else
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: dict[int, float] = {}
    top_logprobs: int | None = None  # None: no log-probabilities; 0: of the chosen token only


class Grammar(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an answer must match from its first token on, or from the end of its thinking on.

    `text` is in llguidance's form of Lark, over the ids of the checkpoint that all stages serve. Before it
    anything goes up to the token `think_close`: when the prompt has opened the thinking (`thinking`), or when
    the first token is `think_open`. `param` is the client's field to name in errors.
    """

    text: str
    param: str
    think_open: int | None = None
    think_close: int | None = None
    thinking: bool = False


class MediaOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Preprocessing options of one media item; None means the checkpoint's default."""

    min_pixels: int | None = None
    max_pixels: int | None = None
    fps: float | None = None
    min_frames: int | None = None
    max_frames: int | None = None
    use_audio: bool | None = None  # video: interleave the sound track
    background: tuple[int, int, int] = (255, 255, 255)  # colour under transparent pixels
    frame_index: int = 0  # animated image: which frame


class TextPart(msgspec.Struct, frozen=True, tag="text"):
    """A run of prompt tokens that the gateway knows already."""

    token_ids: list[int]


class MediaPart(msgspec.Struct, frozen=True, tag="media"):
    """The place of media item `item_index`: its tokens arrive as EmbeddingChunks."""

    item_index: int
    modality: Modality


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Asks a peer for its load; `reply_to` is the asker's inbox."""

    reply_to: str
    nonce: int


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """A worker's state. `incarnation` changes with every start of the process.

    `breaks` counts how often the worker lost its connection to the asker, and dropped the asker's requests.
    """

    nonce: int
    stage: str
    incarnation: str
    ready: bool
    load: dict[str, float]
    breaks: int = 0


class Join(msgspec.Struct, frozen=True, kw_only=True, tag="join"):
    """encoder -> gateway, every few seconds: send me media at `address`; or, `leaving`, no more of it."""

    address: str
    leaving: bool = False


class EncodeJob(msgspec.Struct, frozen=True, kw_only=True, tag="encode_job"):
    """gateway -> encoder: encode one item. Frame 1 = its bytes when `url` is None."""

    request_id: str
    item_index: int
    param: str  # where the item stands in the client's body, e.g. messages[0].content[1].image_url
    modality: Modality
    routing_key: str
    url: str | None = None
    options: MediaOptions = MediaOptions()
    deadline_s: float  # unix time
    gateway: str  # inbox that gets EncodeDone or RequestFailed
    reply_to: str  # inbox of the prefill worker, or the gateway's own: gets the EmbeddingChunks


class EmbeddingChunk(msgspec.Struct, frozen=True, kw_only=True, tag="embedding_chunk"):
    """encoder -> prefill: the next run of an item's prompt tokens with the rows of its pads.

    `token_ids` is the literal expansion (start and end tokens, timestamps, pads); each id in
    `pad_ids` takes one row of frame 1 (rows, hidden), in order. Chunks of an item are numbered from 0.
    """

    request_id: str
    item_index: int
    chunk_index: int
    last: bool
    content_key: str
    token_ids: list[int]
    pad_ids: tuple[int, ...]
    rows: TensorMeta


class MediaSize(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What counts of a media item against the limits of a request. What is not there, or not known, is 0."""

    pixels: int = 0  # of a picture, or of one frame of a video
    video_s: float = 0.0
    audio_s: float = 0.0  # of a sound, or of the sound track of a video
    visual_tokens: int = 0


class ItemSize(msgspec.Struct, frozen=True, kw_only=True, tag="item_size"):
    """encoder -> gateway: an item's size as soon as header or cache tell it; again whenever it grows."""

    request_id: str
    item_index: int
    size: MediaSize


class EncodeDone(msgspec.Struct, frozen=True, kw_only=True, tag="encode_done"):
    """encoder -> gateway: the last chunk of an item has been handed to the transport.

    No output of the request leaves the gateway before it: what the item has counts for the verdict on all.
    """

    request_id: str
    item_index: int
    modality: Modality
    content_key: str
    media_tokens: int  # rows, i.e. pads
    audio_tokens: int = 0  # rows of a video's sound track, included in media_tokens
    cache_hit: bool = False
    notes: tuple[str, ...] = ()  # e.g. "truncated: 37 of 120 frames decoded"
    timings_ms: dict[str, float] = {}
    spans: tuple[tuple[str, float, float], ...] = ()  # stage, start in ms since the job came, duration in ms
    size: MediaSize = MediaSize()


class PrefillJob(msgspec.Struct, frozen=True, kw_only=True, tag="prefill_job"):
    """gateway -> prefill: a whole request. The prompt is the parts in order."""

    request_id: str
    parts: list[TextPart | MediaPart]
    sampling: Sampling
    deadline_s: float  # unix time
    gateway: str  # inbox for TokenChunk and RequestFailed
    decode: str  # inbox of the decode worker that continues; "": the prefill worker itself does
    cache_salt: str = ""
    priority: int = 0
    grammar: Grammar | None = None


class KVReserve(msgspec.Struct, frozen=True, kw_only=True, tag="kv_reserve"):
    """prefill -> decode: ask for room before sending. Answered by KVGrant, maybe much later."""

    request_id: str
    prompt_len: int
    max_tokens: int
    prefill: str
    gateway: str
    deadline_s: float
    priority: int = 0
    kv_dtype: str = ""  # of its pools, as in the setting; "": found out at the hand-over


class KVGrant(msgspec.Struct, frozen=True, kw_only=True, tag="kv_grant"):
    """decode -> prefill: room is held for the request until it arrives, fails or expires."""

    request_id: str


class KVHandoff(msgspec.Struct, frozen=True, kw_only=True, tag="kv_handoff"):
    """prefill -> decode: the request's state after its first token.

    Frames, in the order of `tensors`: full K, full V (full layers, prompt_len, kv_heads, dim), SWA K,
    SWA V (SWA layers, swa_len, kv_heads, dim): the rows of the last `swa_len` positions only. A prefill
    worker that caches answers asks in `return_to` (its inbox) for a KVReturn of the pages of `return_page`
    tokens from position `return_from` on.
    """

    request_id: str
    prompt_ids: list[int]  # with pads of media; for penalties and usage
    first_token: int
    prompt_len: int
    swa_len: int
    sampling: Sampling
    deadline_s: float
    gateway: str
    tensors: tuple[TensorMeta, ...]
    priority: int = 0
    return_to: str = ""
    return_from: int = 0
    return_page: int = 1
    grammar: Grammar | None = None  # decode follows it from the first token on


class KVReturn(msgspec.Struct, frozen=True, kw_only=True, tag="kv_return"):
    """decode -> prefill: the KV of an answer, for the prefix cache. May be lost without harm.

    Frames as in KVHandoff, for the positions `begin` to `end` in the full layers and the last `swa_len`
    before `end` in the SWA layers.
    """

    request_id: str
    output_ids: list[int]  # the whole answer; the KV of the last one or more is not stored
    begin: int
    end: int
    swa_len: int
    tensors: tuple[TensorMeta, ...]


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of one emitted token and of the most likely ones at its position."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


class PromptStats(msgspec.Struct, frozen=True, kw_only=True):
    """Sent once with the first token."""

    prompt_tokens: int
    cached_tokens: int = 0
    image_tokens: int = 0
    video_tokens: int = 0
    audio_tokens: int = 0


class TokenChunk(msgspec.Struct, frozen=True, kw_only=True, tag="token_chunk"):
    """prefill or decode -> gateway: output tokens from `index` on; the gateway orders by index."""

    request_id: str
    index: int
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprob] | None = None
    prompt: PromptStats | None = None
    timings_ms: dict[str, float] = {}


class RequestFailed(msgspec.Struct, frozen=True, kw_only=True, tag="request_failed"):
    """Any stage -> gateway (and encoder -> prefill): the request ends with this error."""

    request_id: str
    error: ErrorInfo
    stage: str


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag="abort"):
    """Drop everything of the request. Idempotent; unknown ids are remembered for a while, because an
    abort may overtake the job or the chunks that it is about."""

    request_id: str
    reason: str


Message = (
    Ping
    | Pong
    | Join
    | EncodeJob
    | EmbeddingChunk
    | ItemSize
    | EncodeDone
    | PrefillJob
    | KVReserve
    | KVGrant
    | KVHandoff
    | KVReturn
    | TokenChunk
    | RequestFailed
    | Abort
)

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_PREFIX = b"TRSM" + bytes([PROTOCOL_VERSION])


def encode_header(message: Message) -> bytes:
    """Return frame 0: magic, version byte, msgpack body."""
    return _PREFIX + _ENCODER.encode(message)


def decode_header(frame: bytes | memoryview) -> Message:
    """Parse frame 0; raise ProtocolError on a foreign magic, version, tag, type or size."""
    view = memoryview(frame)
    if len(view) > MAX_HEADER_BYTES:
        raise ProtocolError(f"header of {len(view)} bytes, limit {MAX_HEADER_BYTES}")
    head = bytes(view[: len(_PREFIX)])
    if head[:4] != _PREFIX[:4]:
        raise ProtocolError("not a transom message: wrong magic bytes")
    if head != _PREFIX:
        raise ProtocolError(
            f"protocol version {head[4:5].hex() or 'missing'}, ours is {PROTOCOL_VERSION:02x}"
        )
    try:
        return _DECODER.decode(view[len(_PREFIX) :])
    except (msgspec.DecodeError, ValueError) as error:  # ValidationError is a DecodeError
        raise ProtocolError(f"malformed message: {error}") from None


def tensor_metas(message: Message) -> tuple[TensorMeta, ...]:
    """Return the metas of the raw frames that must follow the header, or () for free-form frames."""
    if isinstance(message, EmbeddingChunk):
        return (message.rows,)
    if isinstance(message, KVHandoff | KVReturn):
        return message.tensors
    return ()


def check_frames(message: Message, frames: Sequence[bytes | memoryview]) -> None:
    """Raise ProtocolError unless the raw frames are as many and as long as the header says."""
    if isinstance(message, EncodeJob):
        expected = 0 if message.url is not None else 1
        if len(frames) != expected:
            raise ProtocolError(f"encode_job with {len(frames)} frames, expected {expected}")
        return
    metas = tensor_metas(message)
    if len(frames) != len(metas):
        raise ProtocolError(f"{type(message).__name__} with {len(frames)} frames, expected {len(metas)}")
    for number, (meta, frame) in enumerate(zip(metas, frames, strict=True), start=1):
        if any(dim < 0 for dim in meta.shape) or meta.size_bytes != memoryview(frame).nbytes:
            raise ProtocolError(
                f"{type(message).__name__} frame {number} has {memoryview(frame).nbytes} bytes,"
                f" header says {meta.dtype}{list(meta.shape)} = {meta.size_bytes}"
            )
