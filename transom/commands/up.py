"""`transom up`: the whole pipeline on this machine, supervised, with one command.

Decides which processes run with which flags and threads, and shows what the supervisor reports.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.text import Text

import transom
from transom.commands.base import Parser, examples, make_console
from transom.commands.stages import STAGES
from transom.config import add_flags, client_api_key, config_from_args, load_config, setting
from transom.errors import ConfigError, TransomError
from transom.hub import resolve_model
from transom.supervisor import ChildSpec, Event, ReadyLine, Supervisor, describe_exit, usable_cores

_STOP_LIMIT_S = 4.3  # all processes are gone within 5 s of Ctrl-C
_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")


@dataclass(frozen=True, kw_only=True)
class UpConfig:
    """Settings of `transom up`; those of the stages come from the same TOML file and environment."""

    model: str = setting(
        "mimo-nano", "checkpoint: mimo-nano, a folder, or a hub id org/name", metavar="MODEL"
    )
    host: str = setting("127.0.0.1", "host that the HTTP API listens on", metavar="HOST")
    port: int = setting(8000, "port of the HTTP API; 0: any free one", ge=0, le=65535, metavar="PORT")
    encoders: int = setting(1, "encoder processes; none for a model without media", ge=1, le=64, metavar="N")
    encoder_ranks: int = setting(
        0, "ranks of each encoder; 0: as the encoder's own setting says", ge=0, le=64, metavar="N"
    )
    prefills: int = setting(1, "prefill processes", ge=1, le=64, metavar="N")
    decodes: int = setting(1, "decode processes; 0: prefill processes decode too", ge=0, le=64, metavar="N")
    device: str = setting("", "torch device of all stages, if not each stage's own setting", metavar="DEVICE")
    log_level: str = setting(
        "", "log level of all stages", choices=("debug", "info", "warning", "error"), metavar="LEVEL"
    )
    drain_s: float = setting(2.0, "how long running requests may finish after Ctrl-C", ge=0, le=3)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The processes of a run: workers first, then the gateway with their addresses."""

    workers: dict[str, ChildSpec]
    gateway: ChildSpec
    kinds: dict[str, str]  # worker name -> stage


def add_parsers(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "up",
        help="run the whole pipeline on this machine",
        description="Start encoders, prefill and decode workers and the gateway; restart what crashes;"
        " stop all of it with Ctrl-C.",
        epilog=examples(
            "transom up",
            "transom up --port 9000 --encoders 2",
            "transom up --encoder-ranks 4",
            "transom up --prefills 2 --decodes 0",
            "transom up --model ./MiMo-V2.5 --config fleet.toml",
        ),
    )
    add_flags(parser, UpConfig)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    config = config_from_args(UpConfig, "up", args)
    # A missing or remote checkpoint is dealt with once, before any process.
    if not takes_media(resolve_model(config.model)):
        config = dataclasses.replace(config, encoders=0)
    plan = make_plan(config, toml_path=args.config, environ=os.environ)
    check_port(config.host, config.port)
    return asyncio.run(Up(config, plan).run())


def takes_media(folder: Path) -> bool:
    """Tell whether a checkpoint has anything for an encoder to do."""
    try:
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # the stages say what is wrong with it, each for its part
        return True
    return not isinstance(raw, dict) or bool(raw.get("vision_config") or raw.get("audio_config"))


def make_plan(config: UpConfig, *, toml_path: str | None, environ: Mapping[str, str]) -> Plan:
    """Return what to start. Every stage's settings are checked here, before anything starts."""
    counts = {"encoder": config.encoders, "prefill": config.prefills, "decode": config.decodes}
    own = load_config(STAGES["encoder"].config, "encoder", toml_path=toml_path, environ=environ)
    ranks = config.encoder_ranks or int(getattr(own, "ranks", 1))
    engines = sum(counts.values()) + config.encoders * (ranks - 1)
    share = max(1, usable_cores() // engines)
    workers, kinds = {}, {}
    for stage, count in counts.items():
        for number in range(count):
            name = f"{stage}-{number}" if count > 1 else stage
            # An encoder's ranks share its threads.
            threads = share * ranks if stage == "encoder" else share
            workers[name] = _child(name, stage, config, threads, toml_path, environ)
            kinds[name] = stage
    gateway = _child("gateway", "gateway", config, 1, toml_path, environ)
    return Plan(workers=workers, gateway=gateway, kinds=kinds)


def _child(
    name: str, stage: str, config: UpConfig, share: int, toml_path: str | None, environ: Mapping[str, str]
) -> ChildSpec:
    own = load_config(STAGES[stage].config, stage, toml_path=toml_path, environ=environ)
    threads = own.threads or share
    command = [*_python(), stage, "--model", config.model, "--threads", str(threads)]
    if toml_path:
        command += ["--config", str(toml_path)]
    if stage == "encoder" and config.encoder_ranks:
        command += ["--ranks", str(config.encoder_ranks)]
    if config.device:
        command += ["--device", config.device]
    if config.log_level:
        command += ["--log-level", config.log_level]
    drain_s = config.drain_s if stage == "gateway" else config.drain_s / 2
    host = config.host if stage == "gateway" else "127.0.0.1"
    command += ["--drain-timeout-s", str(drain_s), "--http-host", host]
    # Torch reads these at import; processes that share cores must not spin on each other's.
    pools = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    env = {**environ, **dict.fromkeys(pools, str(threads)), "PYTHONUNBUFFERED": "1"}
    port = config.port if stage == "gateway" else 0
    return ChildSpec(name=name, command=tuple(command), env=env, http_port=port)


def _python() -> list[str]:
    """Return the interpreter call that finds this very package, and nothing by chance in the cwd."""
    root = Path(transom.__file__).resolve().parent.parent
    isolate = [] if Path.cwd().resolve() == root else ["-P"]
    return [sys.executable, *isolate, "-m", "transom"]


def check_port(host: str, port: int) -> None:
    """Raise ConfigError at once if the API's port is taken, rather than after loading a model."""
    if not port:
        return
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise ConfigError(f"--host {host}: {error.strerror or error}") from None
    family, kind, proto, _, address = infos[0]
    with socket.socket(family, kind, proto) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen(1)
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError(f"can't listen on {host}:{port}: {reason}; choose another --port") from None


class Up:
    """One run of `transom up`, from start to the end of the last process."""

    def __init__(self, config: UpConfig, plan: Plan) -> None:
        self._config = config
        self._plan = plan
        self._out = make_console()
        self._log = make_console(stderr=True)
        names = [*plan.workers, plan.gateway.name]
        self._width = max(len(name) for name in names)
        self._colour = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(names)}
        self._waiting = set(names)
        self._killed: set[str] = set()
        self._status: Any = None
        self._supervisor: Supervisor | None = None

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        interrupted = asyncio.Event()
        again = asyncio.Event()

        def on_signal() -> None:
            (again if interrupted.is_set() else interrupted).set()

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, on_signal)
        self._supervisor = supervisor = Supervisor(on_event=self._event, on_log=self._log_line)
        work = asyncio.create_task(self._serve(supervisor))
        stop = asyncio.create_task(interrupted.wait())
        try:
            await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                await work
            return 0
        finally:
            work.cancel()
            stop.cancel()
            await self._stop(supervisor, again)
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await work

    async def _serve(self, supervisor: Supervisor) -> None:
        """Start everything, tell the person, and stay until the supervisor fails."""
        if not self._config.encoders:
            self._sweep()
        with self._progress():
            self._say(f"starting {', '.join(self._plan.workers)}, then the gateway")
            specs = list(self._plan.workers.values())
            ready = dict(zip(self._plan.workers, await supervisor.start(specs), strict=True))
            gateway = (await supervisor.start([self._gateway(ready)]))[0]
            url = local_url(gateway.http)
            await self._until_ready(url)
            model = await self._model_id(url)
        self._out.print(f"transom is ready at {url}  (model {model}, Ctrl-C stops it)", style="bold green")
        self._out.print(curl_line(url, model))
        await supervisor.wait_failed()

    def _sweep(self) -> None:
        """Remove what killed encoders left. Encoders do so themselves: they know what they will use again."""
        from transom.shared_cache.opening import sweep_orphans

        for name in sweep_orphans():
            self._say(f"removed /dev/shm/{name}: its processes are gone")

    def _gateway(self, ready: dict[str, ReadyLine]) -> ChildSpec:
        command = [*self._plan.gateway.command]
        for name, line in ready.items():
            command += [f"--{self._plan.kinds[name]}", line.inbox]
        spec = self._plan.gateway
        return ChildSpec(name=spec.name, command=tuple(command), env=spec.env, http_port=spec.http_port)

    async def _until_ready(self, url: str) -> None:
        from transom.commands.health import probe

        reason = ""
        while True:
            status, text = await asyncio.to_thread(probe, url, "/ready", timeout_s=2.0)
            if status == 200:
                return
            if text != reason:
                reason = text
                self._say(f"waiting for the pipeline: {text}")
            await asyncio.sleep(0.1)

    async def _model_id(self, url: str) -> str:
        from transom.client import ChatClient

        try:
            async with ChatClient(url, api_key=client_api_key()) as client:
                return (await client.models())[0]
        except TransomError:  # with API keys set the list is not for us
            return self._config.model

    async def _stop(self, supervisor: Supervisor, again: asyncio.Event) -> None:
        self._say("stopping")
        stopping = asyncio.create_task(
            supervisor.stop(
                [[self._plan.gateway.name], list(self._plan.workers)],
                grace_s=self._config.drain_s + 0.7,
                limit_s=_STOP_LIMIT_S,
            )
        )
        impatient = asyncio.create_task(again.wait())
        await asyncio.wait({stopping, impatient}, return_when=asyncio.FIRST_COMPLETED)
        if not stopping.done():
            await supervisor.kill()
        impatient.cancel()
        await stopping
        if any(self._plan.kinds.get(name) == "encoder" for name in self._killed):
            self._sweep()

    @contextlib.contextmanager
    def _progress(self) -> Any:
        """Show a spinner with what is still missing, on a terminal only."""
        with self._log.status("starting") as status:
            self._status = status
            self._show_waiting()
            try:
                yield
            finally:
                self._status = None

    def _show_waiting(self) -> None:
        if self._status is not None:
            self._status.update(f"starting: {', '.join(sorted(self._waiting)) or 'the pipeline'}")

    def _event(self, event: Event) -> None:
        name = event.child
        if event.kind == "ready":
            self._waiting.discard(name)
            self._say(f"{name} is ready after {event.took_s:.1f} s")
        elif event.kind == "crashed":
            self._waiting.add(name)
            code = describe_exit(event.exit_code or 0)
            self._say(f"{name} ended with {code}; restart in {event.restart_in_s:.1f} s", style="bold red")
        elif event.kind == "killed":
            self._killed.add(name)
            self._say(f"{name} did not stop in time and was killed", style="red")
        self._show_waiting()

    def _say(self, text: str, style: str | None = None) -> None:
        # A closed terminal must not end the run: its stages would go down with it.
        with contextlib.suppress(OSError):
            self._log.print(f"{'transom':{self._width}} | {text}", style=style)

    def _log_line(self, name: str, line: str) -> None:
        with contextlib.suppress(OSError):
            # In one piece: the spinner would wipe out a line that is not complete.
            prefix = (f"{name:{self._width}} | ", self._colour.get(name, ""))
            self._log.print(Text.assemble(prefix, line))


def local_url(http: str) -> str:
    """Return a URL that works on this machine for a listener's address."""
    return http.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


def curl_line(url: str, model: str) -> str:
    """Return a command line that asks the server something."""
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Who are you?"}}]}}'
    return f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"
