"""Keys of the radix tree: a request's tokens as bytes that compare with one memcmp.

Used by the prefill and decode workers. Media placeholders become ids that depend on every bit of the item's
content key and on the position in it. Knows no slot, no page size and no tokenizer.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from transom.errors import RequestError
from transom.media_key import framed_digest

TOKEN_BYTES = 8
_BLOCK_ROWS = 256

Tokens = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Key:
    """The identity of a request's KV: `raw` holds one little-endian int64 a token.

    Two keys of different namespaces never share anything. Build it once a request and extend it with what was
    generated.
    """

    raw: bytes
    namespace: str = ""

    def __len__(self) -> int:
        return len(self.raw) // TOKEN_BYTES

    @property
    def tokens(self) -> Tokens:
        """The ids as a read-only view, media ids negative."""
        return np.frombuffer(self.raw, "<i8")

    def extended(self, token_ids: ArrayLike) -> Key:
        """Return the key with generated tokens appended. Copies: for once a request, not once a token."""
        return Key(self.raw + _token_bytes(token_ids), self.namespace)


def namespace_of(model: str, cache_salt: str = "") -> str:
    """Return the namespace of everything that changes KV without changing tokens, or keeps tenants apart.

    `model` names the weights that compute the KV. LoRA adapters are not served; weights with an adapter
    would be a model of their own here, told apart by a name of their own.
    """
    return framed_digest(model.encode(), cache_salt.encode(), person=b"radix-namespace")


def build_key(
    token_ids: ArrayLike, media_spans: Sequence[tuple[int, int, str]] = (), namespace: str = ""
) -> Key:
    """Return the key of a prompt; each span (start, length, content_key) covers an item's placeholders.

    An item that is split into several spans (video frames between timestamps) repeats its content key, and
    its ids go on from span to span. Raises RequestError for overlapping, empty or outlying spans and empty
    content keys: such a request must run without the cache, as plain placeholders would match other items.
    """
    raw = bytearray(_token_bytes(token_ids))
    length = len(raw) // TOKEN_BYTES
    seen: dict[str, int] = {}
    end_before = 0
    for start, span_len, content_key in sorted(media_spans):
        if start < end_before or span_len < 1 or start + span_len > length:
            raise RequestError(
                f"media span {start}+{span_len} must follow {end_before} and end within {length} tokens"
            )
        if not content_key:
            raise RequestError(f"media span {start}+{span_len} has no content key")
        end_before = start + span_len
        first = seen.get(content_key, 0)
        seen[content_key] = first + span_len
        ids = _media_ids(content_key, first, span_len)
        raw[start * TOKEN_BYTES : end_before * TOKEN_BYTES] = ids.tobytes()
    return Key(bytes(raw), namespace)


def in_blocks(spans: Sequence[tuple[int, int, str]]) -> list[tuple[int, int, str]]:
    """Cut media spans at fixed row numbers of their item, each block with a key of its own.

    The ids of a span cost as much as all of its key up to its end: a video of many frames under one key would
    take quadratic time. Where chunks or runs were cut makes no difference.
    """
    seen: Counter[str] = Counter()
    blocks = []
    for start, span_len, content_key in spans:
        end = start + span_len
        while start < end:
            row = seen[content_key]
            count = min(end - start, _BLOCK_ROWS - row % _BLOCK_ROWS)
            blocks.append((start, count, content_key and f"{content_key}/{row // _BLOCK_ROWS}"))
            seen[content_key] += count
            start += count
    return blocks


def shared_len(first: Key, second: Key) -> int:
    """Return how many leading tokens two keys have in common: what one request computes for the other."""
    if first.namespace != second.namespace:
        return 0
    return common_tokens(first.raw, 0, second.raw, 0, min(len(first), len(second)))


def common_tokens(first: bytes, first_at: int, second: bytes, second_at: int, limit: int) -> int:
    """Return how many of up to `limit` tokens agree from token offsets `first_at` and `second_at` on."""
    if limit <= 0:
        return 0
    differ = np.frombuffer(first, "<i8", limit, first_at * TOKEN_BYTES) != np.frombuffer(
        second, "<i8", limit, second_at * TOKEN_BYTES
    )
    at = int(differ.argmax())
    return at if differ[at] else limit


def _token_bytes(token_ids: ArrayLike) -> bytes:
    tokens = np.ascontiguousarray(token_ids)
    if not tokens.size:
        return b""
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise TypeError(f"token ids must be one row of integers, not {tokens.dtype}{tokens.shape}")
    tokens = tokens.astype("<i8", copy=False)
    lowest = int(tokens.min())
    if lowest < 0:
        raise RequestError(f"token id {lowest} is negative: such ids stand for media")
    return tokens.tobytes()


def _media_ids(content_key: str, first: int, length: int) -> Tokens:
    """Return 63 hashed bits a position, negative so that they lie outside of every vocabulary."""
    stream = hashlib.shake_128(b"transom-media-ids:" + content_key.encode())
    ids = np.frombuffer(stream.digest((first + length) * TOKEN_BYTES), "<i8")[first:]
    return ids | np.int64(-(2**63))
