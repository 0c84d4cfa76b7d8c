"""Keeps clients from writing control tokens: tells the template's own tokens from spellings in user text.

User strings are marked before rendering, so that no control token can arise within one, across two, or
between one and the template. The marks are taken out again before the text is tokenised. Pure.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from transom.errors import ContextLengthError, RequestError
from transom.tokenizer import Tokenizer

_PROBE_CHARS_PER_TOKEN = 2
_HOPELESS_CHARS_PER_TOKEN = 8
_CUT_TOKENS = 64  # more than a text has that is cut within a word or a run of blanks that was one token


def refuse_long(
    tokenizer: Tokenizer,
    text: str,
    limit: int,
    used: int = 0,
    *,
    param: str = "messages",
    special: bool = False,
) -> None:
    """Raise ContextLengthError when growing prefixes of a long text have more than `limit - used` tokens.

    `special`: as in Tokenizer.encode, and as it will be encoded: else the spelling of a control token counts
    for several. Never refuses what fits.
    Tokenising is slow enough that a text far beyond the context must not be tokenised whole. The prefixes
    cost a third of the whole at most.
    """
    size = max(limit - used, 1024) * _PROBE_CHARS_PER_TOKEN
    while size < len(text):
        if len(tokenizer.encode(text[:size], special=special)) > limit - used + _CUT_TOKENS:
            raise _too_long(limit, param)
        size *= 4


def refuse_hopeless(tokenizer: Tokenizer, texts: Sequence[str], limit: int) -> None:
    """Raise ContextLengthError for texts nowhere near the context, before they are marked and rendered.

    Regular expressions over tens of megabytes hold the interpreter, and with it all clients, for seconds.
    Most texts that fit pay nothing: few have so many characters a token.
    """
    if sum(map(len, texts)) <= _HOPELESS_CHARS_PER_TOKEN * limit:
        return
    start = "".join(texts)[: _HOPELESS_CHARS_PER_TOKEN * limit]
    # Joined, they may have a few tokens less or more than one by one.
    if len(tokenizer.encode(start, special=False)) > 1.5 * limit:
        raise _too_long(limit)


def _too_long(limit: int, param: str = "messages") -> ContextLengthError:
    return ContextLengthError(f"the prompt's text has more than {limit} tokens, the context", param=param)


class Shield:
    """Built once per tokenizer; thread-safe."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._controls = tokenizer.control_tokens
        self._control_ids = frozenset(self._controls.values())
        spellings = sorted(self._controls, key=len, reverse=True)
        # (?!) never matches: a tokenizer without control tokens needs no shield.
        choice = "|".join(map(re.escape, spellings)) or "(?!)"
        self._split = re.compile(f"({choice})")
        self._starts = re.compile(f"(?=(?:{choice}))(.)", re.DOTALL)
        edges = "".join({text[0] for text in spellings} | {text[-1] for text in spellings})
        self._risky = re.compile(f"[{re.escape(edges)}]") if edges else re.compile("(?!)")
        self._inner = {re.sub(r"^\W+|\W+$", "", text) for text in spellings}

    def open_marks(self) -> Marks:
        """Return the marks of one prompt: unguessable, so that no client can write them."""
        return Marks(self, f"zq{secrets.token_hex(12)}qz")

    def mark(self, text: str, mark: str) -> str:
        """Return `text` such that no control token in the rendered prompt can hold a character of it.

        Text without any edge character of a control token stays as it is, so that templates may compare
        it; white space at the ends stays outside the marks, so that they may trim it.
        """
        if not self._risky.search(text) and text not in self._inner:
            return text
        body = text.strip()
        start = text.index(body) if body else 0
        inside = self._starts.sub(lambda found: found[1] + mark, body)
        return f"{text[:start]}{mark}{inside}{mark}{text[start + len(body) :]}"

    def encode(self, rendered: str, mark: str, limit: int) -> list[int]:
        """Return the ids of a rendered prompt: control tokens of the template, plain text for all else.

        Raise ContextLengthError soon after there are more than `limit`, before all the text is worked on.
        """
        ids: list[int] = []
        for number, piece in enumerate(self._split.split(rendered)):
            if number % 2:
                ids.append(self._controls[piece])
            elif piece:
                text = piece.replace(mark, "")
                refuse_long(self._tokenizer, text, limit, len(ids))
                ids += self.encode_plain(text)
            if len(ids) > limit:
                raise _too_long(limit)
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """Return ids of text in which no spelling of a control token becomes one."""
        ids = self._tokenizer.encode(text, special=self._split.search(text) is None)
        if not self._control_ids.isdisjoint(ids):
            # Unicode normalisation inside the tokenizer made one; no known tokenizer does.
            raise RequestError("the text turns into a control token of the model")
        return ids


class Marks:
    """Marks the user's strings of one prompt."""

    def __init__(self, shield: Shield, mark: str) -> None:
        self._shield = shield
        self.mark = mark

    def deep(self, value: Any) -> Any:
        """Return a copy of JSON data with every string marked, keys included."""
        if isinstance(value, str):
            return self._shield.mark(value, self.mark)
        if isinstance(value, Mapping):
            return {self.deep(key): self.deep(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.deep(item) for item in value]
        return value

    def encode(self, rendered: str, limit: int) -> list[int]:
        """Return the ids of the prompt that was rendered from the marked strings, at most `limit`."""
        return self._shield.encode(rendered, self.mark, limit)
