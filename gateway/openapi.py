"""The OpenAPI 3.1 document of a gateway: the table of endpoints, the msgspec types and this gateway's limits.

Gateway process; pure. Nothing is described here that isn't defined elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

import msgspec

from transom import __version__
from transom.gateway.api_answers import ErrorBody
from transom.gateway.endpoints import ENDPOINTS, Endpoint
from transom.gateway.parse_generation import UNSUPPORTED
from transom.gateway.quota import LIMIT_HEADERS
from transom.gateway.schema import Limits

_REF = "#/components/schemas/{name}"
_GENERATING = ("ChatCompletionRequest", "CompletionRequest")
_BOUNDED = (*_GENERATING, "MediaEmbeddingRequest")
_RETRIED = (429, 503)


def document(limits: Limits, *, max_body_bytes: int, keys: bool) -> dict[str, Any]:
    """Return the document; `keys` says whether API keys are asked for."""
    types = [ErrorBody, *_types()]
    _, schemas = msgspec.json.schema_components(types, ref_template=_REF)
    for name in _BOUNDED:
        _limit(schemas[name]["properties"], limits)
    for name in _GENERATING:
        schemas[name]["properties"] |= {field: _refused(field) for field in UNSUPPORTED}
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in ENDPOINTS:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint, keys)
    components: dict[str, Any] = {"schemas": schemas}
    if keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "transom",
            "version": __version__,
            "description": f"OpenAI-style API. Bodies are JSON of at most {max_body_bytes} bytes;"
            f" at most {limits.max_media_items} media items in one request.",
        },
        "paths": paths,
        "components": components,
    }


def _types() -> Iterable[type[msgspec.Struct]]:
    for endpoint in ENDPOINTS:
        for kind in (endpoint.body, endpoint.answer, endpoint.events):
            if isinstance(kind, type):
                yield kind


def _limit(properties: dict[str, Any], limits: Limits) -> None:
    """Add the bounds that are this gateway's settings or its model's."""
    bounds = {"n": limits.max_choices, "top_k": limits.vocab_size, "timeout": limits.max_timeout_s}
    for name in bounds.keys() & properties.keys():
        _first(properties[name])["maximum"] = bounds[name]
    if "stop_token_ids" in properties:
        _first(properties["stop_token_ids"])["items"]["maximum"] = limits.vocab_size - 1


def _first(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the alternative that is not null."""
    found: dict[str, Any] = next(one for one in schema["anyOf"] if one.get("type") != "null")
    return found


def _refused(field: str) -> dict[str, Any]:
    return {
        "description": "Not supported: taken only where it asks for nothing.",
        "enum": [None, *UNSUPPORTED[field]],
    }


def _ref(kind: type[msgspec.Struct]) -> dict[str, Any]:
    return {"$ref": _REF.format(name=kind.__name__)}


def _operation(endpoint: Endpoint, keys: bool) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": endpoint.handler or endpoint.path.strip("/"),
        "summary": endpoint.summary,
        "responses": _responses(endpoint, keys),
    }
    names = re.findall(r"\{(\w+)\}", endpoint.path)
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for name in names
        ]
    if endpoint.body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": _ref(endpoint.body)}},
        }
    if keys and not endpoint.open:
        operation["security"] = [{"key": []}]
    return operation


def _responses(endpoint: Endpoint, keys: bool) -> dict[str, Any]:
    content: dict[str, Any]
    if isinstance(endpoint.answer, str):
        content = {endpoint.answer: {"schema": {"type": "string"}}}
    else:
        content = {"application/json": {"schema": _ref(endpoint.answer)}}
    if endpoint.events is not None:
        lines = (
            f"Lines of `data: ` with a {endpoint.events.__name__} or an ErrorBody each, then `data: [DONE]`."
        )
        content["text/event-stream"] = {"schema": {"type": "string", "description": lines}}
    responses: dict[str, Any] = {
        str(status): {"description": HTTPStatus(status).phrase, "content": content}
        for status in (200, *endpoint.answer_also)
    }
    if endpoint.body is not None:
        responses["200"]["headers"] = {
            name: {"description": "where the API key has limits", "schema": {"type": "string"}}
            for name in LIMIT_HEADERS
        }
    statuses = endpoint.errors if endpoint.open or not keys else (*endpoint.errors, 401)
    for status in sorted(statuses):
        responses[str(status)] = _error(status)
    return responses


def _error(status: int) -> dict[str, Any]:
    error: dict[str, Any] = {
        "description": HTTPStatus(status).phrase,
        "content": {"application/json": {"schema": _ref(ErrorBody)}},
    }
    if status in _RETRIED:
        error["headers"] = {
            "Retry-After": {
                "description": "seconds after which to come back",
                "schema": {"type": "integer", "minimum": 1},
            }
        }
    return error
