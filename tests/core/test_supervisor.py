"""The supervisor with real child processes: the tiny stage in every state that a stage can get into."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from tests.patience import PATIENCE_S
from transom.errors import ConfigError, UnavailableError
from transom.messages import Abort
from transom.supervisor import Backoff, ChildSpec, Event, ReadyLine, RestartPolicy, Supervisor, usable_cores
from transom.transport import Transport

pytestmark = pytest.mark.process

QUICK = RestartPolicy(first_delay_s=0.05, max_delay_s=0.2, stable_s=3000.0, start_attempts=3)


class Watched:
    """A supervisor whose events and logs can be waited for."""

    def __init__(self, command: tuple[str, ...]) -> None:
        self.command = command
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.seen: list[Event] = []
        self.logs: list[tuple[str, str]] = []
        self.supervisor = Supervisor(
            on_event=self.events.put_nowait,
            on_log=lambda name, line: self.logs.append((name, line)),
            policy=QUICK,
        )

    def spec(self, name: str, *flags: str) -> ChildSpec:
        return ChildSpec(name=name, command=(*self.command, *flags), env=dict(os.environ))

    async def until(self, kind: str) -> Event:
        while True:
            event = await self.events.get()
            self.seen.append(event)
            if event.kind == kind:
                return event

    async def until_log(self, name: str, line: str) -> None:
        while (name, line) not in self.logs:  # noqa: ASYNC110  the log is a plain callback
            await asyncio.sleep(0.01)

    async def until_unready(self, line: ReadyLine) -> None:
        """Return when a stage says that it takes no work any more."""
        async with asyncio.timeout(PATIENCE_S), aiohttp.ClientSession() as http:
            status = 200
            while status == 200:
                async with http.get(f"{line.http}/ready") as response:
                    status = response.status

    def log(self) -> str:
        return "\n".join(f"{name}: {line}" for name, line in self.logs)


@pytest.fixture
async def watched(tiny_stage: tuple[str, ...]) -> AsyncIterator[Watched]:
    watched = Watched(tiny_stage)
    yield watched
    await watched.supervisor.kill()


def gone(pid: int) -> bool:
    """Tell whether a process has ended (a zombie has)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


async def until_gone(pid: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not gone(pid):  # noqa: ASYNC110  it is no child of ours
            await asyncio.sleep(0.01)


async def test_starts_in_parallel_and_answers_in_order(watched: Watched) -> None:
    lines = await watched.supervisor.start([watched.spec("a"), watched.spec("b")])
    assert len({line.inbox for line in lines}) == 2
    order = {}
    for _ in range(2):
        event = await watched.until("ready")
        assert event.ready is not None
        order[event.child] = event.ready
    assert [order["a"], order["b"]] == lines


async def test_crashed_stage_comes_back_at_the_same_addresses(watched: Watched, transport: Transport) -> None:
    (first,) = await watched.supervisor.start([watched.spec("a")])
    await watched.until("ready")
    transport.send(first.inbox, Abort(request_id="r", reason="crash"))
    crashed = await watched.until("crashed")
    assert crashed.exit_code == -signal.SIGKILL
    second = (await watched.until("ready")).ready
    assert second is not None
    assert (second.inbox, second.http) == (first.inbox, first.http)
    assert second.pid != first.pid
    assert second.incarnation != first.incarnation
    transport.send(second.inbox, Abort(request_id="again", reason="echo"))
    received = await transport.recv()
    assert received.message == Abort(request_id="again", reason="echo")


async def test_repeated_crashes_back_off(watched: Watched, tmp_path: Path) -> None:
    crash_file = tmp_path / "crash"
    (line,) = await watched.supervisor.start([watched.spec("a", "--crash-file", str(crash_file))])
    crash_file.touch()
    os.kill(line.pid, signal.SIGKILL)
    delays = [(await watched.until("crashed")).restart_in_s for _ in range(4)]
    assert delays == [0.05, 0.1, 0.2, 0.2]
    crash_file.unlink()
    while (await watched.until("ready")).ready == line:
        pass
    assert not watched.supervisor._failed.done()


async def test_start_that_keeps_crashing_is_given_up(watched: Watched, tmp_path: Path) -> None:
    crash_file = tmp_path / "crash"
    crash_file.touch()
    with pytest.raises(UnavailableError, match=r"a ended 3 times before .* last with signal SIGKILL"):
        await watched.supervisor.start(
            [watched.spec("a", "--crash-file", str(crash_file)), watched.spec("b")]
        )


async def test_refused_settings_are_not_tried_again(watched: Watched) -> None:
    with pytest.raises(ConfigError, match="a refused to start"):
        await watched.supervisor.start([watched.spec("a", "--refuse", "no such model")])
    assert "no such model" in watched.log()
    starts = [event for event in watched.seen if event.kind == "started"]
    while not watched.events.empty():
        starts += [event for event in [watched.events.get_nowait()] if event.kind == "started"]
    assert len(starts) == 1


async def test_stop_lets_running_work_end(watched: Watched, transport: Transport) -> None:
    flags = ("--work-s", "600", "--drain-timeout-s", "600")
    (line,) = await watched.supervisor.start([watched.spec("a", *flags)])
    transport.send(line.inbox, Abort(request_id="r", reason="work"))
    transport.send(line.inbox, Abort(request_id="echo", reason="echo"))
    assert (await transport.recv()).message == Abort(request_id="echo", reason="echo")
    stopping = asyncio.create_task(watched.supervisor.stop([["a"]], grace_s=PATIENCE_S, limit_s=PATIENCE_S))
    await watched.until_unready(line)
    transport.send(line.inbox, Abort(request_id="enough", reason="enough"))
    assert (await transport.recv()).message == Abort(request_id="r", reason="work")
    await stopping
    assert gone(line.pid)
    assert ("a", "closed") in watched.logs


async def test_stop_kills_what_ignores_it_within_the_limit(watched: Watched, transport: Transport) -> None:
    a, b = await watched.supervisor.start([watched.spec("a"), watched.spec("b")])
    transport.send(a.inbox, Abort(request_id="r", reason="hang"))
    await watched.until_log("a", "hangs")
    stopping = asyncio.create_task(watched.supervisor.stop([["a"], ["b"]], grace_s=0.5, limit_s=2.0))
    async with asyncio.timeout(PATIENCE_S):
        await stopping
    assert gone(a.pid)
    assert gone(b.pid)
    killed = []
    while not watched.events.empty():
        killed += [e.child for e in [watched.events.get_nowait()] if e.kind == "killed"]
    assert killed[0] == "a"  # on a machine that stands still, b may not make it either


async def test_stop_while_a_restart_is_pending(watched: Watched, tmp_path: Path) -> None:
    crash_file = tmp_path / "crash"
    (line,) = await watched.supervisor.start([watched.spec("a", "--crash-file", str(crash_file))])
    crash_file.touch()
    os.kill(line.pid, signal.SIGKILL)
    await watched.until("crashed")
    await watched.supervisor.stop([["a"]], grace_s=1, limit_s=4.5)
    pids = {event.ready.pid for event in watched.seen if event.ready is not None}
    assert all(gone(pid) for pid in pids)


async def test_endless_and_binary_log_lines_pass_through(watched: Watched, tmp_path: Path) -> None:
    noisy = tmp_path / "noisy.py"
    noisy.write_text(
        "import sys\n"
        "sys.stderr.buffer.write(b'x' * 1_000_000 + b'\\n\\xff\\n')\n"
        "sys.stdout.write('not json\\n')\n"
        "sys.exit(2)\n"
    )
    spec = ChildSpec(name="n", command=(sys.executable, str(noisy)), env=dict(os.environ))
    with pytest.raises(ConfigError):
        await watched.supervisor.start([spec])
    lines = [line for _, line in watched.logs]
    assert sum(len(line) for line in lines if set(line) == {"x"}) == 1_000_000
    assert "\N{REPLACEMENT CHARACTER}" in lines
    assert "not json" in lines


SUPERVISE = """
import asyncio, os, sys
from transom.supervisor import ChildSpec, Supervisor

async def main():
    def log(name, line):
        if line == 'hangs':
            print(line, flush=True)

    supervisor = Supervisor(on_event=lambda event: None, on_log=log)
    specs = [ChildSpec(name=str(n), command=tuple(sys.argv[1:]), env=dict(os.environ)) for n in range(2)]
    lines = await supervisor.start(specs)
    print(*(f"{line.pid} {line.inbox}" for line in lines), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_children_end_when_the_supervisor_is_killed(
    tiny_stage: tuple[str, ...], transport: Transport
) -> None:
    """One of the two even though its event loop hangs."""
    with subprocess.Popen(  # noqa: ASYNC220  a pipe of lines is simpler here
        [sys.executable, "-c", SUPERVISE, *tiny_stage, "--drain-timeout-s", "1"],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        words = (await asyncio.to_thread(process.stdout.readline)).split()
        pids, inboxes = [int(word) for word in words[::2]], words[1::2]
        assert len(pids) == 2
        transport.send(inboxes[0], Abort(request_id="r", reason="hang"))
        assert await asyncio.to_thread(process.stdout.readline) == "hangs\n"
        process.kill()
    for pid in pids:
        await until_gone(pid)


def test_backoff_starts_again_after_a_stable_run() -> None:
    backoff = Backoff(RestartPolicy(first_delay_s=1, max_delay_s=5, stable_s=10))
    assert [backoff.next_delay_s(0.1) for _ in range(5)] == [1, 2, 4, 5, 5]
    assert [backoff.next_delay_s(10.0), backoff.next_delay_s(9.9)] == [1, 2]


def test_usable_cores_is_what_the_scheduler_grants() -> None:
    assert 1 <= usable_cores() <= len(os.sched_getaffinity(0))
