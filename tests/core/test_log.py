"""What the log makes of errors that a stranger on the network can cause."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from aiohttp.http_exceptions import BadHttpMessage

from transom.log import setup_logging


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """The root logger, as it was before when the test is over."""
    found = logging.getLogger()
    handlers, level = found.handlers[:], found.level
    yield found
    found.handlers = handlers
    found.setLevel(level)


@pytest.mark.parametrize("json", [False, True])
def test_what_is_not_http_is_one_line_that_repeats_nothing(
    root: logging.Logger, capsys: pytest.CaptureFixture[str], json: bool
) -> None:
    """A header that can't be read may be the one with the key."""
    setup_logging("gateway", json=json)
    server = logging.getLogger("aiohttp.server")
    bad = BadHttpMessage("Invalid header value char:\n\n  b'Authorization: Bearer secret\\x00'")
    server.error("Error handling request from %s", "127.0.0.1", exc_info=bad)
    server.error("Unhandled exception", exc_info=ValueError("of our own"))
    lines = capsys.readouterr().err.splitlines()
    assert "info" in lines[0]
    assert "127.0.0.1 (not HTTP: BadHttpMessage)" in lines[0]
    assert not any("secret" in line or "Authorization" in line for line in lines)
    assert any("ValueError: of our own" in line for line in lines[1:])


@pytest.mark.parametrize("json", [False, True])
def test_a_text_from_outside_begins_no_record_of_its_own(
    root: logging.Logger, capsys: pytest.CaptureFixture[str], json: bool
) -> None:
    setup_logging("encoder", json=json)
    forged = "12:00:00 error   forged"
    logger = logging.getLogger("transom.encoder")
    for end in ("\n", "\r", "\r\n", "\x0b", "\x0c", "\x1b[2K\x85", "\u2028", "\u2029"):
        logger.info("item (%s) failed: %s", f"a{end}{forged}", f"b{end}{forged}")
        try:
            raise ValueError(f"c{end}{forged}")
        except ValueError:
            logger.exception("decoding failed")
    written = capsys.readouterr().err
    assert written.count(forged) == 24
    assert not any(line.startswith(forged) for line in written.splitlines())
    assert "\x1b" not in written


@pytest.mark.parametrize("json", [False, True])
def test_a_text_from_outside_does_not_turn_the_order_of_a_line(
    root: logging.Logger, capsys: pytest.CaptureFixture[str], json: bool
) -> None:
    setup_logging("encoder", json=json)
    turning = "\u202e\u202d\u2066\u2069\u200f"
    logging.getLogger("transom.encoder").info("refused %s", turning)
    written = capsys.readouterr().err
    assert not set(turning) & set(written)
    assert "\\u202e" in written
