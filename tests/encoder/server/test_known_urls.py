"""Validators of URLs: what is trusted, what is asked, what is forgotten."""

from __future__ import annotations

import pytest

from transom.encoder.known_urls import KnownUrls, Validator

URL = "https://example.com/a.png"
DATE = "Sun, 29 Nov 2026 12:00:00 GMT"
RESTED = "Sun, 29 Nov 2026 11:59:00 GMT"
FRESH = "Sun, 29 Nov 2026 11:59:30 GMT"


@pytest.mark.parametrize(
    ("headers", "condition"),
    [
        ({"ETag": '"v1"'}, {"If-None-Match": '"v1"'}),
        ({"ETag": '"v1"', "Last-Modified": RESTED, "Date": DATE}, {"If-None-Match": '"v1"'}),
        ({"ETag": 'W/"v1"', "Last-Modified": RESTED, "Date": DATE}, {"If-Modified-Since": RESTED}),
        ({"Last-Modified": RESTED, "Date": DATE}, {"If-Modified-Since": RESTED}),
    ],
)
def test_what_is_trusted_makes_a_request_conditional(
    headers: dict[str, str], condition: dict[str, str]
) -> None:
    validator = Validator.of(URL, headers)
    assert validator is not None
    assert validator.headers(URL) == condition
    assert validator.headers("HTTPS://Example.com:443/a.png#part") == condition  # the same place
    assert validator.headers("https://example.com/b.png") == {}
    assert validator.headers("https://elsewhere.com/a.png") == {}


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"ETag": 'W/"v1"'},
        {"ETag": "v1"},
        {"ETag": '"' + "x" * 300 + '"'},
        {"ETag": '"\udcff"'},  # as the HTTP client gives bytes that are no text
        {"Last-Modified": RESTED + " (\udcff)", "Date": DATE},
        {"ETag": '"v1"', "Cache-Control": "private, No-Store"},
        {"Last-Modified": FRESH, "Date": DATE},  # may have changed twice in that second
        {"Last-Modified": RESTED},
        {"Last-Modified": "yesterday", "Date": DATE},
        {"Last-Modified": RESTED, "Date": "Sun, 29 Nov 2026 12:00:00 -0000"},  # no zone: not comparable
    ],
)
def test_what_is_not_trusted(headers: dict[str, str]) -> None:
    assert Validator.of(URL, headers) is None


def test_the_url_asked_for_longest_ago_is_forgotten() -> None:
    known = KnownUrls(most=2)
    validator = Validator(place="x", etag='"1"', last_modified=None)
    for name in "ab":
        known.remember(f"http://h/{name}", name, validator)
    assert known.get("http://h/a") is not None
    known.remember("http://h/c", "c", validator)
    assert [known.get(f"http://h/{name}") is not None for name in "abc"] == [True, False, True]
    known.remember("http://h/a", "new", None)  # it changed, and says nothing any more
    assert known.get("http://h/a") is None
    assert len(known) == 1
