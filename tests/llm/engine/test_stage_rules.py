"""Bounds and odd moments of the two workers: real stages and transports, in one process for speed."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.patience import PATIENCE_S
from transom.llm.config import DecodeConfig, PrefillConfig
from transom.llm.decode import DecodeStage
from transom.llm.kv_transfer import pack_kv, to_frame
from transom.llm.model.export import save_language_model
from transom.llm.pools import HostKV
from transom.llm.prefill import PrefillStage
from transom.llm.worker import LlmStage
from transom.messages import (
    Abort,
    EmbeddingChunk,
    KVGrant,
    KVHandoff,
    KVReserve,
    MediaPart,
    Message,
    PrefillJob,
    RequestFailed,
    Sampling,
    TextPart,
    TokenChunk,
)
from transom.recent_ids import RecentIds
from transom.transport import Received, Transport

GREEDY = Sampling(max_tokens=4, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, tiny_config: dict[str, Any], model: Any) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(tiny_config))
    save_language_model(model, folder)
    return folder


class Peer:
    """An inbox that keeps what it gets; `stage_address` is where its own messages go."""

    def __init__(self, transport: Transport, stage_address: str) -> None:
        self.transport = transport
        self.stage_address = stage_address
        self.got: list[Received] = []
        self._news = asyncio.Event()

    @property
    def address(self) -> str:
        return self.transport.address

    def say(self, message: Message, frames: list[Any] | None = None) -> None:
        self.transport.send(self.stage_address, message, frames or [])

    async def collect(self) -> None:
        while True:
            self.got.append(await self.transport.recv())
            self._news.set()

    async def expect(self, kind: type[Any], request_id: str) -> Any:
        """Return the first message of this kind about this request, waiting for it."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                for received in self.got:
                    message = received.message
                    if isinstance(message, kind) and message.request_id == request_id:
                        return message
                self._news.clear()
                await self._news.wait()

    def has(self, kind: type[Any], request_id: str) -> bool:
        return any(isinstance(r.message, kind) and r.message.request_id == request_id for r in self.got)


class Bench:
    """One stage and its peers."""

    def __init__(self, stage: LlmStage, transport: Transport) -> None:
        self.stage = stage
        self.transport = transport
        self.peers: list[Peer] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def receive(self) -> None:
        while True:
            await self.stage.handle(await self.transport.recv())

    async def peer(self) -> Peer:
        transport = Transport()
        await transport.start()
        peer = Peer(transport, self.transport.address)
        self.peers.append(peer)
        self.tasks.append(asyncio.create_task(peer.collect()))
        return peer

    async def until(self, condition: Callable[[], bool]) -> None:
        """Look again and again: the engine thread's figures change without a signal."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.01)


Open = Callable[[LlmStage], Any]


@asynccontextmanager
async def opened(stage: LlmStage) -> AsyncIterator[Bench]:
    transport = Transport()
    transport.on_peer_lost = stage.peer_lost
    await transport.start()
    bench = Bench(stage, transport)
    await stage.start(transport)
    bench.tasks.append(asyncio.create_task(bench.receive()))
    try:
        yield bench
    finally:
        for task in bench.tasks:
            task.cancel()
        await asyncio.gather(*bench.tasks, return_exceptions=True)
        await stage.close()
        for closing in [transport, *(peer.transport for peer in bench.peers)]:
            await closing.close()


SETTINGS: dict[str, Any] = {"kv_memory_gb": 0.01, "page_size": 4, "max_batch_tokens": 512}


def prefill_stage(checkpoint: Path, **settings: Any) -> PrefillStage:
    return PrefillStage(PrefillConfig(model=str(checkpoint), **{**SETTINGS, **settings}))


def decode_stage(checkpoint: Path, **settings: Any) -> DecodeStage:
    return DecodeStage(DecodeConfig(model=str(checkpoint), **{**SETTINGS, **settings}))


def job(name: str, gateway: Peer, decode: Peer, *parts: TextPart | MediaPart) -> PrefillJob:
    return PrefillJob(
        request_id=name, parts=list(parts), sampling=GREEDY, deadline_s=time.time() + 600,
        gateway=gateway.address, decode=decode.address,
    )  # fmt: skip


def chunk(name: str, rows: torch.Tensor) -> tuple[EmbeddingChunk, list[Any]]:
    meta, frame = to_frame(rows)
    message = EmbeddingChunk(
        request_id=name, item_index=0, chunk_index=0, last=True, content_key="", token_ids=[91] * len(rows),
        pad_ids=(91,), rows=meta,
    )  # fmt: skip
    return message, [frame]


async def test_a_full_prefill_queue_answers_429(checkpoint: Path) -> None:
    async with opened(prefill_stage(checkpoint, max_waiting_tokens=20)) as bench:
        gateway, decode = await bench.peer(), await bench.peer()
        gateway.say(job("first", gateway, decode, TextPart([1] * 15), MediaPart(0, "image")))
        gateway.say(job("second", gateway, decode, TextPart([1] * 10)))
        failed = await gateway.expect(RequestFailed, "second")
        assert failed.error.status == 429
        assert failed.error.retry_after_s >= 1
        gateway.say(Abort(request_id="first", reason="test"))
        gateway.say(job("third", gateway, decode, TextPart([1] * 10)))
        assert (await gateway.expect(TokenChunk, "third")).index == 0


async def test_parked_embeddings_are_bounded(checkpoint: Path) -> None:
    async with opened(prefill_stage(checkpoint, max_parked_mb=1)) as bench:
        gateway, decode = await bench.peer(), await bench.peer()
        half = torch.zeros(4500, 32)  # 576 kB
        gateway.say(*chunk("early", half))
        gateway.say(*chunk("late", half))
        gateway.say(job("late", gateway, decode, MediaPart(0, "image")))
        assert (await gateway.expect(RequestFailed, "late")).error.status == 429
        load = bench.stage.load()
        assert load["parked_requests"] == 1
        assert load["embedding_bytes"] == half.numel() * 4
        gateway.say(job("waits", gateway, decode, MediaPart(0, "image")))
        gateway.say(*chunk("waits", half))
        assert (await gateway.expect(RequestFailed, "waits")).error.status == 429
        bench.stage.tick(time.time() + 61)
        load = bench.stage.load()
        assert load["parked_requests"] == load["embedding_bytes"] == load["jobs"] == 0


async def test_prefill_waits_while_too_much_kv_waits_for_decode(checkpoint: Path) -> None:
    """7,000 tokens are 1.1 MB of KV, the reserve is 1 MB: nobody starts until they are handed over."""
    async with opened(prefill_stage(checkpoint, host_reserve_gb=0.001)) as bench:
        gateway, decode = await bench.peer(), await bench.peer()
        gateway.say(job("big", gateway, decode, TextPart([1] * 7000)))
        await gateway.expect(TokenChunk, "big")
        await bench.until(lambda: bench.stage.load()["handoff_bytes"] > 1e6)
        gateway.say(job("next", gateway, decode, TextPart([1] * 5)))
        await bench.until(lambda: bench.stage.load()["waiting_requests"] == 1)
        await bench.until(lambda: "host memory" in bench.stage.engine.waiting_reason)
        await bench.until(lambda: bench.stage.load()["waiting_host_memory"] == 1)
        assert not gateway.has(TokenChunk, "next")
        assert (await decode.expect(KVReserve, "big")).prompt_len == 7000
        decode.say(KVGrant(request_id="big"))
        handoff = await decode.expect(KVHandoff, "big")
        assert handoff.prompt_len == 7000
        assert 8 <= handoff.swa_len <= 8 + 2 * 4  # two pages more, for the answer's way back
        await gateway.expect(TokenChunk, "next")
        await bench.until(lambda: bench.stage.load()["full_used_slots"] == 0)  # tokens go out first
        await bench.until(lambda: bench.stage.load()["waiting_host_memory"] == 0)


async def test_a_grant_before_the_first_token(checkpoint: Path) -> None:
    async with opened(prefill_stage(checkpoint)) as bench:
        gateway, decode = await bench.peer(), await bench.peer()
        gateway.say(msgspec.structs.replace(job("a", gateway, decode, TextPart([1] * 3003)), priority=7))
        reserved = await decode.expect(KVReserve, "a")
        decode.say(KVGrant(request_id="a"))
        handoff = await decode.expect(KVHandoff, "a")
        assert reserved.priority == handoff.priority == 7
        assert (handoff.return_from, handoff.return_page) == (3000, 4)
        assert handoff.return_to == reserved.prefill
        first = await gateway.expect(TokenChunk, "a")
        assert first.token_ids == [handoff.first_token]
        await bench.until(lambda: bench.stage.load()["jobs"] == 0)


async def test_decode_grants_by_priority(checkpoint: Path) -> None:
    async with opened(decode_stage(checkpoint, host_reserve_gb=0.001, max_waiting_tokens=90_000)) as bench:
        gateway, prefill = await bench.peer(), await bench.peer()
        for name, priority in (("first", 0), ("low", 0), ("high", 1)):
            prefill.say(reserve(name, prefill, gateway, 4000, priority=priority))
        await prefill.expect(KVGrant, "first")
        prefill.say(Abort(request_id="first", reason="test"))
        await prefill.expect(KVGrant, "high")
        assert not prefill.has(KVGrant, "low")


def reserve(name: str, prefill: Peer, gateway: Peer, prompt_len: int, **fields: Any) -> KVReserve:
    fields.setdefault("deadline_s", time.time() + 600)
    fields.setdefault("kv_dtype", "float32")
    return KVReserve(
        request_id=name, prompt_len=prompt_len, max_tokens=4, prefill=prefill.address,
        gateway=gateway.address, **fields,
    )  # fmt: skip


async def test_decode_grants_host_memory_in_order(checkpoint: Path) -> None:
    """1 MB holds the KV of one prompt of 4,000 tokens at a time."""
    async with opened(decode_stage(checkpoint, host_reserve_gb=0.001, max_waiting_tokens=9000)) as bench:
        gateway, prefill = await bench.peer(), await bench.peer()
        for name in ("a", "b", "c", "d"):
            prefill.say(reserve(name, prefill, gateway, 4000))
        await prefill.expect(KVGrant, "a")
        for side in (gateway, prefill):
            failed = await side.expect(RequestFailed, "d")
            assert failed.error.status == 429
            assert failed.error.retry_after_s >= 1
        assert not prefill.has(KVGrant, "b")
        gateway.say(Abort(request_id="a", reason="test"))
        await prefill.expect(KVGrant, "b")
        assert not prefill.has(KVGrant, "c")
        gateway.say(Abort(request_id="b", reason="test"))
        await prefill.expect(KVGrant, "c")
        gateway.say(Abort(request_id="c", reason="test"))
        await bench.until(lambda: bench.stage.load()["jobs"] == 0)
        assert bench.stage.load()["promised_bytes"] == 0


async def test_decode_refuses_what_can_never_fit(checkpoint: Path) -> None:
    async with opened(decode_stage(checkpoint, host_reserve_gb=0.001)) as bench:
        gateway, prefill = await bench.peer(), await bench.peer()
        prefill.say(reserve("context", prefill, gateway, 8192))
        prefill.say(reserve("memory", prefill, gateway, 8000))
        prefill.say(reserve("late", prefill, gateway, 10, deadline_s=time.time() - 1))
        prefill.say(reserve("expires", prefill, gateway, 10))
        await prefill.expect(KVGrant, "expires")
        bench.stage.tick(time.time() + 601)
        codes = {
            name: (await gateway.expect(RequestFailed, name)).error.code
            for name in ("context", "memory", "late", "expires")
        }
        assert codes == {
            "context": "context_length_exceeded",
            "memory": "context_length_exceeded",
            "late": "deadline_exceeded",
            "expires": "deadline_exceeded",
        }
        assert bench.stage.load()["promised_bytes"] == 0


def handoff(name: str, gateway: Peer, *, length: int = 10, heads: int = 1) -> tuple[KVHandoff, list[Any]]:
    swa_len = min(length, 8)
    host_kv = HostKV(
        length,
        swa_len,
        torch.zeros(2, length, heads, 12),
        torch.zeros(2, length, heads, 8),
        torch.zeros(3, swa_len, 2, 12),
        torch.zeros(3, swa_len, 2, 8),
    )
    metas, frames = pack_kv(host_kv)
    message = KVHandoff(
        request_id=name, prompt_ids=[1] * length, first_token=2, prompt_len=length, swa_len=swa_len,
        sampling=GREEDY, deadline_s=time.time() + 600, gateway=gateway.address, tensors=metas,
    )  # fmt: skip
    return message, list(frames)


async def test_decode_takes_only_what_it_granted(checkpoint: Path) -> None:
    async with opened(decode_stage(checkpoint)) as bench:
        gateway, prefill = await bench.peer(), await bench.peer()
        for name in ("good", "foreign"):
            prefill.say(reserve(name, prefill, gateway, 10))
            await prefill.expect(KVGrant, name)
        gateway.say(Abort(request_id="gone", reason="test"))
        await bench.until(lambda: "gone" in bench.stage.aborted)
        prefill.say(*handoff("gone", gateway))
        prefill.say(*handoff("stranger", gateway))
        prefill.say(*handoff("foreign", gateway, heads=3))
        prefill.say(*handoff("good", gateway))
        assert "no room" in (await gateway.expect(RequestFailed, "stranger")).error.message
        assert "another model" in (await gateway.expect(RequestFailed, "foreign")).error.message
        await bench.until(lambda: bench.stage.load()["jobs"] == 0)
        await bench.until(
            lambda: any(isinstance(r.message, TokenChunk) and r.message.finish_reason for r in gateway.got)
        )
        chunks = [r.message for r in gateway.got if isinstance(r.message, TokenChunk)]
        assert [c.index for c in chunks] == [1, 2, 3]
        assert chunks[-1].finish_reason == "length"
        assert not gateway.has(RequestFailed, "gone")


async def test_workers_of_different_kv_dtypes_refuse_each_other(checkpoint: Path) -> None:
    """Before anything is computed for decode; and KV that comes all the same is not converted."""
    async with opened(decode_stage(checkpoint, kv_dtype="fp8")) as bench:
        gateway, prefill = await bench.peer(), await bench.peer()
        prefill.say(reserve("other", prefill, gateway, 10))
        for side in (gateway, prefill):
            failed = await side.expect(RequestFailed, "other")
            assert failed.error.status == 503
            assert (
                "KV in float32, the decode worker in fp8: they need the same kv_dtype" in failed.error.message
            )
        prefill.say(reserve("lying", prefill, gateway, 10, kv_dtype="fp8"))
        await prefill.expect(KVGrant, "lying")
        prefill.say(*handoff("lying", gateway))
        assert "for pools of fp8" in (await gateway.expect(RequestFailed, "lying")).error.message
        await bench.until(lambda: bench.stage.load()["jobs"] == 0)
        assert bench.stage.load()["promised_bytes"] == 0


async def test_a_lost_prefill_frees_its_promises(checkpoint: Path) -> None:
    async with opened(decode_stage(checkpoint)) as bench:
        gateway, prefill = await bench.peer(), await bench.peer()
        prefill.say(reserve("a", prefill, gateway, 10))
        await prefill.expect(KVGrant, "a")
        bench.tasks.pop().cancel()
        bench.peers.remove(prefill)
        await prefill.transport.close()
        await bench.until(lambda: bench.stage.load()["jobs"] == 0)
        assert bench.stage.load()["promised_bytes"] == 0
        # It may live and wait for the grant: nobody else would tell.
        failed = await gateway.expect(RequestFailed, "a")
        assert (failed.error.status, failed.error.code) == (502, "stage_lost")


async def test_kv_that_was_handed_to_a_lost_decode_worker_is_told_to_the_gateway(checkpoint: Path) -> None:
    async with opened(prefill_stage(checkpoint)) as bench:
        gateway, decode = await bench.peer(), await bench.peer()
        gateway.say(job("a", gateway, decode, TextPart([1] * 9)))
        await decode.expect(KVReserve, "a")
        decode.say(KVGrant(request_id="a"))
        await decode.expect(KVHandoff, "a")
        await bench.until(lambda: bench.stage.load()["jobs"] == 0)
        assert not gateway.has(RequestFailed, "a")
        bench.tasks.pop().cancel()
        bench.peers.remove(decode)
        await decode.transport.close()
        failed = await gateway.expect(RequestFailed, "a")
        assert (failed.error.status, failed.error.code) == (502, "stage_lost")
        assert failed.error.message == "the decode worker of this request was lost"


async def test_draining_refuses_new_work_and_ends_the_old(checkpoint: Path) -> None:
    async with opened(prefill_stage(checkpoint)) as bench:
        gateway, decode = await bench.peer(), await bench.peer()
        gateway.say(job("old", gateway, decode, TextPart([1] * 5), MediaPart(0, "image")))
        await bench.until(lambda: bench.stage.load()["jobs"] == 1)
        draining: Awaitable[None] = asyncio.create_task(bench.stage.drain())
        await bench.until(lambda: bench.stage.draining)
        gateway.say(job("new", gateway, decode, TextPart([1] * 5)))
        assert (await gateway.expect(RequestFailed, "new")).error.status == 503
        gateway.say(*chunk("old", torch.zeros(1, 32)))
        await decode.expect(KVReserve, "old")
        decode.say(KVGrant(request_id="old"))
        async with asyncio.timeout(PATIENCE_S):
            await draining
        await gateway.expect(TokenChunk, "old")


async def test_a_dead_engine_fails_everything(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    raised: list[int] = []
    monkeypatch.setattr("signal.raise_signal", raised.append)
    async with opened(prefill_stage(checkpoint)) as bench:
        gateway, decode = await bench.peer(), await bench.peer()
        gateway.say(job("a", gateway, decode, TextPart([1]), MediaPart(0, "image")))
        await bench.until(lambda: bench.stage.load()["jobs"] == 1)
        bench.stage.engine.submit("no command")  # type: ignore[arg-type]
        failed = await gateway.expect(RequestFailed, "a")
        assert failed.error.status == 500
        assert raised
        assert "the engine stopped" in (bench.stage.unready_reason() or "")


def test_ids_are_remembered_for_a_while() -> None:
    ids = RecentIds(keep_s=10, limit=3)
    for number in range(5):
        ids.add(f"r{number}", float(number))
    assert [f"r{number}" in ids for number in range(5)] == [False, False, True, True, True]
    ids.add("r9", 13.5)
    assert "r3" not in ids
    assert "r4" in ids
