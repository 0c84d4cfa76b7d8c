"""Real prefill and decode processes, driven over the real transport as a gateway and an encoder would."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

from tests.patience import PATIENCE_S
from transom.llm.kv_transfer import to_frame
from transom.llm.model.export import save_language_model
from transom.llm.model.mimo_v2 import MiMoV2ForCausalLM
from transom.messages import (
    Abort,
    EmbeddingChunk,
    MediaPart,
    Ping,
    Pong,
    PrefillJob,
    RequestFailed,
    Sampling,
    TextPart,
    TokenChunk,
)
from transom.transport import Transport

pytestmark = pytest.mark.process

Reference = Callable[..., list[int]]
Check = Callable[..., None]


class Worker:
    """One stage process."""

    def __init__(self, stage: str, model: Path, *flags: str) -> None:
        command = [sys.executable, "-m", "transom", stage, "--model", str(model), "--watch-stdin", *flags]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self._ready: dict[str, str] = {}

    @property
    def inbox(self) -> str:
        return self.ready["inbox"]

    @property
    def ready(self) -> dict[str, str]:
        """What the process says once it is ready."""
        if not self._ready:
            assert self.process.stdout is not None
            line = self.process.stdout.readline()
            assert line, f"the process ended with {self.process.wait()} before it was ready"
            self._ready = json.loads(line)
        return self._ready

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        code = self.process.wait(timeout=PATIENCE_S)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        return code

    def kill(self) -> None:
        self.process.kill()
        self.wait()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, tiny_config: dict[str, Any], model: Any) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps({**tiny_config, "audio_token_id": 92}))
    save_language_model(model, folder)
    return folder


FLAGS = (
    "--kv-memory-gb",
    "0.01",
    "--page-size",
    "4",
    "--max-batch-tokens",
    "24",
    "--swa-release-interval",
    "4",
)


@pytest.fixture(scope="module")
def workers(checkpoint: Path) -> Iterator[tuple[Worker, Worker]]:
    prefill, decode = Worker("prefill", checkpoint, *FLAGS), Worker("decode", checkpoint, *FLAGS)
    try:
        assert prefill.inbox
        assert decode.inbox
        yield prefill, decode
        assert prefill.stop() == 0
        assert decode.stop() == 0
    finally:
        for worker in (prefill, decode):
            if worker.process.poll() is None:
                worker.kill()


class Gateway:
    """The other end of the wire: collects what the workers say about each request."""

    def __init__(self, transport: Transport, prefill: str, decode: str) -> None:
        self.transport = transport
        self.prefill = prefill
        self.decode = decode
        self.tokens: dict[str, dict[int, int]] = {}
        self.chunks: list[TokenChunk] = []
        self.ended: dict[str, str] = {}
        self.failures: dict[str, RequestFailed] = {}
        self.pong: asyncio.Future[Pong] | None = None
        self._news = asyncio.Event()

    async def receive(self) -> None:
        while True:
            message = (await self.transport.recv()).message
            if isinstance(message, TokenChunk):
                self.chunks.append(message)
                mine = self.tokens.setdefault(message.request_id, {})
                for offset, token in enumerate(message.token_ids):
                    assert message.index + offset not in mine
                    mine[message.index + offset] = token
                if message.finish_reason:
                    self.ended[message.request_id] = message.finish_reason
            elif isinstance(message, RequestFailed):
                self.failures[message.request_id] = message
                self.ended[message.request_id] = "failed"
            elif isinstance(message, Pong) and self.pong is not None:
                self.pong.set_result(message)
            self._news.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self._news.clear()
                await self._news.wait()

    async def finished(self, *names: str) -> None:
        await self.until(lambda: all(name in self.ended for name in names))

    def job(self, name: str, *parts: TextPart | MediaPart, **sampling: Any) -> None:
        deadline_s = sampling.pop("deadline_s", time.time() + 600)
        cache_salt = sampling.pop("cache_salt", "")
        settings = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, **sampling}
        self.transport.send(
            self.prefill,
            PrefillJob(
                request_id=name,
                parts=list(parts),
                sampling=Sampling(**settings),
                deadline_s=deadline_s,
                gateway=self.transport.address,
                decode=self.decode,
                cache_salt=cache_salt,
            ),
        )

    def output(self, name: str) -> list[int]:
        """The tokens in order of their index, which must have no gaps."""
        mine = self.tokens[name]
        assert sorted(mine) == list(range(len(mine)))
        return [mine[i] for i in range(len(mine))]

    async def load(self, address: str) -> dict[str, float]:
        self.pong = asyncio.get_running_loop().create_future()
        self.transport.send(address, Ping(reply_to=self.transport.address, nonce=1))
        async with asyncio.timeout(PATIENCE_S):
            return (await self.pong).load

    async def until_empty(self) -> None:
        """Wait until both workers hold nothing; their load is asked for again until it says so."""
        async with asyncio.timeout(PATIENCE_S):
            for address in (self.prefill, self.decode):
                load = await self.load(address)
                while any(load[key] for key in LEFTOVERS if key in load):
                    load = await self.load(address)


LEFTOVERS = (
    "jobs",
    "running_requests",
    "waiting_requests",
    "full_used_slots",
    "swa_used_slots",
    "promised_bytes",
    "retracted_bytes",
    "embedding_bytes",
    "handoff_bytes",
    "tokens",
    "parked_requests",
)


@asynccontextmanager
async def connected(prefill: str, decode: str) -> AsyncIterator[Gateway]:
    transport = Transport()
    await transport.start()
    gateway = Gateway(transport, prefill, decode)
    receiver = asyncio.create_task(gateway.receive())
    try:
        yield gateway
    finally:
        receiver.cancel()
        await asyncio.gather(receiver, return_exceptions=True)
        await transport.close()


@pytest.fixture
async def gateway(workers: tuple[Worker, Worker]) -> AsyncIterator[Gateway]:
    prefill, decode = workers
    async with connected(prefill.inbox, decode.inbox) as gateway:
        yield gateway
        await gateway.until_empty()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 90, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def chunk(
    name: str, item: int, index: int, ids: list[int], rows: torch.Tensor, *, last: bool
) -> tuple[EmbeddingChunk, list[Any]]:
    meta, frame = to_frame(rows)
    message = EmbeddingChunk(
        request_id=name,
        item_index=item,
        chunk_index=index,
        last=last,
        content_key=f"{name}/{item}",
        token_ids=ids,
        pad_ids=(91, 92),
        rows=meta,
    )
    return message, [frame]


async def test_text_prompts_side_by_side(
    gateway: Gateway, model: MiMoV2ForCausalLM, assert_greedy: Check
) -> None:
    prompts = {f"r{i}": prompt_of(3 + 9 * i, seed=i) for i in range(6)}
    for name, prompt in prompts.items():
        gateway.job(name, TextPart(prompt), max_tokens=12)
    await gateway.finished(*prompts)
    for name, prompt in prompts.items():
        assert_greedy(gateway.output(name), model, prompt, 12)
    first = next(c for c in gateway.chunks if c.request_id == "r3" and c.index == 0)
    assert first.prompt is not None
    assert first.prompt.prompt_tokens == len(prompts["r3"])
    assert "prefill_compute" in first.timings_ms


async def test_media_in_odd_order(gateway: Gateway, model: MiMoV2ForCausalLM, assert_greedy: Check) -> None:
    """Chunks before their job, the second item before the first, a text request in between."""
    rows = torch.randn(9, 32, generator=torch.Generator().manual_seed(1))
    head, middle, tail = prompt_of(11, 1), prompt_of(4, 2), prompt_of(13, 3)
    first, second = [80, 91, 91, 91, 91, 91, 81], [91, 91, 92, 92]
    late = chunk("m", 1, 0, second, rows[5:], last=True)
    gateway.transport.send(gateway.prefill, *late)
    gateway.job(
        "m", TextPart(head), MediaPart(0, "image"), TextPart(middle), MediaPart(1, "video"), TextPart(tail)
    )
    gateway.job("text", TextPart(head))
    await gateway.finished("text")
    gateway.transport.send(gateway.prefill, *chunk("m", 0, 0, first[:3], rows[:2], last=False))
    gateway.transport.send(gateway.prefill, *chunk("m", 0, 1, first[3:], rows[2:5], last=True))
    await gateway.finished("m")
    ids = head + first + middle + second + tail
    at = [i for i, token in enumerate(ids) if token in (91, 92)]
    assert_greedy(gateway.output("m"), model, ids, 8, rows, at)
    assert_greedy(gateway.output("text"), model, head, 8)
    first_chunk = next(c for c in gateway.chunks if c.request_id == "m" and c.prompt)
    # The text before the first picture was computed before the last piece came.
    assert first_chunk.timings_ms["prefill_ahead"] > 0
    assert (await gateway.load(gateway.prefill))["ahead_tokens"] > 0
    stats = first_chunk.prompt
    assert stats is not None
    assert (stats.prompt_tokens, stats.image_tokens, stats.video_tokens, stats.audio_tokens) == (39, 5, 2, 2)


async def test_answers_are_cached_where_their_prompts_are(
    gateway: Gateway, model: MiMoV2ForCausalLM, assert_greedy: Check
) -> None:
    """The decode worker sends its KV back: a next turn computes neither the prompt nor the answer anew."""
    prompt = prompt_of(21, 12)
    for turn in range(3):
        name = f"turn {turn}"
        before = (await gateway.load(gateway.prefill))["cache_answer_tokens"]
        gateway.job(name, TextPart(prompt), max_tokens=20, cache_salt="answers")
        await gateway.finished(name)
        assert_greedy(gateway.output(name), model, prompt, 20)
        first = next(c.prompt for c in gateway.chunks if c.request_id == name and c.prompt)
        assert first.cached_tokens == (len(prompt) - 9 - 1) // 4 * 4 * (turn > 0)
        async with asyncio.timeout(PATIENCE_S):
            while (await gateway.load(gateway.prefill))["cache_answer_tokens"] == before:
                pass
        prompt = [*prompt, *gateway.output(name), *prompt_of(9, turn)]


async def test_a_repeated_prompt_is_cached(
    gateway: Gateway, model: MiMoV2ForCausalLM, assert_greedy: Check
) -> None:
    """The counts that end up in `usage`; another salt hits nothing, and neither changes a token."""
    prompt = prompt_of(45, 11)
    for name, salt in (("cold", "x"), ("again", "x"), ("salted", "y")):
        gateway.job(name, TextPart(prompt), max_tokens=10, cache_salt=salt)
        await gateway.finished(name)
        assert_greedy(gateway.output(name), model, prompt, 10)
    stats = {c.request_id: c.prompt for c in gateway.chunks if c.prompt}
    assert [s and (s.prompt_tokens, s.cached_tokens) for s in stats.values()] == [(45, 0), (45, 44), (45, 0)]
    load = await gateway.load(gateway.prefill)
    assert load["cache_hit_tokens"] >= 44
    assert load["cache_tokens"] == load["cache_evictable_tokens"] >= 88


async def test_metrics_tell_pools_and_hits_by_tier(gateway: Gateway, workers: tuple[Worker, Worker]) -> None:
    for worker, stage in zip(workers, ("prefill", "decode"), strict=True):
        load = await gateway.load(worker.inbox)
        with await asyncio.to_thread(urllib.request.urlopen, f"{worker.ready['http']}/metrics") as response:
            text = response.read().decode()
        for pool in ("full", "swa"):
            label = f'{{pool="{pool}",tier="device"}}'
            assert f"transom_{stage}_pool_total_slots{label} {load[f'{pool}_total_slots']}" in text
            assert f"transom_{stage}_pool_used_slots{label} 0.0" in text
        hits = f'transom_{stage}_cache_hit_tokens_total{{tier="device"}}'
        assert (f"{hits} {load.get('cache_hit_tokens', 0.0)}" in text) == (stage == "prefill")


async def test_health_answers_while_long_prompts_run_and_their_kv_moves(checkpoint: Path) -> None:
    """Four prompts, three long steps each: what waited for a step or a hand-over would take its time."""
    flags = ("--kv-memory-gb", "0.1", "--page-size", "16", "--max-batch-tokens", "1152")
    workers = [Worker(stage, checkpoint, *flags) for stage in ("prefill", "decode")]
    try:
        prefill, decode = (worker.ready for worker in workers)
        async with connected(prefill["inbox"], decode["inbox"]) as gateway, aiohttp.ClientSession() as http:

            async def ask(ready: dict[str, str]) -> float:
                begin = time.monotonic()
                async with http.get(f"{ready['http']}/health") as response:
                    assert (await response.json())["status"] == "ok"
                await gateway.load(ready["inbox"])
                return time.monotonic() - begin

            names = [f"long-{n}" for n in range(4)]
            for n, name in enumerate(names):
                gateway.job(name, TextPart(prompt_of(3000, seed=n)), max_tokens=16)
            busy: list[list[float]] = [[], []]
            while not gateway.ended.keys() >= set(names):
                for answers, ready in zip(busy, (prefill, decode), strict=True):
                    answers.append(await ask(ready))
            assert not gateway.failures
            assert all(len(gateway.tokens[name]) == 16 for name in names)
            await gateway.until_empty()
            # On a machine that has others' work to do too, a worker without work is not quick either.
            for answers, ready in zip(busy, (prefill, decode), strict=True):
                idle_s = [await ask(ready) for _ in range(20)]
                assert statistics.median(answers) < max(0.1, 20 * statistics.median(idle_s))
    finally:
        for worker in workers:
            worker.kill()


async def test_faulty_media_fails_alone(
    gateway: Gateway, model: MiMoV2ForCausalLM, assert_greedy: Check
) -> None:
    prompt = prompt_of(10)
    for name in ("short", "flat", "twice"):
        gateway.job(name, TextPart(prompt), MediaPart(0, "image"))
    gateway.job("good", TextPart(prompt))
    gateway.transport.send(gateway.prefill, *chunk("short", 0, 0, [91] * 1983, torch.zeros(0, 32), last=True))
    gateway.transport.send(gateway.prefill, *chunk("flat", 0, 0, [91, 91], torch.zeros(2, 31), last=True))
    for _ in range(2):
        gateway.transport.send(gateway.prefill, *chunk("twice", 0, 0, [91], torch.zeros(1, 32), last=False))
    await gateway.finished("short", "flat", "twice", "good")
    assert "1983 pads" in gateway.failures["short"].error.message
    assert "expected (2, 32)" in gateway.failures["flat"].error.message
    assert "twice" in gateway.failures["twice"].error.message
    assert_greedy(gateway.output("good"), model, prompt, 8)


async def test_ends_in_prefill(gateway: Gateway, model: MiMoV2ForCausalLM, reference: Reference) -> None:
    prompt = prompt_of(10)
    token = reference(model, prompt, 1)[0]
    gateway.job("one", TextPart(prompt), max_tokens=1)
    gateway.job("stop", TextPart(prompt), max_tokens=9, stop_token_ids=(token,))
    await gateway.finished("one", "stop")
    assert gateway.output("one") == [token]
    assert gateway.ended == {"one": "length", "stop": "stop"}
    assert gateway.tokens["stop"] == {}


async def test_errors_are_typed(gateway: Gateway) -> None:
    gateway.job("late", TextPart([1]), deadline_s=time.time() - 1)
    gateway.job("long", TextPart([1] * 8192))
    gateway.job("waits", TextPart([1]), MediaPart(0, "image"), deadline_s=time.time() + 0.5)
    gateway.job("wrong", TextPart([1]), top_p=-1.0)
    await gateway.finished("late", "long", "waits", "wrong")
    codes = {name: failed.error.code for name, failed in gateway.failures.items()}
    assert codes == {
        "late": "deadline_exceeded",
        "long": "context_length_exceeded",
        "waits": "deadline_exceeded",
        "wrong": "invalid_request",
    }
    assert gateway.failures["wrong"].error.param == "top_p"
    assert gateway.failures["long"].stage == "prefill"


async def test_aborts_at_any_time_leave_nothing(gateway: Gateway) -> None:
    """Aborted before the job, while it waits, while it runs here and there: the fixture checks the rest."""
    early = Abort(request_id="early", reason="test")
    gateway.transport.send(gateway.prefill, early)
    gateway.job("early", TextPart(prompt_of(5)))
    names = [f"a{i}" for i in range(12)]
    for i, name in enumerate(names):
        gateway.job(name, TextPart(prompt_of(40 + i)), MediaPart(0, "image"), max_tokens=2000)
        if i % 3:
            gateway.transport.send(gateway.prefill, *chunk(name, 0, 0, [91], torch.zeros(1, 32), last=True))
    await gateway.until(lambda: len(gateway.tokens.get("a1", {})) > 5)
    for name in names:
        for address in (gateway.prefill, gateway.decode):
            gateway.transport.send(address, Abort(request_id=name, reason="test"))
    gateway.job("after", TextPart(prompt_of(5)))
    await gateway.finished("after")
    assert "early" not in gateway.tokens
    assert not gateway.failures


async def test_lost_decode_worker(workers: tuple[Worker, Worker], checkpoint: Path) -> None:
    """kill -9 while requests are on their way to it: prefill reports them and goes on serving."""
    prefill, decode = workers
    doomed = Worker("decode", checkpoint, *FLAGS)
    async with connected(prefill.inbox, doomed.inbox) as gateway:
        gateway.job("parked", TextPart(prompt_of(5)), MediaPart(0, "image"), max_tokens=5000)
        gateway.job("running", TextPart(prompt_of(5)), max_tokens=5000)
        await gateway.until(lambda: len(gateway.tokens.get("running", {})) > 3)
        lost: asyncio.Queue[str] = asyncio.Queue()
        gateway.transport.on_peer_lost = lost.put_nowait
        gateway.transport.watch(doomed.inbox)
        assert (await gateway.load(doomed.inbox))["running_requests"] == 1
        doomed.kill()
        await gateway.finished("parked")
        assert gateway.failures["parked"].error.status == 502
        assert "decode" in gateway.failures["parked"].error.message
        gateway.decode = decode.inbox
        gateway.job("next", TextPart(prompt_of(5)))
        await gateway.finished("next")
        assert await asyncio.wait_for(lost.get(), PATIENCE_S) == doomed.inbox
        assert lost.empty()
        await gateway.until_empty()


async def test_lost_gateway(workers: tuple[Worker, Worker]) -> None:
    prefill, decode = workers
    async with connected(prefill.inbox, decode.inbox) as gone:
        gone.job("orphan", TextPart(prompt_of(5)), MediaPart(0, "image"))
        gone.job("streaming", TextPart(prompt_of(5)), max_tokens=5000)
        await gone.until(lambda: len(gone.tokens.get("streaming", {})) > 3)
    async with connected(prefill.inbox, decode.inbox) as gateway:
        await gateway.until_empty()
        assert (await gateway.load(prefill.inbox))["jobs"] == 0
