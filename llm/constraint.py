"""What one request's next token may be, by the grammar of its answer (engine thread).

Lets thinking pass, then follows the grammar token by token. Never raises while it follows: a grammar that
became too dear, or a token that it doesn't allow, ends the request when its next mask is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import numpy as np
import numpy.typing as npt
import torch
from llguidance import LLMatcher

from transom.errors import RequestError
from transom.messages import Grammar

Words = npt.NDArray[np.uint32]
_ALL = np.uint32(0xFFFFFFFF)
_WORD_BITS = 32


class _Phase(Enum):
    START = "start"  # the first token may open the thinking
    THINKING = "thinking"
    ANSWER = "answer"


class Constraint:
    """Belongs to one request. `matcher` is its own; masks have one bit per id, 32 ids a word."""

    def __init__(
        self, grammar: Grammar, matcher: LLMatcher, eos_ids: Sequence[int], *, ignore_eos: bool = False
    ) -> None:
        self._grammar = grammar
        self._matcher = matcher
        self._eos_ids = eos_ids
        self._ignore_eos = ignore_eos
        self._error = ""
        self.complete = False  # the answer has ended as the grammar wants it
        self._phase = _Phase.ANSWER
        if grammar.think_close is not None:
            if grammar.thinking:
                self._phase = _Phase.THINKING
            elif grammar.think_open is not None:
                self._phase = _Phase.START

    def fill(self, words: Words) -> None:
        """Write the mask of the next token; raise RequestError when there is none."""
        if self._phase is _Phase.THINKING:
            words[:] = _ALL
            self._clear_eos(words)
            return
        if not self._error:
            self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            if self._matcher.is_error():
                self._error = f"the answer can't be constrained further: {_first_line(self._matcher)}"
        if self._error:
            raise RequestError(self._error, param=self._grammar.param)
        if self._phase is _Phase.START:
            assert self._grammar.think_open is not None
            _set(words, self._grammar.think_open)
        if self._ignore_eos:
            ends = words.copy()
            self._clear_eos(words)
            if not words.any():  # nothing may follow: then even this request has its end
                words[:] = ends

    def advance(self, token: int) -> None:
        """Take note of a token that was put out."""
        if self._phase is _Phase.START and token == self._grammar.think_open:
            self._phase = _Phase.THINKING
        elif self._phase is _Phase.THINKING:
            if token == self._grammar.think_close:
                self._phase = _Phase.ANSWER
        elif not self._error and not self.complete:
            self._phase = _Phase.ANSWER
            self.complete = token in self._eos_ids and self._matcher.is_accepting()
            if not self._matcher.consume_token(token):
                self._error = f"token {token} does not fit the grammar: {_first_line(self._matcher)}"

    def _clear_eos(self, words: Words) -> None:
        for id in self._eos_ids:
            words[id // _WORD_BITS] &= ~np.uint32(1 << id % _WORD_BITS)


def _set(words: Words, id: int) -> None:
    words[id // _WORD_BITS] |= np.uint32(1 << id % _WORD_BITS)


def _first_line(matcher: LLMatcher) -> str:
    line = matcher.get_error().split("\n", 1)[0].removesuffix("<non-verbose/>").strip()
    return "no token may follow" if line == "NoExtensionBias" else line


def masks(
    constraints: Sequence[Constraint], vocab_size: int, device: torch.device
) -> tuple[torch.Tensor, dict[int, RequestError]]:
    """Return which ids each constraint allows (rows, vocab), and the errors of the rows without a mask."""
    words = np.empty((len(constraints), -(-vocab_size // _WORD_BITS)), dtype=np.uint32)
    errors: dict[int, RequestError] = {}
    for row, constraint in enumerate(constraints):
        try:
            constraint.fill(words[row])
        except RequestError as error:
            errors[row] = error
            words[row] = _ALL
    bits = torch.from_numpy(words.view(np.int32)).to(device)[:, :, None]
    allowed = (bits >> torch.arange(_WORD_BITS, device=device, dtype=torch.int32)) & 1
    return allowed.flatten(1)[:, :vocab_size].bool(), errors
