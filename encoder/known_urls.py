"""What URLs gave when they were last downloaded: a validator to ask their servers with, a digest.

Encoder process. Only digests are kept, never content; an entry tells which embeddings to look for once
the server has said that nothing changed. Pure; knows nothing of HTTP clients or caches.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

from transom.media_key import routing_key_of_url

_MOST = 32_768
_MAX_CHARS = 256
# A date tells versions apart by the second only: it is trusted once the content has rested a while
# (RFC 9110, 8.8.2.2).
_REST_S = 60.0


@dataclass(frozen=True, slots=True)
class Validator:
    """How to ask whether content is still the same, byte for byte. `place` is where redirects ended."""

    place: str  # routing key of that URL
    etag: str | None
    last_modified: str | None

    @classmethod
    def of(cls, url: str, headers: Mapping[str, str]) -> Validator | None:
        """Return the validator that a response from a URL gives, or None when it gives no safe one."""
        if "no-store" in headers.get("Cache-Control", "").lower():
            return None
        etag = headers.get("ETag", "")
        # A weak tag promises the same meaning, not the same bytes.
        is_strong = etag.startswith('"') and etag.endswith('"') and len(etag) >= 2
        is_strong = is_strong and _can_be_sent(etag)
        modified = headers.get("Last-Modified", "")
        dated = modified if _has_rested(modified, headers.get("Date", "")) else None
        if not is_strong and dated is None:
            return None
        return cls(routing_key_of_url(url), etag if is_strong else None, dated)

    def headers(self, url: str) -> dict[str, str]:
        """Return what makes a request to a URL conditional; nothing for another place."""
        if routing_key_of_url(url) != self.place:
            return {}
        if self.etag is not None:
            return {"If-None-Match": self.etag}
        assert self.last_modified is not None
        return {"If-Modified-Since": self.last_modified}


def _can_be_sent(value: str) -> bool:
    """Say whether a header's value is short and plain: bytes that are no text go over no wire of ours."""
    return len(value) <= _MAX_CHARS and value.isascii() and value.isprintable()


def _has_rested(modified: str, date: str) -> bool:
    try:
        age = parsedate_to_datetime(date) - parsedate_to_datetime(modified)
    except (TypeError, ValueError):
        return False
    return _can_be_sent(modified) and age.total_seconds() >= _REST_S


@dataclass(frozen=True, slots=True)
class KnownContent:
    """What a URL gave."""

    digest: str
    validator: Validator


class KnownUrls:
    """The URLs asked for last, each with what it gave."""

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._known: OrderedDict[str, KnownContent] = OrderedDict()

    def get(self, url: str) -> KnownContent | None:
        """Return what a URL gave, or None."""
        key = routing_key_of_url(url)
        found = self._known.get(key)
        if found is not None:
            self._known.move_to_end(key)
        return found

    def remember(self, url: str, digest: str, validator: Validator | None) -> None:
        """Note what a URL gave; without a validator it is forgotten."""
        key = routing_key_of_url(url)
        self._known.pop(key, None)
        if validator is None:
            return
        self._known[key] = KnownContent(digest, validator)
        if len(self._known) > self._most:
            self._known.popitem(last=False)

    def __len__(self) -> int:
        return len(self._known)
