"""State of one request inside an engine, and the commands and events that cross its border.

Commands come from the event loop, events go back to it; in between the engine thread owns the request.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from transom.errors import ErrorInfo
from transom.llm.constraint import Constraint
from transom.llm.pools import HostKV, RequestKV
from transom.llm.sampler import SamplerState
from transom.messages import FinishReason, Sampling, TokenLogprob


@dataclass(frozen=True, slots=True)
class EmbeddingRows:
    """Rows (n, hidden) that stand in for the embeddings of the tokens at `positions` (n,), ascending."""

    positions: torch.Tensor
    rows: torch.Tensor


@dataclass(frozen=True, slots=True)
class ReturnWish:
    """Where the KV of a finished request is wanted back: pages of `page_size` tokens from `begin` on."""

    begin: int
    page_size: int
    to: str


@dataclass(slots=True, eq=False)
class Request:
    """One request. Tokens are numbered over prompt and output; `computed` of them have their KV stored.

    With `hands_off` the engine stops after the first output token and gives the KV away. `host_kv` is the KV
    of a request that is not in the pools: handed over to us, or retracted by us. `media_spans` are runs of
    tokens with an embedding each: start, length, content key ("" when unknown: never cached).
    """

    request_id: str
    sampling: Sampling
    deadline_s: float
    arrived_s: float
    priority: int = 0
    hands_off: bool = False
    prompt_ids: list[int] = field(default_factory=list)
    prompt_complete: bool = False
    output_ids: list[int] = field(default_factory=list)
    embeddings: list[EmbeddingRows] = field(default_factory=list)
    media_spans: list[tuple[int, int, str]] = field(default_factory=list)
    cache_salt: str = ""
    constraint: Constraint | None = None
    cached_tokens: int = 0  # prompt tokens that were never computed for this request
    max_tokens: int = 0  # what the context leaves of sampling.max_tokens; set when the prompt is complete
    computed: int = 0
    flying: int = 0  # tokens that are being computed: they count as computed once their step has landed
    kv: RequestKV | None = None
    host_kv: HostKV | None = None
    sampler: SamplerState | None = None
    admitted_s: float = 0.0
    complete_s: float = 0.0  # when the last piece of a prompt came that grew here
    retractions: int = 0
    wish: ReturnWish | None = None  # of the prefill worker, on a decode worker

    @property
    def known_len(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def ready_len(self) -> int:
        """Tokens that could be computed now. While one is decoded the next one can, if there is to be one."""
        if self.flying and len(self.output_ids) + self.flying >= self.max_tokens:
            return 0
        return self.ready_from(self.computed)

    def ready_from(self, position: int) -> int:
        """Return the tokens that could be computed from `position` on.

        The last known one of a prompt that may grow is kept back: were it the last of all, it would have to
        be computed once more for the first output token.
        """
        return max(self.known_len - position - (not self.prompt_complete), 0)

    @property
    def decoding(self) -> bool:
        return bool(self.output_ids) and self.computed >= len(self.prompt_ids)

    def tokens(self, begin: int, end: int) -> list[int]:
        """Return tokens begin..end of prompt and output."""
        prompt_len = len(self.prompt_ids)
        if begin >= prompt_len:
            return self.output_ids[begin - prompt_len : end - prompt_len]
        if end <= prompt_len:
            return self.prompt_ids[begin:end]
        return self.prompt_ids[begin:] + self.output_ids[: end - prompt_len]


@dataclass(frozen=True, slots=True)
class Start:
    """Take a request: a new one (its prompt may grow later), or one handed over with `host_kv`."""

    request: Request


@dataclass(frozen=True, slots=True)
class Extend:
    """The next tokens of a request's prompt. `rows` belong to the tokens marked in `offsets`.

    `content_key` names the media item that the rows come from.
    """

    request_id: str
    token_ids: list[int]
    offsets: list[int]  # which of token_ids take a row
    rows: torch.Tensor | None
    complete: bool
    content_key: str = ""


@dataclass(frozen=True, slots=True)
class Drop:
    """Forget a request and free what it holds. Unknown ids are fine."""

    request_id: str


@dataclass(frozen=True, slots=True)
class KeepAnswer:
    """Cache what a decode worker generated for a request that was handed to it."""

    request_id: str
    output_ids: list[int]
    host_kv: HostKV


@dataclass(frozen=True, slots=True)
class Hold:
    """Admit nobody while `reason` is not empty."""

    reason: str


Command = Start | Extend | Drop | KeepAnswer | Hold


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One output token. With `finish_reason` the request has left the engine.

    `emit` is False for the token that ended it (an eos or stop token is never shown).
    """

    request_id: str
    index: int
    token_id: int
    emit: bool
    finish_reason: FinishReason | None
    logprob: TokenLogprob | None
    timings_ms: dict[str, float]
    cached_tokens: int  # of the prompt


@dataclass(frozen=True, slots=True)
class StartedEvent:
    """A request that waited with `host_kv` decodes now; its host memory is free again."""

    request_id: str


@dataclass(frozen=True, slots=True)
class PrefilledEvent:
    """The first token is out and the KV has left the pools: the receiver owns `host_kv`."""

    request_id: str
    prompt_ids: list[int]
    first_token: int
    host_kv: HostKV
    return_from: int | None  # from where on the answer's KV is wanted back


@dataclass(frozen=True, slots=True)
class AnswerEvent:
    """A finished request's KV that its prefill worker wants back; follows the last TokenEvent."""

    request_id: str
    wish: ReturnWish
    output_ids: list[int]
    host_kv: HostKV


@dataclass(frozen=True, slots=True)
class FailedEvent:
    """The request has left the engine with an error."""

    request_id: str
    error: ErrorInfo


Event = TokenEvent | StartedEvent | PrefilledEvent | AnswerEvent | FailedEvent
