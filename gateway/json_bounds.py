"""How many values JSON texts would become, counted before they are parsed.

Pure; gateway process. Two bytes of JSON can become an object of two hundred, and while millions are made
nothing else of the process runs. Counting runs in numpy, by pieces: other threads go on meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from transom.errors import RequestError

# What is parsed at these bounds takes some hundred MB and a sixth of a second.
MAX_OBJECTS = 300_000  # arrays, objects and their fields
MAX_VALUES = 3_000_000
_PIECE_BYTES = 256 * 1024
_SMALL_BYTES = 4096  # where numpy costs more than it saves; signs in texts count too
_QUOTE, _BACKSLASH, _COMMA, _COLON, _ARRAY, _OBJECT = b'"\\,:[{'

_Bytes = NDArray[np.uint8]
_Flags = NDArray[np.bool_]


@dataclass(slots=True)
class JsonBudget:
    """What the JSON texts of one kind in a request come to, all together; `what` names them in errors."""

    what: str
    param: str | None = None
    objects: int = 0
    commas: int = 0

    def take(self, text: bytes | bytearray) -> None:
        """Count the values of a text that need not be valid; raise RequestError when it is too much.

        By the signs that come with each value, outside of strings. Up to the first fault of the text, where
        a parser stops, they are told right.
        """
        if len(text) <= _SMALL_BYTES:
            self.objects += sum(map(text.count, (b"[", b"{", b":")))
            self.commas += text.count(b",")
        else:
            objects, commas = count_outside_strings(np.frombuffer(text, np.uint8))
            self.objects += objects
            self.commas += commas
        if self.objects > MAX_OBJECTS:
            raise RequestError(
                f"{self.what} {self.objects} opening brackets and names of fields, at most {MAX_OBJECTS} are"
                " allowed",
                param=self.param,
            )
        if self.commas > MAX_VALUES:
            raise RequestError(
                f"{self.what} {self.commas} commas outside of strings, at most {MAX_VALUES} are allowed",
                param=self.param,
            )


def count_outside_strings(text: _Bytes, piece_bytes: int = _PIECE_BYTES) -> tuple[int, int]:
    """Return the number of opening brackets and colons, and that of commas, that no string holds."""
    objects = commas = 0
    inside = escaped = False  # whether the piece begins in a string; with what a backslash has escaped
    for at in range(0, len(text), piece_bytes):
        piece = text[at : at + piece_bytes]
        quotes = piece == _QUOTE
        escaped = _drop_escaped(quotes, np.flatnonzero(piece == _BACKSLASH), starts_escaped=escaped)
        if quotes.any():
            within: _Flags = np.bitwise_xor.accumulate(quotes) ^ inside
            outside = ~within
            objects += _count((piece == _ARRAY) | (piece == _OBJECT) | (piece == _COLON), outside)
            commas += _count(piece == _COMMA, outside)
            inside = bool(within[-1])
        elif not inside:
            for sign in (_ARRAY, _OBJECT, _COLON):
                objects += int(np.count_nonzero(piece == sign))
            commas += int(np.count_nonzero(piece == _COMMA))
    return objects, commas


def _count(signs: _Flags, where: _Flags) -> int:
    return int(np.count_nonzero(signs & where))


def _drop_escaped(quotes: _Flags, backslashes: NDArray[np.intp], *, starts_escaped: bool) -> bool:
    """Clear the flags of quotes behind an odd number of backslashes; say whether the next piece has one."""
    if not len(backslashes):
        quotes[0] &= not starts_escaped
        return False
    first = np.flatnonzero(np.diff(backslashes, prepend=-2) != 1)  # of each run of them
    lengths = np.diff(first, append=len(backslashes))
    behind = backslashes[first] + lengths
    if starts_escaped:
        if backslashes[0] == 0:
            lengths[0] += 1
        else:
            quotes[0] = False
    behind = behind[lengths % 2 == 1]
    if len(behind) and behind[-1] == len(quotes):
        quotes[behind[:-1]] = False
        return True
    quotes[behind] = False
    return False
