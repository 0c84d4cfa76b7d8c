"""Keys of media: equal only for equal things."""

from __future__ import annotations

import base64
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transom.media_key import (
    content_key,
    framed_digest,
    normalise_url,
    routing_key_of_bytes,
    routing_key_of_url,
)
from transom.messages import MediaOptions

BASE = MediaOptions()


def key(data: bytes, options: MediaOptions = BASE, modality: str = "image", revision: str = "r") -> str:
    return content_key(data, modality, options, revision, "float32")  # type: ignore[arg-type]


@given(st.lists(st.binary(max_size=12), max_size=5), st.lists(st.binary(max_size=12), max_size=5))
def test_framing_keeps_different_lists_apart(left: list[bytes], right: list[bytes]) -> None:
    same = framed_digest(*left, person=b"t") == framed_digest(*right, person=b"t")
    assert same == (left == right)


@given(st.binary(max_size=64), st.data())
def test_moving_a_boundary_changes_the_digest(data: bytes, draw: st.DataObject) -> None:
    cut = draw.draw(st.integers(0, len(data)))
    assert framed_digest(data[:cut], data[cut:], person=b"t") != framed_digest(data, person=b"t")
    assert framed_digest(data, person=b"t") != framed_digest(data, b"", person=b"t")


def test_uses_of_the_digest_are_kept_apart() -> None:
    assert framed_digest(b"x", person=b"a") != framed_digest(b"x", person=b"b")
    url = "http://a/x"
    assert routing_key_of_bytes(url.encode()) != routing_key_of_url(url)


def test_a_digest_has_128_bits() -> None:
    assert len(bytes.fromhex(key(b"x"))) == 16


def test_views_of_any_item_size_hash_as_their_bytes() -> None:
    data = bytes(range(64))
    assert framed_digest(memoryview(data).cast("I"), person=b"t") == framed_digest(data, person=b"t")
    assert framed_digest(bytearray(data)[:], person=b"t") == framed_digest(data, person=b"t")


def test_every_byte_counts() -> None:
    """Files from one tool share their first kilobytes: a digest of a prefix would mix them up."""
    head = base64.b64encode(b"same header" * 2000)
    keys = {key(head + tail) for tail in (b"", b"a", b"b", b"\0", b"a\0")}
    assert len(keys) == 5
    data = bytes(5000)
    flipped = {key(data[:i] + b"\1" + data[i + 1 :]) for i in range(0, 5000, 100)}
    assert len(flipped | {key(data)}) == 51


OPTIONS = [
    BASE,
    MediaOptions(background=(0, 0, 0)),
    MediaOptions(background=(0, 0, 255)),
    MediaOptions(min_pixels=100),
    MediaOptions(max_pixels=100),
    MediaOptions(fps=1.0),
    MediaOptions(fps=2.0),
    MediaOptions(min_frames=4),
    MediaOptions(max_frames=4),
    MediaOptions(use_audio=True),
    MediaOptions(use_audio=False),
    MediaOptions(frame_index=1),
    MediaOptions(min_pixels=100, max_pixels=100),
]


def test_every_option_takes_part() -> None:
    """Transparent pixels over white and over black are two different pictures."""
    keys = [key(b"same bytes", options) for options in OPTIONS]
    assert len(set(keys)) == len(OPTIONS)
    named = {name for options in OPTIONS for name in MediaOptions.__struct_fields__
             if getattr(options, name) != getattr(BASE, name)}  # fmt: skip
    assert named == set(MediaOptions.__struct_fields__), "an option that no case above changes"


def test_model_modality_and_dtype_take_part() -> None:
    keys = {
        content_key(b"x", modality, BASE, revision, dtype)
        for modality, revision, dtype in itertools.product(
            ("image", "video", "audio"), ("r1", "r2"), ("float32", "bfloat16")
        )
    }
    assert len(keys) == 12


def test_parts_do_not_run_into_each_other() -> None:
    assert content_key(b"x", "image", BASE, "ab", "c") != content_key(b"x", "image", BASE, "a", "bc")


@pytest.mark.parametrize(
    ("url", "normal"),
    [
        ("HTTP://Example.ORG/A?b=C", "http://example.org/A?b=C"),
        ("http://example.org:80/", "http://example.org/"),
        ("https://example.org:443/x", "https://example.org/x"),
        ("https://example.org:80/x", "https://example.org:80/x"),
        ("http://example.org", "http://example.org/"),
        ("http://example.org./x#part", "http://example.org/x"),
        ("http://[::1]:8080/x", "http://[::1]:8080/x"),
    ],
)
def test_spellings_of_a_url_share_a_key(url: str, normal: str) -> None:
    assert normalise_url(url) == normal
    assert routing_key_of_url(url) == routing_key_of_url(normal)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("http://a/x", "http://a/X"),
        ("http://a/x?1", "http://a/x?2"),
        ("http://a/x", "https://a/x"),
        ("http://a/x", "http://b/x"),
        ("http://a/x", "http://a:81/x"),
        ("http://a/x/", "http://a/x"),
    ],
)
def test_different_urls_have_different_keys(left: str, right: str) -> None:
    assert routing_key_of_url(left) != routing_key_of_url(right)
