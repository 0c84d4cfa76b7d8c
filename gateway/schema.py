"""What a client's request has become once it is checked: plain frozen data, ready for the pipeline.

Made by the parse modules of the gateway process; knows nothing of JSON, HTTP or workers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transom.media_key import routing_key_of_bytes, routing_key_of_url
from transom.messages import MediaOptions, Modality, Sampling

_DEFAULTS = MediaOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaItem:
    """One picture, video or sound: `url` for what the encoder fetches, else its bytes."""

    modality: Modality
    param: str
    url: str | None = None
    data: bytes | None = field(default=None, repr=False)
    options: MediaOptions = _DEFAULTS

    def routing_key(self) -> str:
        """Return the key that decides which encoder takes the item; O(size) for inline bytes."""
        if self.url is not None:
            return routing_key_of_url(self.url)
        assert self.data is not None
        return routing_key_of_bytes(self.data)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """`forced` without a name: the model must call some tool. `allowed`: no other than these; None: any."""

    forced: bool = False
    name: str | None = None
    allowed: frozenset[str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerSchema:
    """What the answer's JSON must match; `param` is where the client wrote it."""

    schema: dict[str, Any]
    param: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What chat and plain completions share. `sampling.max_tokens` is a default unless `max_tokens_given`."""

    model: str | None
    sampling: Sampling
    max_tokens_given: bool
    n: int = 1
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False  # with each event, not only with the last
    cache_salt: str = ""
    priority: int = 0
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A chat request. `messages` are the dictionaries that the chat template reads.

    `strict_tools` holds the checked parameters of the tools whose calls must match them, by name.
    """

    generation: Generation
    messages: list[dict[str, Any]]
    media: tuple[MediaItem, ...] = ()
    tools: list[dict[str, Any]] = field(default_factory=list)
    tool_choice: ToolChoice = ToolChoice()
    strict_tools: dict[str, AnswerSchema] = field(default_factory=dict)
    answer_schema: AnswerSchema | None = None
    parallel_tool_calls: bool = True
    enable_thinking: bool | None = None  # None: as the template decides
    add_generation_prompt: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """A plain completion: each prompt is text or token ids."""

    generation: Generation
    prompts: tuple[str | tuple[int, ...], ...]
    echo: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the parser refuses by size; all from the configuration and the checkpoint."""

    vocab_size: int
    default_max_tokens: int
    max_choices: int = 8
    max_media_items: int = 64
    max_media_bytes: int = 48 * 1024 * 1024
    max_timeout_s: float = 600.0
