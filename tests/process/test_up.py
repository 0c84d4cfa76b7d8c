"""`transom up` as a person uses it: start, restart after a crash, every way to stop."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.patience import PATIENCE_S
from tests.process.conftest import STOP_S
from transom.shared_cache.embedding_cache import ShmEmbeddingCache
from transom.shared_cache.opening import SHM_FOLDER, arena_name, sweep_orphans

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(1800)]

QUESTION = {"messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 8, "temperature": 0}


def request(url: str, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=PATIENCE_S)
    try:
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def transom(*argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "transom", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def ask(url: str) -> tuple[int, Any]:
    return request(url, "POST", "/v1/chat/completions", QUESTION)


def test_commands_against_the_running_pipeline(base_url: str) -> None:
    chat = transom("chat", "--url", base_url, "--max-tokens", "8", "Who are you?")
    assert chat.returncode == 0, chat.stderr
    assert chat.stdout.strip()
    assert transom("health", base_url).returncode == 0
    bench = transom(
        "bench", "chat", "--url", base_url, "--requests", "6", "--concurrency", "3", "--warmup", "1",
        "--mix", "text=1,image=1,audio=1,video=1", "--max-tokens", "4", "--json",
    )  # fmt: skip
    assert bench.returncode == 0, bench.stderr
    result = json.loads(bench.stdout)
    assert (result["requests"], result["failed"]) == (6, 0)
    assert 0 < result["ttft_ms"]["p50"] <= result["e2e_ms"]["max"]


def test_the_pipeline_prints_a_curl_line_that_works(pipeline: Any) -> None:
    line = next(line for line in pipeline.log(last=1_000_000).splitlines() if line.startswith("curl "))
    done = subprocess.run(
        ["bash", "-c", line + " -sS"], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    assert json.loads(done.stdout)["choices"][0]["message"]["role"] == "assistant"


def test_each_stage_gets_its_share_of_the_cores(pipeline: Any) -> None:
    cores = len(os.sched_getaffinity(0))
    share = str(max(1, cores // 4))
    for stage in ("encoder", "prefill", "decode"):
        for pid in pipeline.stage_pids(stage):
            with open(f"/proc/{pid}/environ", "rb") as file:
                assert f"OMP_NUM_THREADS={share}".encode() in file.read().split(b"\0")
    assert len(pipeline.stage_pids("encoder")) == 2


def test_killed_stages_come_back_and_answers_with_them(own_pipeline: Any) -> None:
    running = own_pipeline()
    first = ask(running.url)
    assert first[0] == 200, running.log()
    for stage in ("decode", "encoder", "prefill", "gateway"):
        (old,) = running.stage_pids(stage)
        os.kill(old, signal.SIGKILL)
        end = time.monotonic() + 600
        while True:
            # Between the crash and the restart an error is right; a wrong answer never is.
            try:
                status, body = request(running.url, "GET", "/ready")
            except OSError:
                status = 0
            pids = running.stage_pids(stage)
            if status == 200 and pids and old not in pids:
                status, body = ask(running.url)
                if status == 200:
                    break
            assert time.monotonic() < end, f"{stage} did not come back\n{running.log()}"
            time.sleep(0.1)
        assert body["choices"][0]["message"] == first[1]["choices"][0]["message"]
        assert f"{stage} ended with signal SIGKILL; restart in 0.5 s" in running.log()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_the_supervisor(own_pipeline: Any, number: signal.Signals) -> None:
    running = own_pipeline()
    assert len(running.pids()) >= 5
    took_s = running.stop(number)
    left = running.leaks()
    if number is signal.SIGKILL and left:
        # Its stages stop by themselves, and end all the same where they can't in time: then their memory
        # waits for the next start.
        assert all(one.startswith("/dev/shm/transom-emb-") for one in left), left
        sweep_orphans()
        left = running.leaks()
    assert left == []
    assert took_s < STOP_S
    assert running.process.returncode == (0 if number is signal.SIGINT else -number)


def arenas() -> set[str]:
    return {entry.name for entry in Path("/dev/shm").iterdir() if entry.name.startswith("transom-emb-")}


def test_what_is_killed_at_the_end_leaves_nothing(own_pipeline: Any) -> None:
    """An encoder that can't stop in time, as on a machine that stands still, can't tidy up either."""
    running = own_pipeline()
    (arena,) = mapped_by(running.pids())
    (encoder,) = running.stage_pids("encoder")
    os.kill(encoder, signal.SIGSTOP)
    assert running.stop(signal.SIGINT) < STOP_S
    assert "encoder did not stop in time and was killed" in running.log()
    assert running.leaks() == []
    assert arena not in arenas()


def mapped_by(pids: list[int]) -> set[str]:
    """Return the arenas that processes use."""
    maps = "".join(Path(f"/proc/{pid}/maps").read_text(encoding="utf-8") for pid in pids)
    return {name for name in arenas() if f"/dev/shm/{name}" in maps}


def test_what_a_murdered_pipeline_leaves_goes_with_the_next_start(own_pipeline: Any) -> None:
    running = own_pipeline()
    (arena,) = mapped_by(running.pids())
    # All at once, so that nobody can tidy up: stopped first, then killed.
    pids = running.pids()
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            os.kill(pid, number)
    running.stop()
    end = time.monotonic() + PATIENCE_S
    while running.pids():
        assert time.monotonic() < end
    assert arena in arenas()
    own_pipeline()
    assert arena not in arenas()


def test_a_start_without_encoders_removes_what_others_left(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")  # no pictures, no sounds, and no model that could start
    said = ""
    for _ in range(5):
        name = arena_name(uuid.uuid4().hex, os.geteuid())
        cache = ShmEmbeddingCache(SHM_FOLDER / name, 1 << 20)
        assert name in arenas()
        cache.close()
        done = transom("up", "--port", "0", "--model", str(tmp_path))
        assert done.returncode == 2
        assert name not in arenas()
        said += done.stderr
        if f"removed /dev/shm/{name}: its processes are gone" in done.stderr:
            break  # else another pipeline on this machine has started at the same time, and was first
    else:
        raise AssertionError(said)


def test_stopping_while_starting(own_pipeline: Any) -> None:
    """Ctrl-C in the middle of a start, when no stage is ready yet."""
    running = own_pipeline(wait=False)
    running.until_logged("starting encoder, prefill, decode, then the gateway")
    assert running.stop(signal.SIGINT) < STOP_S
    assert running.process.returncode == 0
    assert "Traceback" not in running.log()
    assert "is ready at" not in running.log()


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--model", "/no/such/folder"), "/no/such/folder"),
        (("--port", "99999"), "99999 is out of range, allowed 0 to 65535"),
        (("--encoders", "0"), "0 is out of range"),
        (("--host", "no.such.host.invalid"), "no.such.host.invalid"),
        (("--config", "/no/such.toml"), "/no/such.toml"),
    ],
)
def test_what_can_not_start_is_one_line(flags: tuple[str, ...], told: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "transom", "up", *flags],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert told in done.stderr


def test_a_taken_port_is_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = transom("up", "--port", port)
    assert done.returncode == 2
    assert done.stderr == (
        f"transom up: can't listen on 127.0.0.1:{port}: Address already in use; choose another --port\n"
    )
