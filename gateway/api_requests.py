"""What clients may send, as msgspec types: the source of the OpenAPI document and of every bound.

Gateway process. The parser reads names, bounds and defaults of fields from here (`fields.py`); a field that
is not here can't be read. `None` stands for an absent field as for an explicit null.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

MAX_MESSAGES = 10_000
MAX_TOOLS = 1024
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_LOGPROBS = 20
MAX_URL_CHARS = 8192
_MAX_PIXELS = 1 << 26
_MAX_TOKENS = 1 << 31  # beyond every context
_MAX_FRAMES = 3600

Pixels = Annotated[int, Meta(ge=1, le=_MAX_PIXELS)]
FrameCount = Annotated[int, Meta(ge=1, le=_MAX_FRAMES)]
OutputTokens = Annotated[int, Meta(ge=1, le=_MAX_TOKENS)]
TokenId = Annotated[int, Meta(ge=0)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Share = Annotated[float, Meta(ge=0, le=1)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
BiasKey = Annotated[str, Meta(pattern="^[0-9]{1,9}$")]
CallId = Annotated[str, Meta(max_length=512)]
SpeakerName = Annotated[str, Meta(max_length=256)]
ToolName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.\-]{1,128}$")]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
# msgspec's own bounds end at 64 bits with a sign.
Seed = Annotated[int, Meta(extra_json_schema={"minimum": -(1 << 63), "maximum": (1 << 64) - 1})]
Url = Annotated[
    str,
    Meta(
        description=f"`data:` with base64, or `http:`, `https:` of at most {MAX_URL_CHARS} characters;"
        " `file:` where the encoders' `media_folders` allow it"
    ),
]


class ImageUrl(Struct, kw_only=True):
    """A picture and how many pixels of it the model sees."""

    url: Url
    detail: Annotated[Literal["auto", "low", "high"], Meta(description="low: at most 512 x 512")] | None = (
        "auto"
    )
    min_pixels: Pixels | None = None
    max_pixels: Pixels | None = None
    frame_index: Annotated[int, Meta(ge=0, le=1_000_000, description="frame of an animation")] | None = 0


class VideoUrl(Struct, kw_only=True):
    """A video and which of its frames the model sees."""

    url: Url
    min_pixels: Pixels | None = None
    max_pixels: Pixels | None = None
    fps: Annotated[float, Meta(ge=0.001, le=120)] | None = None
    min_frames: FrameCount | None = None
    max_frames: FrameCount | None = None
    use_audio: Annotated[bool, Meta(description="also hear the sound track")] | None = None


class AudioUrl(Struct, kw_only=True):
    """A sound."""

    url: Url


class InputAudio(Struct, kw_only=True):
    """A sound as OpenAI's SDK sends it."""

    data: Annotated[str, Meta(description="base64, or a data: URL")]
    format: Literal["wav", "mp3", "flac", "ogg", "opus", "m4a", "aac", "webm", "pcm16"]


class TextPart(Struct, kw_only=True, tag_field="type", tag="text"):
    """Text among other parts."""

    text: str


class RefusalPart(Struct, kw_only=True, tag_field="type", tag="refusal"):
    """A refusal in an earlier answer."""

    refusal: str


class ImagePart(Struct, kw_only=True, tag_field="type", tag="image_url"):
    """A picture among other parts."""

    image_url: ImageUrl


class VideoPart(Struct, kw_only=True, tag_field="type", tag="video_url"):
    """A video among other parts."""

    video_url: VideoUrl


class AudioPart(Struct, kw_only=True, tag_field="type", tag="audio_url"):
    """A sound among other parts."""

    audio_url: AudioUrl


class InputAudioPart(Struct, kw_only=True, tag_field="type", tag="input_audio"):
    """A sound among other parts, inline."""

    input_audio: InputAudio


_TextParts = Annotated[list[TextPart], Meta(min_length=1, max_length=MAX_MESSAGES)]
_SpokenParts = Annotated[list[TextPart | RefusalPart], Meta(min_length=1, max_length=MAX_MESSAGES)]
_Parts = Annotated[
    list[TextPart | ImagePart | VideoPart | AudioPart | InputAudioPart],
    Meta(min_length=1, max_length=MAX_MESSAGES),
]


class CalledFunction(Struct, kw_only=True):
    """A call in an earlier answer."""

    name: ToolName
    arguments: Annotated[str, Meta(description="the JSON text of an object")]


class ToolCall(Struct, kw_only=True):
    """A call in an earlier answer."""

    function: CalledFunction
    id: CallId | None = ""
    type: Literal["function"] | None = "function"


class SystemMessage(Struct, kw_only=True, tag_field="role", tag="system"):
    """What the operator of a chat says to the model."""

    content: str | _TextParts
    name: SpeakerName | None = None


class DeveloperMessage(Struct, kw_only=True, tag_field="role", tag="developer"):
    """The same by its newer name."""

    content: str | _TextParts
    name: SpeakerName | None = None


class UserMessage(Struct, kw_only=True, tag_field="role", tag="user"):
    """What the person says and shows."""

    content: str | _Parts
    name: SpeakerName | None = None


class AssistantMessage(Struct, kw_only=True, tag_field="role", tag="assistant"):
    """An earlier answer. `content` may be left out where tools were called."""

    content: str | _SpokenParts | None = None
    name: SpeakerName | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=MAX_TOOLS)] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None


class ToolMessage(Struct, kw_only=True, tag_field="role", tag="tool"):
    """What a called tool gave, media included."""

    content: str | _Parts
    tool_call_id: CallId
    name: SpeakerName | None = None


Message = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage
_Messages = Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]


class Function(Struct, kw_only=True):
    """A function that the model may call."""

    name: ToolName
    description: str | None = None
    parameters: Annotated[dict[str, Any], Meta(description="a JSON schema")] | None = None
    strict: Annotated[bool, Meta(description="the arguments match `parameters`")] | None = False


class Tool(Struct, kw_only=True):
    """A tool; all are functions."""

    type: Literal["function"]
    function: Function


_Tools = Annotated[list[Tool], Meta(max_length=MAX_TOOLS)]


class NamedFunction(Struct, kw_only=True):
    """The name of one of `tools`."""

    name: str


class NamedTool(Struct, kw_only=True, tag_field="type", tag="function"):
    """The tool that must be called."""

    function: NamedFunction


class AllowedTool(Struct, kw_only=True):
    """One of those that may be called."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Struct, kw_only=True):
    """Those of `tools` that may be called; `required`: one of them or more must be."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Meta(min_length=1, max_length=MAX_TOOLS)]


class ToolSelection(Struct, kw_only=True, tag_field="type", tag="allowed_tools"):
    """Some of the tools: the model is shown all of them."""

    allowed_tools: AllowedTools


class StreamOptions(Struct, kw_only=True):
    """Only together with `stream`."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class OnlyText(Struct, kw_only=True):
    """The form of an answer that continues a text."""

    type: Literal["text"]


class AnswerSchema(Struct, kw_only=True):
    """What an answer must match."""

    name: Annotated[str, Meta(max_length=256)]
    schema: Annotated[dict[str, Any], Meta(description="a JSON schema; absent: any object")] | None = None
    strict: Annotated[bool, Meta(description="the root must be of type object")] | None = False
    description: str | None = None


class TextFormat(Struct, kw_only=True, tag_field="type", tag="text"):
    """A free answer."""


class JsonObjectFormat(Struct, kw_only=True, tag_field="type", tag="json_object"):
    """An answer that is a JSON object."""


class JsonSchemaFormat(Struct, kw_only=True, tag_field="type", tag="json_schema"):
    """An answer that is JSON of this schema."""

    json_schema: AnswerSchema


class TemplateOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    """What the chat template is told."""

    enable_thinking: bool | None = None


class GenerationFields(Struct, kw_only=True):
    """What chat and plain completions share."""

    model: Annotated[str, Meta(max_length=512, description="a served name; absent: the main one")] | None = (
        None
    )
    max_tokens: OutputTokens | None = None
    max_completion_tokens: Annotated[OutputTokens, Meta(description="the same as max_tokens")] | None = None
    min_tokens: (
        Annotated[int, Meta(ge=0, le=_MAX_TOKENS, description="before so many the answer goes on")] | None
    ) = 0
    temperature: Annotated[float, Meta(ge=0, le=2, description="0 is greedy")] | None = 1.0
    top_p: Share | None = 1.0
    top_k: Annotated[int, Meta(ge=-1, description="-1 and 0: off")] | None = 0
    min_p: Share | None = 0.0
    presence_penalty: Penalty | None = 0.0
    frequency_penalty: Penalty | None = 0.0
    repetition_penalty: Annotated[float, Meta(ge=0.001, le=2)] | None = 1.0
    seed: Seed | None = None
    stop: str | Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] | None = None
    ignore_eos: bool | None = False
    logit_bias: (
        Annotated[dict[BiasKey, Bias | None], Meta(max_length=1024, description="by token id")] | None
    ) = None
    n: Annotated[int, Meta(ge=1, description="choices")] | None = 1
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    modalities: list[Literal["text"]] | None = None
    timeout: Annotated[float, Meta(ge=0.001, description="seconds for this request")] | None = None
    cache_salt: (
        Annotated[str, Meta(max_length=256, description="requests of another salt share no cached prefix")]
        | None
    ) = ""
    priority: Annotated[int, Meta(ge=-1000, le=1000)] | None = 0


class ChatCompletionRequest(GenerationFields, kw_only=True):
    """Body of POST /v1/chat/completions. Fields that are not listed are ignored."""

    messages: _Messages
    response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: _Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | ToolSelection | None = None
    parallel_tool_calls: bool | None = True
    chat_template_kwargs: TemplateOptions | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    add_generation_prompt: bool | None = True


class CompletionRequest(GenerationFields, kw_only=True):
    """Body of POST /v1/completions. Fields that are not listed are ignored."""

    prompt: Annotated[
        str | list[str | TokenId | list[TokenId]],
        Meta(description="text, token ids, or several of either"),
    ]
    response_format: OnlyText | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = False


class TokenizeRequest(Struct, kw_only=True):
    """Body of POST /tokenize: `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: _Messages | None = None
    tools: _Tools | None = None
    chat_template_kwargs: TemplateOptions | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    add_generation_prompt: bool | None = True


class DetokenizeRequest(Struct, kw_only=True):
    """Body of POST /detokenize."""

    tokens: list[TokenId]
    model: str | None = None


class MediaEmbeddingRequest(Struct, kw_only=True):
    """Body of POST /v1/media/embeddings."""

    input: ImagePart | VideoPart | AudioPart | InputAudioPart
    model: Annotated[str, Meta(max_length=512)] | None = None
    encoding_format: (
        Annotated[Literal["float", "base64"], Meta(description="base64: the raw values, little-endian")]
        | None
    ) = "float"
    timeout: Annotated[float, Meta(ge=0.001, description="seconds for this request")] | None = None
