"""POST /v1/media/embeddings with a scripted encoder: shapes, bounds, errors, and that nothing is left."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import numpy as np
import pytest

from tests.gateway.conftest import FleetFactory
from tests.gateway.fake_workers import ROWS, ScriptedFleet, ScriptedWorker
from tests.gateway.test_failures import until_idle
from transom.errors import MediaError
from transom.messages import Abort, EmbeddingChunk, EncodeDone, EncodeJob, TensorMeta
from transom.transport import Received

PATH = "/v1/media/embeddings"
PNG = "data:image/png;base64,iVBORw0KGgo="
BODY = {"input": {"type": "image_url", "image_url": {"url": PNG}}}


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as found:
        yield found


async def post(http: aiohttp.ClientSession, fleet: ScriptedFleet, body: Any) -> tuple[int, dict[str, Any]]:
    async with http.post(fleet.url + PATH, json=body) as response:
        return response.status, await response.json()


def sends(worker: ScriptedWorker, values: np.ndarray, dtype: Any, done: bool = True) -> None:
    """Let an encoder answer each job with the rows of `values`, one chunk a row."""

    async def handle(received: Received) -> None:
        job = received.message
        if not isinstance(job, EncodeJob):
            return
        for index, row in enumerate(values):
            chunk = EmbeddingChunk(
                request_id=job.request_id,
                item_index=0,
                chunk_index=index,
                last=index == len(values) - 1,
                content_key="key",
                token_ids=[7, 9],
                pad_ids=(9,),
                rows=TensorMeta(dtype, (1, values.shape[1])),
            )
            worker.transport.send(job.reply_to, chunk, [row.tobytes()])
        if done:
            message = EncodeDone(
                request_id=job.request_id,
                item_index=0,
                modality=job.modality,
                content_key="key",
                media_tokens=len(values),
                timings_ms={"encode": 1.5},
            )
            worker.transport.send(job.gateway, message)

    worker.on_message = handle


async def test_the_item_goes_to_the_encoder_and_comes_back(
    fleet: ScriptedFleet, http: aiohttp.ClientSession
) -> None:
    status, answer = await post(http, fleet, BODY)
    assert status == 200
    job = (await fleet.encoders[0].wait_for(EncodeJob))[0]
    assert (job.param, job.modality) == ("input.image_url.url", "image")
    assert bytes(fleet.encoders[0].seen[0].frames[0]) == base64.b64decode(PNG.partition(",")[2])
    assert answer["shape"] == [ROWS, 2]
    assert answer["embedding"] == [[0.0, 0.0]] * ROWS
    assert answer["usage"] == {"prompt_tokens": ROWS, "total_tokens": ROWS}
    assert not fleet.prefills[0].seen
    await until_idle(fleet)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
async def test_every_dtype_is_shown_as_it_is(
    fleet: ScriptedFleet, http: aiohttp.ClientSession, dtype: str
) -> None:
    exact = np.array([[0.5, -2.0, 3.0], [1e-3, 0.0, 7.25]], np.float32)
    if dtype == "bfloat16":
        raw = (exact.view(np.uint32) >> 16).astype(np.uint16)
        shown = (raw.astype(np.uint32) << 16).view(np.float32)
    else:
        raw = exact.astype(dtype)
        shown = raw.astype(np.float32)
    sends(fleet.encoders[0], raw, dtype)
    _, floats = await post(http, fleet, BODY)
    assert np.array_equal(np.array(floats["embedding"], np.float32), shown)
    _, packed = await post(http, fleet, BODY | {"encoding_format": "base64"})
    assert base64.b64decode(packed["embedding"]) == raw.tobytes()
    for answer in (floats, packed):
        assert (answer["dtype"], answer["shape"]) == (dtype, [2, 3])
        assert (answer["token_ids"], answer["pad_token_ids"]) == ([7, 9, 7, 9], [9])
        assert answer["timings_ms"] == {"encode": 1.5}


async def test_what_is_wrong_with_the_body_is_named(
    fleet: ScriptedFleet, http: aiohttp.ClientSession
) -> None:
    for body, param in (
        ({}, "input"),
        ({"input": {"type": "text", "text": "x"}}, "input.type"),
        ({"input": {"type": "image_url", "image_url": {"url": "ftp://x/"}}}, "input.image_url.url"),
        (BODY | {"encoding_format": "hex"}, "encoding_format"),
        (BODY | {"timeout": 0}, "timeout"),
    ):
        status, answer = await post(http, fleet, body)
        assert (status, answer["error"]["param"]) == (400, param)
    status, answer = await post(http, fleet, BODY | {"model": "other"})
    assert (status, answer["error"]["param"]) == (404, "model")
    assert not fleet.encoders[0].seen


async def test_the_encoders_refusal_is_the_answer(fleet: ScriptedFleet, http: aiohttp.ClientSession) -> None:
    fleet.script.encode_error = MediaError("no picture", param="input.image_url.url").info()
    status, answer = await post(http, fleet, BODY)
    assert (status, answer["error"]["code"]) == (400, "invalid_media")
    await until_idle(fleet)


async def test_embeddings_above_the_bound_are_given_up(
    start_fleet: FleetFactory, http: aiohttp.ClientSession
) -> None:
    fleet = await start_fleet(max_embedding_mb=1)
    sends(fleet.encoders[0], np.zeros((3, 1 << 17), np.float32), "float32")
    status, answer = await post(http, fleet, BODY)
    assert (status, answer["error"]["param"]) == (413, "input")
    await until_idle(fleet)
    assert fleet.stage.load()["buffered_bytes"] == 0


async def test_a_lost_encoder_a_deadline_and_a_client_that_leaves(
    fleet: ScriptedFleet, http: aiohttp.ClientSession
) -> None:
    sends(fleet.encoders[0], np.zeros((1, 2), np.float32), "float32", done=False)
    status, answer = await post(http, fleet, BODY | {"timeout": 0.2})
    assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")
    late = (await fleet.encoders[0].wait_for(EncodeJob))[0].request_id
    leaving = asyncio.create_task(post(http, fleet, BODY))
    await fleet.encoders[0].wait_for(EncodeJob, 2)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    await fleet.encoders[0].wait_for(Abort, 2)
    assert late in fleet.encoders[0].aborted()
    waiting = asyncio.create_task(post(http, fleet, BODY))
    await fleet.encoders[0].wait_for(EncodeJob, 3)
    fleet.encoders[0].incarnation = "second"
    status, answer = await waiting
    assert (status, answer["error"]["code"]) == (502, "stage_lost")
    await until_idle(fleet)
