"""From checked messages to the prompt's parts: text ids and the places of media items.

Runs in the gateway process, in a thread when the text is long. Knows nothing of workers; what a media
item expands to is the encoder's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transom.errors import RequestError
from transom.gateway.model_info import ModelInfo
from transom.gateway.reasoning_parser import CLOSE, OPEN
from transom.gateway.schema import ChatRequest, MediaItem, ToolChoice
from transom.gateway.shield import Shield, refuse_hopeless, refuse_long
from transom.messages import MediaPart, TextPart
from transom.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Prompt:
    """`text_tokens` counts the known ids; media items come on top. `forced` opens the answer already."""

    parts: list[TextPart | MediaPart]
    text_tokens: int
    inside_reasoning: bool = False
    reasoning_closed: bool = False  # the template has ended it: the answer starts with the first token
    forced: str = ""


class PromptBuilder:
    """Renders and tokenises for one checkpoint; thread-safe."""

    def __init__(self, tokenizer: Tokenizer, info: ModelInfo, max_context: int) -> None:
        self._tokenizer = tokenizer
        self._info = info
        self._shield = Shield(tokenizer)
        self._max_context = max_context
        self._keeps_beside = self._renders_what_stands_beside_calls()

    def chat(self, request: ChatRequest) -> Prompt:
        """Return the prompt of a chat request."""
        self._check_media(request.media)
        refuse_hopeless(self._tokenizer, self._certain_texts(request.messages), self._max_context)
        marks = self._shield.open_marks()
        kwargs: dict[str, Any] = {}
        if request.enable_thinking is not None:
            kwargs["enable_thinking"] = request.enable_thinking
        rendered = self._tokenizer.render_chat(
            [{**_marked(message, marks.deep), "role": message["role"]} for message in request.messages],
            add_generation_prompt=request.add_generation_prompt,
            tools=marks.deep(request.tools) or None,
            **kwargs,
        )
        forced = forced_prefix(request.tool_choice) if request.add_generation_prompt else ""
        parts = self._parts(marks.encode(rendered + forced, self._max_context), request.media)
        return Prompt(
            parts=parts,
            text_tokens=sum(len(part.token_ids) for part in parts if isinstance(part, TextPart)),
            inside_reasoning=not forced and rendered.rstrip().endswith(OPEN),
            reasoning_closed=rendered.rstrip().endswith(CLOSE),
            forced=forced,
        )

    def completion(self, prompt: str | Sequence[int]) -> Prompt:
        """Return the prompt of a plain completion, which may spell control tokens except media's."""
        if isinstance(prompt, str):
            refuse_long(self._tokenizer, prompt, self._max_context, param="prompt", special=True)
            ids = self._tokenizer.encode(prompt)
        else:
            ids = list(prompt)
        if not ids:
            raise RequestError("the prompt holds no token", param="prompt")
        if not self._info.media_ids.isdisjoint(ids):
            raise RequestError("the prompt holds media tokens; send media through chat", param="prompt")
        return Prompt(parts=[TextPart(ids)], text_tokens=len(ids))

    def _renders_what_stands_beside_calls(self) -> bool:
        """Say whether the content of an answer is part of the prompt also when it called a tool."""
        beside = "zqbesideqz"
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": beside, "tool_calls": [call]},
            {"role": "tool", "content": "b", "tool_call_id": "1"},
            {"role": "user", "content": "c"},
        ]
        try:
            return beside in self._tokenizer.render_chat(messages)
        except RequestError:
            return False

    def _certain_texts(self, messages: Sequence[dict[str, Any]]) -> list[str]:
        """Return texts that the prompt will hold, but for the space around them."""
        return [
            text.strip()
            for message in messages
            if self._keeps_beside or not message.get("tool_calls")
            for text in _texts(message["content"])
        ]

    def _check_media(self, media: Sequence[MediaItem]) -> None:
        known = set(self._info.pads.values())
        for item in media:
            if item.modality not in known:
                raise RequestError(f"{item.param}: this model takes no {item.modality}", param=item.param)

    def _parts(self, ids: list[int], media: Sequence[MediaItem]) -> list[TextPart | MediaPart]:
        """Split at the pads. The markers around a pad go: the encoder sends the whole expansion."""
        if not media and self._info.pads.keys().isdisjoint(ids):
            return [TextPart(ids)] if ids else []
        parts: list[TextPart | MediaPart] = []
        run: list[int] = []
        placed = 0
        position = 0
        while position < len(ids):
            id = ids[position]
            position += 1
            modality = self._info.pads.get(id)
            if modality is None:
                run.append(id)
                continue
            if placed >= len(media) or media[placed].modality != modality:
                raise RequestError("the chat template of this model mixes up media items", param="messages")
            if run and run[-1] in self._info.starts[modality]:
                run.pop()
            if position < len(ids) and ids[position] in self._info.ends[modality]:
                position += 1
            if run:
                parts.append(TextPart(run))
            run = []
            parts.append(MediaPart(placed, modality))
            placed += 1
        if run:
            parts.append(TextPart(run))
        if placed < len(media):
            param = media[placed].param
            raise RequestError(f"{param}: the chat template has no place for this item", param=param)
        return parts


def forced_prefix(choice: ToolChoice) -> str:
    """Return the start of the answer that makes the model call a tool."""
    if not choice.forced:
        return ""
    return f"<tool_call>\n<function={choice.name}>" if choice.name else "<tool_call>\n<function="


def _marked(message: dict[str, Any], mark: Any) -> dict[str, Any]:
    """Mark what the client wrote; the part types are ours and templates compare them."""
    marked = {}
    for key, value in message.items():
        if key == "content" and isinstance(value, list):
            marked[key] = [
                {"type": part["type"], "text": mark(part["text"])} if "text" in part else dict(part)
                for part in value
            ]
        else:
            marked[key] = mark(value)
    return marked


def _texts(content: str | list[dict[str, str]]) -> list[str]:
    """Return the texts of a message's content."""
    return [content] if isinstance(content, str) else [part["text"] for part in content if "text" in part]
