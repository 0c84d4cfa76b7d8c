"""A checkpoint's chat template, compiled once and rendered in a sandbox (gateway, terminal chat, trainer).

Templates come with the model and are data, not code to trust: no attribute outside the sandbox is reachable.
Knows nothing of token ids.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from transom.errors import CheckpointError, RequestError


class ChatTemplate:
    """Render messages to the prompt text a model was trained on.

    `defaults` are the names that every rendering sees, such as bos_token.
    """

    def __init__(self, source: str, defaults: Mapping[str, Any]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(f"chat template, line {error.lineno}: {error.message}") from error
        self._defaults = dict(defaults)

    @classmethod
    def from_folder(cls, folder: Path, tokenizer_config: Mapping[str, Any]) -> ChatTemplate | None:
        """Take chat_template.jinja, else tokenizer_config's chat_template; None when neither is there."""
        file = folder / "chat_template.jinja"
        source = file.read_text(encoding="utf-8") if file.is_file() else tokenizer_config.get("chat_template")
        if isinstance(source, list):  # named templates; "default" is the one for chat
            source = {entry["name"]: entry["template"] for entry in source}.get("default")
        if source is None:
            return None
        return cls(source, _token_texts(tokenizer_config))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        **extra: Any,
    ) -> str:
        """Return the prompt text. Raise RequestError when the template refuses the messages."""
        names = {**self._defaults, "add_generation_prompt": add_generation_prompt, **extra}
        try:
            return self._template.render(messages=messages, tools=tools, **names)
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise RequestError(
                f"the chat template refuses the messages: {error}", param="messages"
            ) from error


def _token_texts(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Collect bos_token, eos_token ...: a text, or an object whose content is the text."""
    texts = {}
    for key, value in tokenizer_config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            texts[key] = text
    return texts


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja2's own filter escapes <, > and & for HTML, which no model was trained on."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)


class _GenerationTag(Extension):
    """`{% generation %}` marks assistant text for training; rendering only keeps what it encloses."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it as an instance variable

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
