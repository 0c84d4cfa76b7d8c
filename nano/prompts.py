"""Dialogues to token ids as serving writes them: template, tokenizer, then expansion of the placeholders.

Used by training and evaluation. The expansion itself is the encoder's; here its items are put in place
and the answers are marked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transom.encoder.expand import Expander, MarkerIds
from transom.nano.data.dialogues import Media, Message
from transom.tokenizer import Tokenizer


@dataclass(frozen=True)
class Prompt:
    """`answers` are the (start, end) of what the assistant says, its end token included."""

    ids: list[int]
    media: list[Media]
    answers: list[tuple[int, int]]


class PromptWriter:
    """Writes dialogues for one checkpoint; `expand` gives an item's ids, markers included."""

    def __init__(self, folder: Path, expand: Callable[[Expander, Media], list[int]]) -> None:
        self.tokenizer = Tokenizer.from_folder(folder)
        self.ids = MarkerIds.from_folder(folder, self.tokenizer)
        self._expander = Expander(self.ids, self.tokenizer)
        self._expand = expand
        self._header = self.tokenizer.encode("<|im_start|>assistant\n<think></think>")
        end = self.tokenizer.token_id("<|im_end|>")
        assert end is not None
        self._end = end

    def write(self, messages: Sequence[Message], *, generate: bool = False) -> Prompt:
        """Return the ids of a dialogue; with `generate`, it ends where the assistant speaks next."""
        media = [part["media"] for message in messages for part in _parts(message) if "media" in part]
        text = self.tokenizer.render_chat(messages, add_generation_prompt=generate)
        ids = self._place(self.tokenizer.encode(text), media)
        return Prompt(ids, media, self._answers(ids))

    def _place(self, ids: list[int], media: Sequence[Media]) -> list[int]:
        pads = {self.ids.image_pad, self.ids.video_pad, self.ids.audio_pad}
        items = iter(media)
        placed: list[int] = []
        skip = False
        for token in ids:
            if skip:
                skip = False
            elif token in pads:
                placed.pop()  # the start marker: the expansion brings its own
                placed += self._expand(self._expander, next(items))
                skip = True
            else:
                placed.append(token)
        assert next(items, None) is None
        return placed

    def _answers(self, ids: list[int]) -> list[tuple[int, int]]:
        header, spans, start = self._header, [], 0
        while start + len(header) < len(ids):
            if ids[start] == header[0] and ids[start : start + len(header)] == header:
                begin = start + len(header)
                end = ids.index(self._end, begin) + 1
                spans.append((begin, end))
                start = end
            else:
                start += 1
        return spans


def _parts(message: Message) -> list[dict[str, Any]]:
    content = message["content"]
    return content if isinstance(content, list) else []
