"""The API's endpoints as one table: routes, handlers and the OpenAPI document come from it.

Gateway process. Says nothing of how an endpoint works; `handler` names a method of `Handlers`, or is empty
for what every stage answers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from msgspec import Struct

from transom.gateway import api_answers as answers
from transom.gateway import api_requests as requests

_BODY_ERRORS = (400, 404, 408, 413, 415, 417, 429, 500, 503)


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """`events` is the type of the lines of a streamed answer; `answer` as a word is a media type."""

    method: str
    route: str
    handler: str = ""
    summary: str
    answer: type[Struct] | str
    body: type[Struct] | None = None
    events: type[Struct] | None = None
    errors: tuple[int, ...] = (500,)
    answer_also: tuple[int, ...] = ()
    open: bool = False

    @property
    def path(self) -> str:
        """The path as the document writes it."""
        return re.sub(r"\{(\w+):[^}]*\}", r"{\1}", self.route)


ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint(
        method="POST",
        route="/v1/chat/completions",
        handler="chat",
        summary="Answer a chat, streamed or whole",
        body=requests.ChatCompletionRequest,
        answer=answers.ChatCompletion,
        events=answers.ChatCompletionChunk,
        errors=(*_BODY_ERRORS, 502, 504),
    ),
    Endpoint(
        method="POST",
        route="/v1/completions",
        handler="completion",
        summary="Continue raw text or token ids",
        body=requests.CompletionRequest,
        answer=answers.Completion,
        events=answers.Completion,
        errors=(*_BODY_ERRORS, 502, 504),
    ),
    Endpoint(
        method="POST",
        route="/v1/media/embeddings",
        handler="media_embeddings",
        summary="Show what the encoder makes of a media item",
        body=requests.MediaEmbeddingRequest,
        answer=answers.MediaEmbedding,
        errors=(*_BODY_ERRORS, 502, 504),
    ),
    Endpoint(
        method="GET",
        route="/v1/models",
        handler="models",
        summary="List the served names of the model",
        answer=answers.ModelList,
        errors=(500, 503),
    ),
    Endpoint(
        method="GET",
        route="/v1/models/{id:.+}",
        handler="model",
        summary="Show one served name",
        answer=answers.ModelCard,
        errors=(404, 500, 503),
    ),
    Endpoint(
        method="POST",
        route="/tokenize",
        handler="tokenize",
        summary="Turn a prompt or a chat into tokens",
        body=requests.TokenizeRequest,
        answer=answers.TokenizeAnswer,
        errors=_BODY_ERRORS,
    ),
    Endpoint(
        method="POST",
        route="/detokenize",
        handler="detokenize",
        summary="Turn tokens into text",
        body=requests.DetokenizeRequest,
        answer=answers.DetokenizeAnswer,
        errors=_BODY_ERRORS,
    ),
    Endpoint(
        method="GET",
        route="/v1/requests/{id}/trace",
        handler="trace",
        summary="Show where the time of a request went",
        answer=answers.RequestTrace,
        errors=(404, 500, 503),
    ),
    Endpoint(
        method="GET",
        route="/v1/fleet",
        handler="fleet",
        summary="Show the workers by stage",
        answer=answers.Fleet,
        errors=(500, 503),
    ),
    Endpoint(
        method="GET",
        route="/openapi.json",
        handler="openapi",
        summary="Describe this API",
        answer=answers.Document,
        errors=(500, 503),
    ),
    Endpoint(
        method="GET",
        route="/health",
        summary="Say that the process lives",
        answer=answers.Health,
        open=True,
    ),
    Endpoint(
        method="GET",
        route="/ready",
        summary="Say whether every stage has a ready worker",
        answer=answers.Readiness,
        answer_also=(503,),
        open=True,
    ),
    Endpoint(
        method="GET",
        route="/metrics",
        summary="Give figures to Prometheus",
        answer="text/plain",
    ),
)
