"""Keys of media items: a cheap routing key for placement and a content key for caches.

Only a content key may hit a cache. Hashing is framed (length before every part), so that no two
different lists of parts share a digest by concatenation.
"""

from __future__ import annotations

import hashlib
from urllib.parse import urlsplit, urlunsplit

import msgspec

from transom.messages import MediaOptions, Modality

_OPTIONS_ENCODER = msgspec.msgpack.Encoder(order="deterministic")


def framed_digest(*parts: bytes | memoryview, person: bytes) -> str:
    """Return a 128-bit blake2b digest in hex of the parts, each preceded by its length.

    `person` (at most 16 bytes) separates the uses of the digest from each other.
    """
    digest = hashlib.blake2b(digest_size=16, person=person)
    for part in parts:
        view = memoryview(part).cast("B") if not isinstance(part, bytes) else part
        digest.update(len(view).to_bytes(8, "little"))
        digest.update(view)
    return digest.hexdigest()


def routing_key_of_bytes(data: bytes | memoryview) -> str:
    """Return the routing key of inline media: the digest of all its bytes."""
    return framed_digest(data, person=b"route-data")


def normalise_url(url: str) -> str:
    """Return the URL with lower-case scheme and host, default port and fragment dropped."""
    parts = urlsplit(url)
    host = (parts.hostname or "").rstrip(".").lower()
    if ":" in host:
        host = f"[{host}]"
    default = {"http": 80, "https": 443}.get(parts.scheme.lower())
    port = parts.port
    netloc = host if port is None or port == default else f"{host}:{port}"
    return urlunsplit((parts.scheme.lower(), netloc, parts.path or "/", parts.query, ""))


def routing_key_of_url(url: str) -> str:
    """Return the routing key of media that the encoder will fetch: the digest of the normalised URL."""
    return framed_digest(normalise_url(url).encode(), person=b"route-url")


def bytes_digest(data: bytes | memoryview) -> str:
    """Return the digest of an item's bytes, which stands for them in `content_key_of`."""
    return framed_digest(data, person=b"content-bytes")


def content_key_of(digest: str, modality: Modality, options: MediaOptions, revision: str, dtype: str) -> str:
    """Return the content key of the item whose bytes have a digest; see `content_key`."""
    return framed_digest(
        digest.encode(),
        modality.encode(),
        _OPTIONS_ENCODER.encode(options),
        revision.encode(),
        dtype.encode(),
        person=b"content",
    )


def content_key(
    data: bytes | memoryview, modality: Modality, options: MediaOptions, revision: str, dtype: str
) -> str:
    """Return the key under which an item's embeddings may be cached.

    `revision` names the model and processor (weights and preprocessing settings); every option
    takes part, because the same bytes with another background or frame rate embed differently.
    """
    return content_key_of(bytes_digest(data), modality, options, revision, dtype)
