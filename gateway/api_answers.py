"""What the API answers, as msgspec types: the source of the answers in the OpenAPI document.

Gateway process. The renderers build plain dictionaries; tests hold them against these types.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

_FinishReason = Literal["stop", "length", "tool_calls"]


class ErrorDetail(Struct, kw_only=True):
    """`param` is the path of the field at fault."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(Struct, kw_only=True):
    """Every answer of 400 and above."""

    error: ErrorDetail


class PromptTokensDetails(Struct, kw_only=True):
    """`cached_tokens` were not computed anew."""

    cached_tokens: int
    image_tokens: int
    video_tokens: int
    audio_tokens: int


class CompletionTokensDetails(Struct, kw_only=True):
    """Tokens of the thinking."""

    reasoning_tokens: int


class MediaNote(Struct, kw_only=True):
    """What the encoder remarks on a media item, counted from 0 in the order of the request."""

    item: int
    note: str


class Usage(Struct, kw_only=True):
    """Tokens of a request, all choices together; `media_notes` only where there are some."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails
    media_notes: list[MediaNote] | UnsetType = UNSET


class TokenAlternative(Struct, kw_only=True):
    """A token that could have stood there."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenToken(TokenAlternative, kw_only=True):
    """A token of the answer."""

    top_logprobs: list[TokenAlternative]


class ChatLogprobs(Struct, kw_only=True):
    """One entry a token."""

    content: list[ChosenToken]
    refusal: None


class CallText(Struct, kw_only=True):
    """`arguments` is the JSON text of an object."""

    name: str
    arguments: str


class AnsweredCall(Struct, kw_only=True):
    """A call that the model makes."""

    id: str
    type: Literal["function"]
    function: CallText


class AnswerMessage(Struct, kw_only=True):
    """`content` is null where tools are called and nothing is said."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[AnsweredCall] | UnsetType = UNSET


class ChatChoice(Struct, kw_only=True):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: _FinishReason


class ChatCompletion(Struct, kw_only=True):
    """The answer to POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class CallTextDelta(Struct, kw_only=True):
    """A piece of a call; `name` comes once."""

    arguments: str
    name: str | UnsetType = UNSET


class CallDelta(Struct, kw_only=True):
    """A piece of a call; `id` and `type` come once."""

    index: int
    function: CallTextDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatDelta(Struct, kw_only=True):
    """What an event adds to the answer."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CallDelta] | UnsetType = UNSET


class ChatChunkChoice(Struct, kw_only=True):
    """News of one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: _FinishReason | None


class ChatCompletionChunk(Struct, kw_only=True):
    """One `data:` line of a streamed chat; the last line is `data: [DONE]`."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET


class CompletionLogprobs(Struct, kw_only=True):
    """Lists with one entry a token."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(Struct, kw_only=True):
    """One continuation, or a piece of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: _FinishReason | None


class Completion(Struct, kw_only=True):
    """The answer to POST /v1/completions, and each `data:` line of a streamed one."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class ModelCard(Struct, kw_only=True):
    """A served name of the model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    modalities: list[str]


class ModelList(Struct, kw_only=True):
    """All served names."""

    object: Literal["list"]
    data: list[ModelCard]


class TokenizeAnswer(Struct, kw_only=True):
    """A media item stands as one pad."""

    tokens: list[int]
    count: int
    max_model_len: int


class DetokenizeAnswer(Struct, kw_only=True):
    """The text of the tokens."""

    prompt: str


class EmbeddingUsage(Struct, kw_only=True):
    """Tokens that the item takes in a prompt."""

    prompt_tokens: int
    total_tokens: int


class MediaEmbedding(Struct, kw_only=True):
    """The rows that stand for a media item in a prompt: one for each of `token_ids` in `pad_token_ids`."""

    id: str
    object: Literal["media.embedding"]
    created: int
    model: str
    modality: Literal["image", "video", "audio"]
    content_key: str
    dtype: Literal["float32", "float16", "bfloat16"]
    shape: list[int]
    encoding_format: Literal["float", "base64"]
    embedding: list[list[float | None]] | str
    token_ids: list[int]
    pad_token_ids: list[int]
    media_tokens: int
    audio_tokens: int
    cache_hit: bool
    notes: list[str]
    timings_ms: dict[str, float]
    usage: EmbeddingUsage


class Span(Struct, kw_only=True):
    """A step of a request; `item` is the number of the media item."""

    name: str
    stage: str
    worker: str | None
    item: int | None
    start_ms: float
    duration_ms: float
    running: bool


class TracedMedia(Struct, kw_only=True):
    """What became of a media item; null while it is in work."""

    item: int
    worker: str
    modality: str | None
    cache_hit: bool | None
    tokens: int | None
    duration_ms: float | None
    notes: list[str]


class RequestTrace(Struct, kw_only=True):
    """The timeline of a request."""

    id: str
    object: Literal["request.trace"]
    kind: str
    model: str
    created: int
    state: Literal["running", "finished"]
    status: int | None
    error: str | None
    finish_reasons: list[str | None]
    ttft_ms: float | None
    duration_ms: float | None
    spans: list[Span]
    media: list[TracedMedia]
    usage: Usage


class FleetWorker(Struct, kw_only=True):
    """A worker; `load` is what it reported to a question that was sent `age_s` ago."""

    name: str
    ready: bool
    age_s: float | None
    in_work: int
    in_work_tokens: int
    load: dict[str, float]


class FleetStage(Struct, kw_only=True):
    """The workers of one stage."""

    stage: str
    total: int
    ready: int
    workers: list[FleetWorker]


class Fleet(Struct, kw_only=True):
    """The workers by stage."""

    object: Literal["fleet"]
    ready: bool
    missing: list[str]
    gateway: dict[str, float]
    stages: list[FleetStage]


class Health(Struct, kw_only=True):
    """The process is alive."""

    status: Literal["ok", "starting", "draining"]
    stage: str
    incarnation: str
    uptime_s: float
    load: dict[str, float]


class Readiness(Struct, kw_only=True):
    """`reason` says what is missing."""

    ready: bool
    reason: str | None


class Document(Struct, kw_only=True):
    """An OpenAPI document."""

    openapi: str
    info: dict[str, Any]
    paths: dict[str, Any]
    components: dict[str, Any]
