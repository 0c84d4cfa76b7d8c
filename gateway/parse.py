"""Request bodies become checked requests, or a RequestError that names the field at fault.

Pure; runs in the gateway process, in a thread when the body is large. Knows nothing of HTTP.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

import msgspec
import orjson

from transom.errors import RequestError
from transom.gateway import api_requests as api
from transom.gateway.fields import Fields, NestingError, load_json, nests_deeper, refuse, show
from transom.gateway.http_body import Body
from transom.gateway.json_bounds import JsonBudget
from transom.gateway.json_schema import check_schema
from transom.gateway.media import MEDIA_PARTS, parse_media_part
from transom.gateway.parse_generation import chat_logprobs, completion_logprobs, parse_generation
from transom.gateway.reasoning_parser import split_reasoning
from transom.gateway.schema import (
    AnswerSchema,
    ChatRequest,
    CompletionRequest,
    Limits,
    MediaItem,
    ToolChoice,
)

_ROLES = ("system", "developer", "user", "assistant", "tool")
_MAX_DEPTH = 64
_MAX_BODY_DEPTH = 1000  # beyond it no field is named
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,128}")


def load_body(body: Body, spec: type[msgspec.Struct]) -> Fields:
    """Return the JSON object of a body, a `spec`; refuse NaN, lone surrogates and deep nesting."""
    JsonBudget("the body has").take(body)
    too_deep = f"nests deeper than {_MAX_DEPTH} levels"
    try:
        value = load_json(body, _MAX_BODY_DEPTH)
    except NestingError:
        raise RequestError(f"the body {too_deep}") from None
    except orjson.JSONDecodeError as error:
        raise RequestError(_no_json(body, error)) from None
    fields = Fields(value, spec=spec)
    for name, item in value.items():
        if nests_deeper(item, _MAX_DEPTH - 1):
            raise fields.refuse(name[:200], too_deep)
    return fields


def _no_json(body: Body, error: orjson.JSONDecodeError) -> str:
    if not body:
        return "the body is empty, a JSON object is needed"
    try:
        body.decode()
    except UnicodeDecodeError as wrong:  # the parser calls it surrogates and names no place
        return f"the body is not valid JSON: not UTF-8 (byte {wrong.start})"
    return f"the body is not valid JSON: {error.msg} (byte {error.pos})"


def parse_chat(body: Body, limits: Limits) -> ChatRequest:
    """Check the body of POST /v1/chat/completions."""
    fields = load_body(body, api.ChatCompletionRequest)
    generation = parse_generation(
        fields, limits, default_max_tokens=limits.default_max_tokens, top_logprobs=chat_logprobs(fields)
    )
    messages, media = parse_messages(fields, limits)
    tools = parse_tools(fields)
    choice = _tool_choice(fields, tools)
    answer_schema = _answer_schema(fields)
    return ChatRequest(
        generation=generation,
        messages=messages,
        media=media,
        tools=tools if choice is not None else [],
        tool_choice=choice or ToolChoice(),
        strict_tools=_strict_tools(fields) if choice is not None else {},
        answer_schema=answer_schema,
        parallel_tool_calls=fields.flag("parallel_tool_calls"),
        enable_thinking=False if choice is not None and choice.forced else parse_thinking(fields),
        add_generation_prompt=fields.flag("add_generation_prompt"),
    )


def parse_thinking(fields: Fields) -> bool | None:
    """Return whether the client wants the model to think first; None when it says nothing."""
    kwargs = fields.object("chat_template_kwargs")
    wanted: bool | None = None
    if kwargs is not None:
        for name in kwargs.raw:
            if name != "enable_thinking":
                raise refuse(kwargs.at(name)[:200], "this field is not supported, only enable_thinking is")
        wanted = kwargs.flag("enable_thinking")
    effort = fields.text("reasoning_effort")
    if wanted is None and effort is not None:
        wanted = effort != "none"
    return wanted


def parse_messages(fields: Fields, limits: Limits) -> tuple[list[dict[str, Any]], tuple[MediaItem, ...]]:
    """Return the messages for the chat template and their media items, in order of appearance."""
    media: list[MediaItem] = []
    if not fields.has("messages"):
        raise refuse("messages", "a required array is missing")
    arguments = JsonBudget("the arguments of all tool calls have", "messages")
    found = [_message(message, media, arguments, limits) for message in fields.objects("messages")]
    return found, tuple(media)


def _message(
    message: Fields, media: list[MediaItem], arguments: JsonBudget, limits: Limits
) -> dict[str, Any]:
    role = message.text("role", required=True)
    if role not in _ROLES:
        raise message.refuse("role", f"{show(role)} is not one of {', '.join(sorted(_ROLES))}")
    for name in ("function_call", "audio"):
        if message.has(name):
            raise message.refuse(name, "this field is not supported")
    content = _content(message, role, media, limits)
    # OpenAI's newer name for the same thing; checkpoints' templates know the older one.
    shown = "system" if role == "developer" else role
    result: dict[str, Any] = {"role": shown, "content": content}
    name = message.text("name")
    if name is not None:
        result["name"] = name
    if role == "assistant":
        _assistant(message, result, arguments)
    elif role == "tool":
        result["tool_call_id"] = message.text("tool_call_id", required=True)
    return result


def _assistant(message: Fields, result: dict[str, Any], arguments: JsonBudget) -> None:
    calls = [_tool_call(call, arguments) for call in message.objects("tool_calls")]
    if calls:
        result["tool_calls"] = calls
    reasoning = message.text("reasoning_content", message.text("reasoning"))
    if isinstance(result["content"], str) and reasoning is None:
        # Clients that don't know reasoning_content send the whole text back.
        reasoning, result["content"] = split_reasoning(result["content"])
    if reasoning:
        result["reasoning_content"] = reasoning
    refusal = message.text("refusal")
    if result["content"] is None:
        if refusal is not None:
            result["content"] = refusal
        elif not calls:
            raise message.refuse("content", "required unless tool_calls are given")
        else:
            result["content"] = ""


def _content(
    message: Fields, role: str, media: list[MediaItem], limits: Limits
) -> str | list[dict[str, str]] | None:
    content = message.raw.get("content")
    if isinstance(content, str):
        return content
    if content is None:
        if role != "assistant":
            raise message.refuse("content", "a required string or array is missing")
        return None
    if not isinstance(content, list):
        raise message.refuse("content", f"expected a string or an array of parts, got {show(content)}")
    parts: list[dict[str, str]] = []
    for part in message.objects("content"):
        kind = part.text("type", required=True)
        if kind == "text" or (kind == "refusal" and role == "assistant"):
            parts.append({"type": "text", "text": part.text(kind, required=True)})
        elif kind in MEDIA_PARTS:
            if role not in ("user", "tool"):
                raise part.refuse("type", f"{kind} is not allowed in a message of role {role}")
            if len(media) >= limits.max_media_items:
                most = limits.max_media_items
                raise part.refuse(
                    "type", f"media item {len(media) + 1} of the request, at most {most} are allowed"
                )
            item = parse_media_part(part, kind, limits)
            media.append(item)
            parts.append({"type": item.modality})
        else:
            allowed = ", ".join(("text", *MEDIA_PARTS))
            raise part.refuse("type", f"{show(kind)} is not one of {allowed}")
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts) if len(parts) > 1 else parts[0]["text"]
    return parts


def _tool_call(call: Fields, budget: JsonBudget) -> dict[str, Any]:
    call.text("type")
    function = call.object("function", required=True)
    assert function is not None
    name = _tool_name(function)
    text: str = function.text("arguments", required=True)
    budget.take(text.encode())
    try:
        arguments = load_json(text, _MAX_DEPTH) if text.strip() else {}
    except NestingError:
        raise function.refuse("arguments", f"the JSON text nests deeper than {_MAX_DEPTH} levels") from None
    except orjson.JSONDecodeError:
        arguments = None
    if not isinstance(arguments, dict):
        raise function.refuse("arguments", "not the JSON text of an object")
    return {
        "id": call.text("id"),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _tool_name(function: Fields) -> str:
    name: str = function.text("name", required=True)
    if not _TOOL_NAME.fullmatch(name):
        raise function.refuse("name", f"{show(name)} must be 1 to 128 letters, digits, '_', '-' or '.'")
    return name


def parse_tools(fields: Fields) -> list[dict[str, Any]]:
    """Return the tools as the chat template shows them: only the fields that OpenAI defines."""
    tools: list[dict[str, Any]] = []
    for tool in fields.objects("tools"):
        tool.text("type", required=True)
        function = tool.object("function", required=True)
        assert function is not None
        function.flag("strict")  # right or wrong whether or not it matters here
        shown: dict[str, Any] = {"name": _tool_name(function)}
        if function.has("description"):
            shown["description"] = function.text("description")
        parameters = function.object("parameters")
        if parameters is not None:
            shown["parameters"] = parameters.raw
        if any(shown["name"] == other["function"]["name"] for other in tools):
            raise function.refuse("name", f"{show(shown['name'])} is the name of an earlier tool already")
        tools.append({"type": "function", "function": shown})
    return tools


def _strict_tools(fields: Fields) -> dict[str, AnswerSchema]:
    """Return the parameters, checked, of the tools that are `strict`. The tools have been read before."""
    found = {}
    for tool in fields.objects("tools"):
        function = tool.object("function", required=True)
        assert function is not None
        if function.flag("strict"):
            parameters = function.raw.get("parameters") or {"type": "object", "properties": {}}
            at = function.at("parameters")
            schema = check_schema(parameters, at)
            if schema.get("type") != "object":
                raise refuse(f"{at}.type", f"{show(schema.get('type'))}: parameters are of type object")
            found[function.raw["name"]] = AnswerSchema(schema=schema, param=at)
    return found


def _answer_schema(fields: Fields) -> AnswerSchema | None:
    """Return what `response_format` asks of the answer; None for free text."""
    form = fields.object("response_format")
    if form is None:
        return None
    kind = form.text("type", required=True)
    if kind == "text":
        return None
    if kind not in ("json_object", "json_schema"):
        raise form.refuse("type", f"{show(kind)} is not one of json_object, json_schema, text")
    if kind == "json_object":
        return AnswerSchema(schema={"type": "object"}, param=form.at("type"))
    given = form.object("json_schema", required=True)
    assert given is not None
    given.text("name", required=True)
    given.text("description")
    strict = given.flag("strict")
    if not given.has("schema"):
        return AnswerSchema(schema={"type": "object"}, param=given.path)
    at = given.at("schema")
    schema = check_schema(given.raw["schema"], at)
    if strict and schema.get("type") != "object":
        raise refuse(
            f"{at}.type", f"{show(schema.get('type'))}: the root of a strict schema is of type object"
        )
    return AnswerSchema(schema=schema, param=at)


def _tool_choice(fields: Fields, tools: list[dict[str, Any]]) -> ToolChoice | None:
    """Return None when no tool may be called."""
    choice = fields.raw.get("tool_choice")
    if choice is None or choice == "auto":
        return ToolChoice() if tools else None
    if choice == "none":
        return None
    if not tools:
        raise refuse("tool_choice", "no tools are given")
    if choice == "required":
        return ToolChoice(forced=True)
    if isinstance(choice, str):
        raise refuse("tool_choice", f"{show(choice)} is not one of none, auto, required or an object")
    names = {tool["function"]["name"] for tool in tools}
    kind = Fields(choice, "tool_choice", api.NamedTool).text("type", required=True)
    if kind == "function":
        return ToolChoice(forced=True, name=_known_tool(Fields(choice, "tool_choice", api.NamedTool), names))
    if kind != "allowed_tools":
        raise refuse("tool_choice.type", f"{show(kind)} is not one of allowed_tools, function")
    given = Fields(choice, "tool_choice", api.ToolSelection).object("allowed_tools", required=True)
    assert given is not None
    forced = given.text("mode", required=True) == "required"
    given.array("tools", required=True)
    allowed = set()
    for tool in given.objects("tools"):
        tool.text("type", required=True)
        allowed.add(_known_tool(tool, names))
    return ToolChoice(forced=forced, allowed=frozenset(allowed))


def _known_tool(tool: Fields, names: Collection[str]) -> str:
    """Return which of the given tools a choice names."""
    function = tool.object("function", required=True)
    assert function is not None
    name: str = function.text("name", required=True)
    if name not in names:
        raise function.refuse("name", f"{show(name)} is not the name of a given tool")
    return name


def parse_completion(body: Body, limits: Limits) -> CompletionRequest:
    """Check the body of POST /v1/completions."""
    fields = load_body(body, api.CompletionRequest)
    form = fields.object("response_format")
    if form is not None:
        form.text("type", required=True)
    generation = parse_generation(
        fields, limits, default_max_tokens=16, top_logprobs=completion_logprobs(fields)
    )
    echo = fields.flag("echo")
    if echo and generation.sampling.top_logprobs is not None:
        raise fields.refuse("echo", "not supported together with logprobs")
    prompts = _prompts(fields, limits)
    if len(prompts) * generation.n > limits.max_choices:
        raise fields.refuse(
            "prompt", f"{len(prompts)} prompts with n {generation.n}, at most {limits.max_choices} choices"
        )
    return CompletionRequest(generation=generation, prompts=prompts, echo=echo)


def _prompts(fields: Fields, limits: Limits) -> tuple[str | tuple[int, ...], ...]:
    prompt = fields.raw.get("prompt")
    if prompt is None:
        raise refuse("prompt", "a required string or array is missing")
    if isinstance(prompt, str):
        prompt = [prompt]
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        return (token_ids(prompt, "prompt", limits),)
    if not isinstance(prompt, list) or not prompt:
        raise refuse("prompt", "expected a string, an array of strings, token ids or arrays of token ids")
    found: list[str | tuple[int, ...]] = []
    for number, item in enumerate(prompt):
        path = f"prompt[{number}]"
        if not item or not isinstance(item, (str, list)):
            raise refuse(path, "expected a string or an array of token ids, not empty")
        found.append(item if isinstance(item, str) else token_ids(item, path, limits))
    return tuple(found)


def token_ids(given: list[Any], path: str, limits: Limits) -> tuple[int, ...]:
    """Check a client's list of token ids."""
    for number, item in enumerate(given):
        if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < limits.vocab_size:
            raise refuse(f"{path}[{number}]", f"{show(item)} is no token id, 0 to {limits.vocab_size - 1}")
    return tuple(given)
