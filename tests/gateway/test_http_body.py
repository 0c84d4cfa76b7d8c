"""Bodies that come compressed: what is read, what is refused in which words, how large they may get."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import zlib
from collections.abc import AsyncIterator

import aiohttp
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.gateway.gateway_process import gateway_process
from transom.errors import RequestError
from transom.gateway.http_body import inflate
from transom.tokenizer import Tokenizer

BODY = json.dumps({"prompt": "héllo " * 50}).encode()


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


async def pieces(data: bytes, cuts: list[int]) -> AsyncIterator[bytes]:
    marks = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    for start, end in itertools.pairwise(marks):
        yield data[start:end]


async def inflated(data: bytes, encoding: str, cuts: list[int]) -> bytes:
    return b"".join([out async for out in inflate(pieces(data, cuts), encoding)])


@settings(max_examples=60, deadline=None)
@example(data=bytes(3_000_000), cuts=[], way="gzip")
@given(
    data=st.binary(min_size=1, max_size=5000),
    cuts=st.lists(st.integers(0, 10_000), max_size=6),
    way=st.sampled_from(["gzip", "parts", "zlib", "raw"]),
)
def test_what_was_compressed_comes_back_however_it_is_cut(data: bytes, cuts: list[int], way: str) -> None:
    packed, encoding = {
        "gzip": (gzip.compress(data), "gzip"),
        "parts": (gzip.compress(data) + gzip.compress(data), "gzip"),
        "zlib": (zlib.compress(data), "deflate"),
        "raw": (raw_deflate(data), "deflate"),
    }[way]
    found = asyncio.run(inflated(packed, encoding, cuts))
    assert found == (data * 2 if way == "parts" else data)


@settings(max_examples=60, deadline=None)
@given(
    data=st.binary(min_size=50, max_size=2000),
    share=st.floats(0, 0.999),
    way=st.sampled_from(["gzip", "deflate"]),
)
def test_a_part_of_it_is_said_to_be_cut_off(data: bytes, share: float, way: str) -> None:
    packed = gzip.compress(data) if way == "gzip" else zlib.compress(data)
    with pytest.raises(RequestError, match=f"cut off: its {way} data has no end"):
        asyncio.run(inflated(packed[: int(len(packed) * share)], way, []))


async def test_a_gateway_says_what_it_reads(tokenizer: Tokenizer) -> None:
    good = gzip.compress(BODY)
    async with gateway_process(tokenizer, "--max-body-mb", "1") as fleet, aiohttp.ClientSession() as http:

        async def send(data: bytes, encoding: str) -> tuple[int, dict[str, str], str]:
            headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
            async with http.post(f"{fleet.url}/tokenize", data=data, headers=headers) as response:
                assert response.content_type == "application/json"
                body = await response.json()
                return response.status, body.get("error", {}), response.headers.get("Accept-Encoding", "")

        for data, encoding in (
            (BODY, "identity"),
            (good, "gzip"),
            (good, "X-GZip"),
            (zlib.compress(BODY), "deflate"),
            (raw_deflate(BODY), "deflate"),
        ):
            assert (await send(data, encoding))[0] == 200
        for encoding in ("br", "zstd", "gzip, gzip", "x" * 500):
            status, error, accepted = await send(good, encoding)
            assert (status, error["code"], accepted) == (415, "unsupported_media_type", "gzip, deflate")
            assert "send one of gzip, deflate, or none" in error["message"]
            assert len(error["message"]) < 150
        for data, encoding, words in (
            (good[:-4], "gzip", "cut off: its gzip data has no end"),
            (good[:30], "gzip", "cut off"),
            (b"", "gzip", "cut off"),
            (b"junkjunk", "gzip", "not gzip data"),
            (good + b"more", "gzip", "not gzip data"),
            (zlib.compress(BODY) + b"more", "deflate", "goes on after the end"),
        ):
            status, error, _ = await send(data, encoding)
            assert (status, error["code"]) == (400, "invalid_request")
            assert words in error["message"]
        status, error, _ = await send(gzip.compress(bytes(30_000_000)), "gzip")
        assert (status, error["code"]) == (413, "payload_too_large")
        assert (await send(good, "gzip"))[0] == 200
