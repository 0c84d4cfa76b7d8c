"""What the gateway adds to a request, against a pretended model, beside other proxies in the same run.

Runs in `transom bench gateway`, Linux only. Every round measures each contestant, in a rotated order, so that
a busy machine troubles all of them alike; figures are medians over the rounds. `bench/results/gateway.md`
says what is measured and what is not.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import IO, Any

import uvloop
from rich.table import Table

from transom.bench.added_latency import MODES, Contestant, Figures, Load, run_rounds, until_served
from transom.bench.mock_fleet import STAGES
from transom.bench.origin import origin
from transom.bench.processes import Child
from transom.bench.report import append_rows, progress_bar
from transom.commands.base import make_console, write_json
from transom.errors import ConfigError, TransomError, UnavailableError

EXAMPLES = (
    "transom bench gateway",
    "transom bench gateway --sglang-router-python /opt/router/bin/python --out bench/results/gateway.jsonl",
    "transom bench gateway --rounds 7 --requests 500 --json",
)
_MODEL = "mimo-nano"
_FIGURES = {
    "added_p50_us": "added p50",
    "added_p99_us": "added p99",
    "token_p50_us": "token p50",
    "token_p99_us": "token p99",
    "cpu_us_per_request": "CPU/request",
    "requests_per_core_s": "requests/s per core",
    "requests_per_s": "requests/s",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rounds", type=int, default=5, metavar="N", help="of all contestants (default %(default)s)"
    )
    parser.add_argument(
        "--requests", type=int, default=300, metavar="N",
        help="one after the other, for the latency of a round (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--load-requests", type=int, default=1000, metavar="N",
        help="over all connections, for the CPU time of a round (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--concurrency", type=int, default=32, metavar="N", help="connections (default %(default)s)"
    )
    parser.add_argument("--tokens", type=int, default=32, metavar="N", help="an answer (default %(default)s)")
    parser.add_argument(
        "--step-ms", type=float, default=5.0, metavar="MS",
        help="between the tokens of a streamed answer; whole answers come at once (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--sglang-router-python", default="", metavar="FILE",
        help="python of an environment with sglang-router, to measure that too",
    )  # fmt: skip
    parser.add_argument("--out", default="", metavar="FILE", help="append one JSON row a case to this file")


@dataclass
class Case:
    """The figures of a contestant in one mode, one value a round; `skipped` says why there are none."""

    contestant: str
    mode: str
    rounds: dict[str, list[float]] = field(default_factory=dict)
    skipped: str | None = None

    def add(self, figures: Figures) -> None:
        """Take the figures of a round."""
        for name, value in figures.items():
            self.rounds.setdefault(name, []).append(round(value, 1))

    def row(self) -> dict[str, Any]:
        """Return the medians, with the values that they come from."""
        medians = {
            name: round(statistics.median(self.rounds[name]), 1) if name in self.rounds else None
            for name in _FIGURES
        }
        named = {"contestant": self.contestant, "mode": self.mode, "skipped": self.skipped}
        return named | medians | {"by_round": self.rounds}


def run(args: argparse.Namespace) -> int:
    """Run the rounds; print a table, or one JSON object when asked."""
    least = {"rounds": 1, "requests": 10, "load_requests": 10, "concurrency": 1, "tokens": 2}
    for name, low in least.items():
        if getattr(args, name) < low:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least {low}")
    if not 0 < args.step_ms <= 1000:
        raise ConfigError(f"--step-ms {args.step_ms}: must be above 0 and at most 1000")
    load = Load(
        args.rounds, args.requests, args.load_requests, args.concurrency, args.tokens, args.step_ms / 1000
    )
    head = origin("gateway") | asdict(load) | {"cores": os.cpu_count()}
    rows = [case.row() for case in measure(load, args.sglang_router_python, quiet=args.json)]
    if args.out:
        append_rows(args.out, [head | row for row in rows])
    if args.json:
        write_json(head | {"rows": rows})
    else:
        _show(rows)
    return 0


def measure(load: Load, router_python: str, *, quiet: bool) -> list[Case]:
    """Start everything, run all rounds and return the cases in the order of the table."""
    with tempfile.TemporaryFile() as log, ExitStack() as stack:
        try:
            mock = stack.enter_context(Child([sys.executable, "-m", "transom.bench.mock_fleet"], log=log))
            contestants, skipped = _start(mock, router_python, log, stack)
            cases = {(one.name, mode): Case(one.name, mode) for one in contestants for mode in MODES}
            with progress_bar("measured", load.rounds * len(cases), quiet=quiet) as advance:

                def done(name: str, mode: str, figures: Figures) -> None:
                    cases[name, mode].add(figures)
                    advance()

                uvloop.run(run_rounds(load, mock.line["http"], contestants, done))
        except UnavailableError as error:
            raise UnavailableError(f"{error.message}; its log ends with: {_last_lines(log)}") from None
        return [*cases.values(), *skipped]


def _last_lines(log: IO[bytes]) -> str:
    log.seek(0)
    return " | ".join(log.read().decode("utf-8", "replace").splitlines()[-5:])


def _start(
    mock: Child, router_python: str, log: IO[bytes], stack: ExitStack
) -> tuple[list[Contestant], list[Case]]:
    url = mock.line["http"]
    proxy = stack.enter_context(Child([sys.executable, "-m", "transom.bench.plain_proxy", url], log=log))
    inboxes = [part for stage in STAGES for part in (f"--{stage}", mock.line[stage])]
    command = [sys.executable, "-m", "transom", "gateway", "--http-port", "0", "--model", _MODEL, *inboxes]
    gateway = stack.enter_context(Child(command, log=log))
    contestants = [
        Contestant("no proxy", url, "mock"),
        Contestant("aiohttp proxy", proxy.line["http"], "mock", proxy),
        Contestant("transom gateway", gateway.line["http"], _MODEL, gateway),
    ]
    for one in contestants:
        asyncio.run(until_served(one))
    problem = "--sglang-router-python names no environment that has it"
    if router_python:
        try:
            return [*contestants, _start_router(router_python, url, log, stack)], []
        except TransomError as error:
            problem = error.message
    return contestants, [Case("sglang-router", mode, skipped=problem) for mode in MODES]


def _start_router(python: str, url: str, log: IO[bytes], stack: ExitStack) -> Contestant:
    """Start SGLang's router in its HTTP mode with the settings that it ships with."""
    asked = "import importlib.metadata as m; print(m.version('sglang-router'))"
    try:
        found = subprocess.run([python, "-c", asked], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        raise UnavailableError(f"{python} has no sglang-router") from None
    with ExitStack() as sockets:
        probes = [sockets.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        port, metrics_port = (str(probe.getsockname()[1]) for probe in probes)
    argv = [
        python, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", port,
        "--worker-urls", url, "--prometheus-port", metrics_port, "--log-level", "error",
    ]  # fmt: skip
    child = stack.enter_context(Child(argv, log=log, ready=False))
    router = Contestant(f"sglang-router {found.stdout.strip()}", f"http://127.0.0.1:{port}", "mock", child)
    asyncio.run(until_served(router))
    return router


def _show(rows: list[dict[str, Any]]) -> None:
    console = make_console()
    table = Table("", "mode", *_FIGURES.values(), title="microseconds")
    for row in rows:
        cells = (row[name] for name in _FIGURES)
        table.add_row(
            row["contestant"], row["mode"], *("-" if cell is None else f"{cell:,.0f}" for cell in cells)
        )
    console.print(table)
    console.print(
        "added: what a request spent outside the model's server, one at a time (stream: to its first token);"
        " token: how late the later tokens came, all connections busy"
    )
    for reason in dict.fromkeys(f"{row['contestant']}: {row['skipped']}" for row in rows if row["skipped"]):
        console.print(reason)
