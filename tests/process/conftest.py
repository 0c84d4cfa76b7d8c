"""The real pipeline for end-to-end tests: `transom up` with the packaged checkpoint on free ports."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S

# Test modules here share `media`, which importlib mode would not find.
sys.path.insert(0, str(Path(__file__).parent))

_READY = re.compile(r"transom is ready at (http://\S+)")
_START_S = 600.0  # three processes that import torch, on two cores that others use too
# `transom up` itself promises 5 s, by killing what takes longer: without that it would never end. A machine
# that stands still for a minute is late in telling us.
STOP_S = 120.0


class Pipeline:
    """A running `transom up`. Everything that it starts inherits a mark in its environment."""

    def __init__(self, *flags: str, env: dict[str, str] | None = None, wait: bool = True) -> None:
        self.mark = uuid.uuid4().hex
        self._shm_before = set(_shm_entries(self.mark))
        self._lines: list[str] = []
        self._printed = threading.Condition()
        self._urls: queue.Queue[str | None] = queue.Queue()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "transom", "up", "--port", "0", *flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, **(env or {}), **self._marks()},
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = self._wait_ready() if wait else ""

    def _marks(self) -> dict[str, str]:
        """A scope of its own, so that no other pipeline's embeddings are found in the cache."""
        return {"PIPELINE_MARK": self.mark, "TRANSOM_ENCODER_EMBEDDING_CACHE_SCOPE": self.mark}

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._printed:
                self._lines.append(line)
                self._printed.notify_all()
            if found := _READY.search(line):
                self._urls.put(found.group(1))
        self._urls.put(None)

    def _wait_ready(self) -> str:
        try:
            url = self._urls.get(timeout=_START_S)
        except queue.Empty:
            url = None
        if url is None:
            with contextlib.suppress(Exception):
                self.stop()
            pytest.fail(f"`transom up` was not ready within {_START_S:.0f} s:\n{self.log()}", pytrace=False)
        return url

    def log(self, last: int = 200) -> str:
        """Return the last lines that the pipeline printed."""
        return "".join(self._lines[-last:])

    def until_logged(self, text: str) -> None:
        """Wait until the pipeline has printed `text`."""
        self.until(lambda: any(text in line for line in self._lines), repr(text))

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until a condition on what has been printed holds; lines of several processes come late."""
        with self._printed:
            found = self._printed.wait_for(condition, PATIENCE_S)
        assert found, f"no {what} within {PATIENCE_S} s:\n{self.log()}"

    def pids(self) -> list[int]:
        """Return all living processes of this pipeline, the supervisor included."""
        return sorted(_marked(self.mark))

    def stage_pids(self, stage: str) -> list[int]:
        """Return the processes of one stage, e.g. `encoder`."""
        words = ["-m", "transom", stage]
        found = []
        for pid in self.pids():
            argv = _read_proc(pid, "cmdline").split("\0")
            if any(argv[i : i + 3] == words for i in range(len(argv))):
                found.append(pid)
        return found

    def stop(self, number: int = signal.SIGTERM) -> float:
        """End the pipeline; return the seconds it took. Kills what stays."""
        begin = time.monotonic()
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
        took_s = time.monotonic() - begin
        self._reader.join(PATIENCE_S)
        if self.process.stdout is not None:
            self.process.stdout.close()
        return took_s

    def leaks(self, limit_s: float = STOP_S) -> list[str]:
        """Return what is left after the end: processes and shared memory. Waits a little for both."""
        end = time.monotonic() + limit_s
        while True:
            left = [f"process {pid}: {_read_proc(pid, 'cmdline')!r}" for pid in self.pids()]
            new = [name for name in _shm_entries(self.mark) if name not in self._shm_before]
            left += [f"/dev/shm/{name}" for name in new if not _mapped_by_someone(name)]
            if not left or time.monotonic() > end:
                break
            time.sleep(0.05)
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return left


def _shm_entries(mark: str) -> list[str]:
    """Return the shared-memory entries that may be ours; other programs on the machine have theirs.

    The name of an arena shows its scope: those of other encoders that tests have killed are not ours.
    """
    names = [entry.name for entry in Path("/dev/shm").iterdir() if entry.name.startswith(("transom", "psm_"))]
    return [name for name in names if mark in name or not name.startswith("transom-emb-")]


def _mapped_by_someone(name: str) -> bool:
    """Tell whether a living process maps an entry: then it is not what our processes left behind."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return any(f"/dev/shm/{name}" in _read_proc(pid, "maps") for pid in pids)


def _marked(mark: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and f"PIPELINE_MARK={mark}" in _read_proc(int(entry.name), "environ"):
            found.append(int(entry.name))
    return found


def _read_proc(pid: int, name: str) -> str:
    """Return a file of /proc; empty for a process that has ended (a zombie's files are empty too)."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().decode("utf-8", "replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""


@pytest.fixture(scope="session")
def media_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder below which the shared pipeline's encoders may read files."""
    return tmp_path_factory.mktemp("media")


@pytest.fixture(scope="session")
def pipeline(media_folder: Path) -> Iterator[Pipeline]:
    """The one pipeline that most end-to-end tests share: two encoders, one prefill, one decode."""
    running = Pipeline("--encoders", "2", env={"TRANSOM_ENCODER_MEDIA_FOLDERS": str(media_folder)})
    yield running
    took_s = running.stop()
    leaks = running.leaks()
    assert not leaks, f"left behind: {leaks}\n{running.log()}"
    assert running.process.returncode == 0, running.log()
    assert took_s < STOP_S, f"stopping took {took_s:.1f} s\n{running.log()}"


@pytest.fixture(scope="session")
def base_url(pipeline: Pipeline) -> str:
    """The base URL of the shared pipeline, without /v1."""
    return pipeline.url


@pytest.fixture
def own_pipeline() -> Iterator[type[Pipeline]]:
    """Starts pipelines of a test's own, which it may hurt; ends them and checks for leaks."""
    started: list[Pipeline] = []

    class Own(Pipeline):
        def __init__(self, *flags: str, env: dict[str, str] | None = None, wait: bool = True) -> None:
            started.append(self)
            super().__init__(*flags, env=env, wait=wait)

    yield Own
    for running in started:
        running.stop()
        assert not running.leaks(), running.log()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Show the pipeline's own log below the failure of a test that used it."""
    report = yield
    if report.failed and "pipeline" in getattr(item, "funcargs", {}):
        report.sections.append(("log of transom up", item.funcargs["pipeline"].log()))
    return report
