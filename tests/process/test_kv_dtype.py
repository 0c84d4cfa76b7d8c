"""The whole pipeline with KV in fp8: answers stay right and are cached."""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.patience import PATIENCE_S
from transom.nano.data import texts

pytestmark = pytest.mark.process


def ask(url: str, *messages: dict[str, str]) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=PATIENCE_S)
    try:
        body = {"messages": messages, "max_tokens": 60, "temperature": 0}
        connection.request(
            "POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def test_answers_stay_right_and_answers_are_cached(own_pipeline: Any) -> None:
    running = own_pipeline(env={"TRANSOM_PREFILL_KV_DTYPE": "fp8", "TRANSOM_DECODE_KV_DTYPE": "fp8"})
    question = {"role": "user", "content": "Who are you?"}
    status, first = ask(running.url, question)
    assert status == 200, running.log()
    answer = first["choices"][0]["message"]["content"]
    assert answer == texts.WHO
    # 3 full layers of 2 KV heads, 5 SWA layers of 4: a byte a value, and 4 for the scales of K and of V.
    assert "KV in fp8: full pool" in running.log()
    assert f"({3 * 2 * (48 + 32 + 8)} B each), SWA pool" in running.log()
    status, again = ask(
        running.url,
        question,
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "Who are you?"},
    )
    assert status == 200, running.log()
    assert again["choices"][0]["message"]["content"] == texts.WHO
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
