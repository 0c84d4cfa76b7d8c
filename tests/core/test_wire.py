"""The shape of all messages against the protocol version: neither changes without a thought of the other."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import msgspec
import pytest

from transom import messages
from transom.errors import ProtocolError

# Of the version and its messages. Whoever changes a message decides by the rule at PROTOCOL_VERSION whether
# a process of the version before would go wrong with it, raises the version if so, and puts the digest here.
VERSION, DIGEST = 3, "907c6fa7a59ac79c"


def without_words(schema: Any) -> Any:
    """Drop docstrings; what remains is what travels."""
    if isinstance(schema, dict):
        return {key: without_words(value) for key, value in schema.items() if key != "description"}
    return [without_words(item) for item in schema] if isinstance(schema, list) else schema


def digest() -> str:
    shape = without_words(msgspec.json.schema(messages.Message))
    return hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()[:16]


def test_a_changed_message_is_a_decision() -> None:
    assert (messages.PROTOCOL_VERSION, digest()) == (VERSION, DIGEST)


def test_docstrings_are_no_part_of_it() -> None:
    described = msgspec.json.schema(messages.Message)
    assert "description" in json.dumps(described)
    assert "description" not in json.dumps(without_words(described))


@pytest.mark.parametrize("version", [0, 1, 2, 255])
def test_another_version_is_refused_by_name(version: int) -> None:
    frame = bytearray(messages.encode_header(messages.Abort(request_id="r", reason="x")))
    frame[4] = version
    with pytest.raises(ProtocolError, match=rf"protocol version {version:02x}, ours is 03"):
        messages.decode_header(bytes(frame))
