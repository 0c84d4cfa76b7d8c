"""Large bodies are worked on beside everything else: neither probes nor small requests wait for them."""

from __future__ import annotations

import asyncio
import io
import os
import sys
import threading
import time
from pathlib import Path

import aiohttp
import pytest

from tests.gateway.gateway_process import gateway_process
from tests.patience import PATIENCE_S
from transom.gateway.admission import ANYBODY, Caller
from transom.gateway.body_work import BodyWork
from transom.gateway.fields import nests_deeper
from transom.tokenizer import Tokenizer

LARGE = 10_000_000


@pytest.mark.parametrize("size_bytes", [100, 20_000])
async def test_small_bodies_do_not_wait_for_large_ones(size_bytes: int) -> None:
    work, go_on = BodyWork(), threading.Event()
    large = [asyncio.create_task(work.parse(ANYBODY, LARGE, go_on.wait)) for _ in range(40)]
    large += [asyncio.create_task(work.build(LARGE, go_on.wait)) for _ in range(40)]
    async with asyncio.timeout(PATIENCE_S):
        assert await work.parse(ANYBODY, size_bytes, lambda: "parsed") == "parsed"
        assert await work.build(size_bytes, lambda: "built") == "built"
    go_on.set()
    assert all(await asyncio.gather(*large))


async def test_large_bodies_are_parsed_in_turn_also_when_clients_leave() -> None:
    work, begun, go_on = BodyWork(), threading.Semaphore(0), threading.Event()
    done: list[int] = []

    def parse(number: int) -> None:
        begun.release()
        assert go_on.wait(PATIENCE_S)
        done.append(number)

    tasks = [
        asyncio.create_task(work.parse(ANYBODY, LARGE, lambda n=number: parse(n))) for number in range(4)
    ]
    assert await asyncio.to_thread(begun.acquire, timeout=PATIENCE_S)
    for number in (0, 2):
        tasks[number].cancel()
    await asyncio.wait([tasks[0], tasks[2]])
    assert not begun.acquire(blocking=False)  # the first still runs
    go_on.set()
    await asyncio.gather(tasks[1], tasks[3])
    assert done == [0, 1, 3]


async def test_who_sends_one_large_body_waits_for_one_of_who_sends_many() -> None:
    work, go_on, order = BodyWork(), threading.Event(), list[str]()

    def parse(name: str) -> None:
        assert go_on.wait(PATIENCE_S)
        order.append(name)

    async def send(key: str, name: str) -> None:
        await work.parse(Caller(key), LARGE, lambda: parse(name))

    tasks = [asyncio.create_task(send("many", f"many-{number}")) for number in range(20)]
    await asyncio.sleep(0)
    tasks.append(asyncio.create_task(send("one", "one")))
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.gather(*tasks)
    assert order == ["many-0", "one", *(f"many-{number}" for number in range(1, 20))]


def test_other_threads_go_on_while_a_long_text_is_tokenised(tokenizer: Tokenizer) -> None:
    text, turns = "some words, and more of them. " * 20_000, [0, 0, 0]

    def encode() -> None:
        turns[1] = turns[0]
        tokenizer.encode(text)
        turns[2] = turns[0]

    thread, interval_s = threading.Thread(target=encode), sys.getswitchinterval()
    sys.setswitchinterval(60)  # nobody is made to give the interpreter away: only who lets go of it
    try:
        thread.start()
        while thread.is_alive():
            turns[0] += 1
            time.sleep(0)
    finally:
        sys.setswitchinterval(interval_s)
    assert turns[2] - turns[1] > 100


def test_long_and_short_texts_have_the_same_tokens(tokenizer: Tokenizer) -> None:
    piece = "Zeit, élan 你好 \n\n  <tool_call>x</tool_call> <|im_end|> 1234567 🙂"
    for special in (True, False):
        short = tokenizer.encode(piece + "\n", special=special)
        # A line break at the end keeps the repetitions apart.
        assert tokenizer.encode((piece + "\n") * 1000, special=special)[: len(short) - 1] == short[:-1]


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_depth_is_counted_in_arrays_and_objects(limit: int) -> None:
    for value, depth in ((1, 0), ([], 1), ({"a": 1}, 1), ([1, {"a": []}], 3), ({"a": 1, "b": [[2]]}, 3)):
        assert nests_deeper(value, limit) == (depth > limit)


def worked_s(pid: int) -> float:
    """Return the processor time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.timeout(300)
async def test_probes_are_answered_while_large_bodies_are_read(tokenizer: Tokenizer) -> None:
    """Six bodies of three million values: with each the interpreter is held for a sixth of a second.

    What counts is how long the gateway works while a probe waits, not how long others use the processor.
    """
    body = b'{"prompt": [' + b"123456," * 2_900_000 + b"1]}"
    headers = {"Content-Type": "application/json"}
    waited: list[float] = []
    async with gateway_process(tokenizer) as fleet, aiohttp.ClientSession() as session:

        async def ask() -> None:
            data = io.BytesIO(body)
            async with session.post(f"{fleet.url}/v1/completions", data=data, headers=headers) as response:
                assert response.status == 400

        asking = asyncio.gather(*(ask() for _ in range(6)))
        while not asking.done():
            before = worked_s(fleet.process.pid)
            async with session.get(f"{fleet.url}/health") as response:
                assert response.status == 200
            waited.append(worked_s(fleet.process.pid) - before)
            await asyncio.wait([asking], timeout=0.02)
        await asking
    assert len(waited) > 10
    assert max(waited) < 0.5, waited
