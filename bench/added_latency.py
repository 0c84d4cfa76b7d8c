"""How long requests take on the way to the pretended model and back, for each contestant and round.

What a request spends outside the model's server is what was added to it: the server's own clock readings,
asked for after the load, are taken out. All processes read the same monotonic clock (Linux).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass

import orjson

from transom.bench.chat import percentile
from transom.bench.mock_fleet import TEXT
from transom.bench.processes import Child
from transom.bench.wire_client import Answer, Connection, post
from transom.errors import UnavailableError

MODES = ("whole", "stream")
_CHAT = "/v1/chat/completions"
_START_S = 60.0
_SYSTEM = "You are a careful assistant. Answer in short, plain sentences, and say so when you do not know."
_QUESTION = (
    "A train leaves a station at nine in the morning and travels at eighty kilometres an hour. A second"
    " train leaves the same station an hour later and travels at one hundred and twenty kilometres an hour"
    " on the track beside it. When does the second train draw level with the first one, how far from the"
    " station is that, and what changes if the second train has to stop for ten minutes on the way?"
)


@dataclass(frozen=True)
class Load:
    """How much to ask. `requests` go one after the other, `load_requests` over all connections."""

    rounds: int
    requests: int
    load_requests: int
    concurrency: int
    tokens: int
    step_s: float  # between the tokens of a streamed answer


@dataclass(frozen=True)
class Contestant:
    """Something that answers chat requests at `url`; the model's own server has no `child` of its own."""

    name: str
    url: str
    model: str
    child: Child | None = None


Figures = dict[str, float]


async def until_served(one: Contestant) -> None:
    """Return when it answers; raise UnavailableError when it ends, or after a minute."""
    request = _request(one, "whole", 2)
    said = "nothing"
    try:
        async with asyncio.timeout(_START_S):
            while one.child is None or one.child.alive:
                try:
                    connection = await Connection.open(one.url)
                    try:
                        status, _, body, _ = (await connection.ask(request)).read()
                    finally:
                        connection.close()
                    if status == 200:
                        return
                    said = f"{status} {body[:200]!r}"
                except (OSError, UnavailableError) as error:
                    said = str(error)
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise UnavailableError(f"{one.name} did not serve within {_START_S:g} s: {said}") from None
    raise UnavailableError(f"{one.name} ended before it served: {said}")


def _request(one: Contestant, mode: str, tokens: int) -> bytes:
    messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": _QUESTION}]
    body = {"model": one.model, "messages": messages, "max_tokens": tokens, "temperature": 0}
    return post(one.url, _CHAT, body | ({"stream": True} if mode == "stream" else {}))


async def run_rounds(
    load: Load, mock_url: str, contestants: Sequence[Contestant], done: Callable[[str, str, Figures], None]
) -> None:
    """Measure all rounds; `done` is called with contestant, mode and figures as each is measured."""
    # Whatever fails, connections are closed: uvloop's own end waits for those that are left.
    with closing(await Connection.open(mock_url)) as control:
        for number in range(-1, load.rounds):  # round -1 warms up
            turn = number % len(contestants)
            for one in [*contestants[turn:], *contestants[:turn]]:
                for mode in MODES:
                    step_s = 0.0 if mode == "whole" else load.step_s
                    await control.ask(post(mock_url, "/bench/pace", step_s))
                    meter = _Meter(one, mode, load, control, mock_url)
                    figures = await meter.measure(share=1 if number >= 0 else 10)
                    if number >= 0:
                        done(one.name, mode, figures)


class _Meter:
    def __init__(self, one: Contestant, mode: str, load: Load, control: Connection, mock_url: str) -> None:
        self._one = one
        self._mode = mode
        self._load = load
        self._control = control
        self._mock_url = mock_url

    async def measure(self, share: int) -> Figures:
        """Return the figures of one round: one request at a time for latency, then all at once for CPU."""
        load, one = self._load, self._one
        # A streamed answer takes the time of its tokens; its first one is all that is looked at here.
        alone = max(10, load.requests // share // (1 if self._mode == "whole" else 5))
        added, _ = await self._timings(await self._ask(1, alone))
        at_once = max(load.concurrency, load.load_requests // share)
        # Not the loop's time: uvloop's goes in milliseconds, and a few answers may take less than one.
        begin_s, begin_cpu_s = time.perf_counter(), one.child.cpu_s() if one.child else 0.0
        answers = await self._ask(load.concurrency, at_once)
        wall_s = time.perf_counter() - begin_s
        cpu_s = one.child.cpu_s() - begin_cpu_s if one.child else 0.0
        _, late = await self._timings(answers)
        figures = {
            "added_p50_us": percentile(added, 0.5),
            "added_p99_us": percentile(added, 0.99),
            "requests_per_s": at_once / wall_s,
        }
        if late:
            figures |= {"token_p50_us": percentile(late, 0.5), "token_p99_us": percentile(late, 0.99)}
        if cpu_s:
            figures |= {"requests_per_core_s": at_once / cpu_s, "cpu_us_per_request": 1e6 * cpu_s / at_once}
        return figures

    async def _ask(self, connections: int, count: int) -> list[Answer]:
        request = _request(self._one, self._mode, self._load.tokens)
        answers: list[Answer] = []
        left = count

        async def worker() -> None:
            nonlocal left
            with closing(await Connection.open(self._one.url)) as connection:
                while left > 0:
                    left -= 1
                    answers.append(await connection.ask(request))

        await asyncio.gather(*(worker() for _ in range(connections)))
        return answers

    async def _timings(self, answers: Sequence[Answer]) -> tuple[list[float], list[float]]:
        """Return what was added to each request and to each later token of a stream, in microseconds."""
        taken = await self._control.ask(post(self._mock_url, "/bench/times", None))
        times: dict[str, list[int]] = orjson.loads(taken.read()[2])
        added: list[float] = []
        late: list[float] = []
        for answer in answers:
            id, came_ns = _tokens(answer) if self._mode == "stream" else _whole(answer)
            asked_ns, *sent_ns = times[id]
            if len(came_ns) != self._load.tokens or len(sent_ns) != self._load.tokens:
                raise UnavailableError(
                    f"{self._one.name} gave {len(came_ns)} tokens of {len(sent_ns)},"
                    f" {self._load.tokens} were asked for"
                )
            first = 0 if self._mode == "stream" else -1
            added.append((came_ns[first] - answer.sent_ns - (sent_ns[first] - asked_ns)) / 1000)
            if self._mode == "stream":
                late += [(came - sent) / 1000 for came, sent in zip(came_ns[1:], sent_ns[1:], strict=True)]
        return added, late


def _whole(answer: Answer) -> tuple[str, list[int]]:
    """Return the id and, for each token, when the answer was complete."""
    status, _, body, _ = answer.read()
    if status != 200:
        raise UnavailableError(f"answer {status}: {body[:200]!r}")
    data = orjson.loads(body)
    return data["id"], [answer.ended_ns] * _count(data["choices"][0]["message"])


def _tokens(answer: Answer) -> tuple[str, list[int]]:
    """Return the id and when each token of a stream came."""
    id, came = "", []
    for came_ns, event in answer.events():
        if event.startswith(b"data: {"):
            data = orjson.loads(event[6:])
            id = data["id"]
            for choice in data["choices"]:
                came += [came_ns] * _count(choice["delta"])
    return id, came


def _count(message: dict[str, str | None]) -> int:
    texts = (message.get(name) or "" for name in ("content", "reasoning_content"))
    return sum(text.count(TEXT) for text in texts)
