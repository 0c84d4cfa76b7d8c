"""Puts a prompt together in order while its media items arrive in any order (prefill's event loop).

Pure bookkeeping over wire messages: no torch, no sockets, no clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from transom.errors import ProtocolError
from transom.messages import EmbeddingChunk, MediaPart, PromptStats, TensorMeta, TextPart

Frame = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Piece:
    """The next tokens of a prompt. `offsets` says which of them take a row of `frame`, in order.

    `content_key` is that of the media item, "" for text.
    """

    token_ids: list[int]
    offsets: list[int]
    rows: TensorMeta | None
    frame: Frame | None
    content_key: str = ""


@dataclass(slots=True)
class _Item:
    """One media item: chunks that wait for their turn, by number."""

    part: MediaPart
    parked: dict[int, tuple[EmbeddingChunk, Frame]]
    next_index: int = 0
    last_index: int | None = None


class PromptAssembler:
    """A prompt of text and media parts. `add` takes chunks, `take` returns what is next in order."""

    def __init__(self, parts: Sequence[TextPart | MediaPart], audio_pad: int | None) -> None:
        self._parts = list(parts)
        self._cursor = 0
        self._audio_pad = audio_pad
        self._items: dict[int, _Item] = {}
        for part in self._parts:
            if isinstance(part, MediaPart):
                if part.item_index in self._items:
                    raise ProtocolError(f"media item {part.item_index} stands twice in the prompt")
                self._items[part.item_index] = _Item(part, {})
        self._rows: Counter[str] = Counter()
        self.prompt_len = 0  # tokens taken so far

    @property
    def complete(self) -> bool:
        return self._cursor == len(self._parts)

    @property
    def text_len(self) -> int:
        """Tokens that are known from the start."""
        return sum(len(part.token_ids) for part in self._parts if isinstance(part, TextPart))

    def stats(self, cached_tokens: int = 0) -> PromptStats:
        """Return the counts of what was taken. A video's sound counts as audio."""
        return PromptStats(
            prompt_tokens=self.prompt_len,
            cached_tokens=cached_tokens,
            image_tokens=self._rows["image"],
            video_tokens=self._rows["video"],
            audio_tokens=self._rows["audio"],
        )

    def add(self, chunk: EmbeddingChunk, frame: Frame) -> None:
        """Park a chunk. Raise ProtocolError when it does not fit its item or its rows do not fit its pads."""
        item = self._items.get(chunk.item_index)
        if item is None:
            raise ProtocolError(f"the prompt has no media item {chunk.item_index}")
        number = chunk.chunk_index
        ended = item.last_index is not None and (number > item.last_index or chunk.last)
        if number < item.next_index or number in item.parked or ended:
            raise ProtocolError(f"media item {chunk.item_index}: chunk {number} came twice or after the last")
        pads = sum(token in chunk.pad_ids for token in chunk.token_ids)
        shape = chunk.rows.shape
        if len(shape) != 2 or shape[0] != pads:
            raise ProtocolError(
                f"media item {chunk.item_index}: {pads} pads in the prompt, embeddings of shape {list(shape)}"
            )
        if chunk.last:
            item.last_index = number
        item.parked[number] = chunk, frame

    def take(self) -> list[Piece]:
        """Return the pieces that follow what was taken before, as far as they have arrived."""
        pieces: list[Piece] = []
        while not self.complete:
            part = self._parts[self._cursor]
            if isinstance(part, TextPart):
                pieces.append(Piece(part.token_ids, [], None, None))
            else:
                item = self._items[part.item_index]
                while item.next_index in item.parked:
                    pieces.append(self._piece(part, *item.parked.pop(item.next_index)))
                    item.next_index += 1
                if item.last_index is None or item.next_index <= item.last_index:
                    break
            self._cursor += 1
        self.prompt_len += sum(len(piece.token_ids) for piece in pieces)
        return pieces

    def _piece(self, part: MediaPart, chunk: EmbeddingChunk, frame: Frame) -> Piece:
        offsets = [i for i, token in enumerate(chunk.token_ids) if token in chunk.pad_ids]
        sound = sum(chunk.token_ids[i] == self._audio_pad for i in offsets)
        self._rows["audio"] += sound
        self._rows[part.modality] += len(offsets) - sound
        return Piece(chunk.token_ids, offsets, chunk.rows, frame, chunk.content_key)
