"""Supervisor of `transom up`: starts stage processes, restarts a crashed one, ends them all.

Owning process: `transom up`. Knows command lines, readiness lines and exit codes; nothing of models,
requests or the HTTP API, and nothing of how events are shown.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from transom.errors import ConfigError, UnavailableError

logger = logging.getLogger(__name__)

EXIT_CONFIG = 2  # a stage's exit code for what a restart can't cure
_MAX_LINE_BYTES = 256 * 1024


class ReadyLine(msgspec.Struct, frozen=True, tag_field="event", tag="ready"):
    """What a stage prints on stdout once it can take work."""

    stage: str
    inbox: str
    http: str
    pid: int
    incarnation: str


@dataclass(frozen=True, kw_only=True)
class ChildSpec:
    """One stage process. `command` lacks the addresses: the supervisor adds --bind and --http-port."""

    name: str
    command: tuple[str, ...]
    env: Mapping[str, str]
    http_port: int = 0


@dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """When a crashed stage comes back, and when the supervisor gives up on a start."""

    first_delay_s: float = 0.5
    max_delay_s: float = 30.0
    stable_s: float = 30.0  # a run at least this long makes the next delay the first one again
    start_attempts: int = 3  # crashes before the very first readiness line


class Backoff:
    """Exponential delays between restarts of one child."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._crashes = 0

    def next_delay_s(self, ran_s: float) -> float:
        """Return the delay after a run of `ran_s` seconds that ended in a crash."""
        if ran_s >= self._policy.stable_s:
            self._crashes = 0
        delay = self._policy.first_delay_s * 2.0 ** min(self._crashes, 30)
        self._crashes += 1
        return min(delay, self._policy.max_delay_s)


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened to a child, for whoever shows it."""

    kind: Literal["started", "ready", "crashed", "stopped", "killed"]
    child: str
    ready: ReadyLine | None = None
    exit_code: int | None = None
    restart_in_s: float | None = None
    took_s: float = 0.0


def usable_cores() -> int:
    """Return the CPUs that this process may use: its affinity, cut by a cgroup quota (containers)."""
    cores = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        with open("/sys/fs/cgroup/cpu.max", encoding="ascii") as file:
            quota, period = file.read().split()[:2]
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


class _Lines:
    """Splits a pipe into lines; an endless line comes in pieces instead of filling the memory."""

    def __init__(self, stream: asyncio.StreamReader) -> None:
        self._stream = stream

    async def each(self, take: Callable[[str], None]) -> None:
        rest = b""
        while data := await self._stream.read(64 * 1024):
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) > _MAX_LINE_BYTES:
                lines, rest = [*lines, rest], b""
            for line in lines:
                take(line.decode("utf-8", "replace").rstrip("\r"))
        if rest:
            take(rest.decode("utf-8", "replace"))


@dataclass
class _Child:
    spec: ChildSpec
    backoff: Backoff
    first_ready: asyncio.Future[ReadyLine]
    last_ready: ReadyLine | None = None
    process: asyncio.subprocess.Process | None = None
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    life: asyncio.Task[None] | None = None

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.returncode is None

    def argv(self) -> list[str]:
        """Return the command line; a restarted child keeps the addresses that its peers know."""
        inbox, port = "tcp://127.0.0.1:0", self.spec.http_port
        if self.last_ready is not None:
            inbox = self.last_ready.inbox
            port = int(self.last_ready.http.rsplit(":", 1)[1])
        return [*self.spec.command, "--bind", inbox, "--http-port", str(port), "--watch-stdin"]

    def signal(self, number: int) -> None:
        if self.alive:
            assert self.process is not None
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)

    def kill_group(self) -> None:
        """End the child and whatever it started: it leads a process group of its own."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)


class Supervisor:
    """Owns the child processes. All methods run on one event loop.

    Children hold the read end of a pipe from us as stdin and stop when it closes, so that they end
    with us even if we are killed.
    """

    def __init__(
        self,
        *,
        on_event: Callable[[Event], None],
        on_log: Callable[[str, str], None],
        policy: RestartPolicy | None = None,
    ) -> None:
        self._on_event = on_event
        self._on_log = on_log
        self._policy = policy or RestartPolicy()
        self._children: dict[str, _Child] = {}
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def start(self, specs: Sequence[ChildSpec]) -> list[ReadyLine]:
        """Start children in parallel; return their readiness lines in the order of `specs`.

        Raises ConfigError when one refuses its settings, UnavailableError when one keeps crashing.
        """
        loop = asyncio.get_running_loop()
        started = []
        for spec in specs:
            child = _Child(spec, Backoff(self._policy), loop.create_future())
            # Only the first failure is raised by gather; the others must not warn when collected.
            child.first_ready.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._children[spec.name] = child
            child.life = asyncio.create_task(self._live(child), name=f"life of {spec.name}")
            started.append(child)
        return list(await asyncio.gather(*(child.first_ready for child in started)))

    async def wait_failed(self) -> None:
        """Wait for a failure of the supervisor itself; raise it."""
        await asyncio.shield(self._failed)

    async def _live(self, child: _Child) -> None:
        try:
            await self._restart_loop(child)
        except Exception as error:
            # Without this a child would silently lose its keeper.
            if not child.first_ready.done():
                child.first_ready.set_exception(error)
            elif not self._failed.done():
                self._failed.set_exception(error)

    async def _restart_loop(self, child: _Child) -> None:
        crashes = 0
        while not child.stopping.is_set():
            begin = time.monotonic()
            code = await self._run_once(child)
            if child.stopping.is_set():
                return
            crashes += 1
            if child.last_ready is None:
                if code == EXIT_CONFIG:
                    raise ConfigError(f"{child.spec.name} refused to start, see its message above")
                if crashes >= self._policy.start_attempts:
                    raise UnavailableError(
                        f"{child.spec.name} ended {crashes} times before it was ready,"
                        f" last with {describe_exit(code)}"
                    )
            delay = child.backoff.next_delay_s(time.monotonic() - begin)
            self._on_event(Event(kind="crashed", child=child.spec.name, exit_code=code, restart_in_s=delay))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(child.stopping.wait(), delay)

    async def _run_once(self, child: _Child) -> int:
        """Run the child's process to its end; return its exit code."""
        name, begin = child.spec.name, time.monotonic()
        child.process = process = await asyncio.create_subprocess_exec(
            *child.argv(),
            env=dict(child.spec.env),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            process_group=0,  # a Ctrl-C in the terminal reaches us alone, and we choose the order
        )
        assert process.stdout is not None
        assert process.stderr is not None
        self._on_event(Event(kind="started", child=name))
        if child.stopping.is_set():
            child.signal(signal.SIGTERM)

        def stdout_line(line: str) -> None:
            try:
                ready = msgspec.json.decode(line, type=ReadyLine)
            except msgspec.MsgspecError:
                self._log(name, line)
                return
            child.last_ready = ready
            self._on_event(Event(kind="ready", child=name, ready=ready, took_s=time.monotonic() - begin))
            if not child.first_ready.done():
                child.first_ready.set_result(ready)

        pumps = [
            asyncio.create_task(_Lines(process.stdout).each(stdout_line)),
            asyncio.create_task(_Lines(process.stderr).each(lambda line: self._log(name, line))),
        ]
        code = await process.wait()
        child.kill_group()
        # A grandchild that escaped the group may hold the pipes open: do not wait for it.
        _, pending = await asyncio.wait(pumps, timeout=1.0)
        for pump in pending:
            pump.cancel()
        return code

    def _log(self, name: str, line: str) -> None:
        if line:
            self._on_log(name, line)

    async def stop(self, order: Sequence[Sequence[str]], *, grace_s: float, limit_s: float) -> None:
        """End all children within `limit_s`.

        Groups of names get SIGTERM in `order`, each at most `grace_s` after the one before, so that
        the front of the pipeline can finish its requests while the rest still works.
        """
        end = time.monotonic() + limit_s
        for child in self._children.values():
            child.stopping.set()
        for position, group in enumerate(order, start=1):
            members = [self._children[name] for name in group if name in self._children]
            for child in members:
                child.signal(signal.SIGTERM)
            if position < len(order):
                await self._ended(members, min(grace_s, max(0.0, end - time.monotonic())))
        await self._ended(list(self._children.values()), max(0.0, end - time.monotonic()))
        await self.kill()

    async def kill(self) -> None:
        """End at once what is still there."""
        for child in self._children.values():
            child.stopping.set()
            if child.alive:
                self._on_event(Event(kind="killed", child=child.spec.name))
                child.kill_group()
        lives = [child.life for child in self._children.values() if child.life is not None]
        if lives:
            await asyncio.wait(lives, timeout=2.0)

    @staticmethod
    async def _ended(children: Sequence[_Child], timeout_s: float) -> None:
        lives = [child.life for child in children if child.life is not None]
        if lives:
            await asyncio.wait(lives, timeout=timeout_s)


def describe_exit(code: int) -> str:
    """Return an exit code in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
