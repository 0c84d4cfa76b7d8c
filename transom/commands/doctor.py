"""`transom doctor`: check what this machine gives transom, and say what to do about it.

Probes libraries in processes of their own, because a broken one may crash at import.
"""

from __future__ import annotations

import argparse
import platform
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import orjson

from transom import __version__
from transom.commands.base import Parser, add_json_flag, examples, make_console, write_json
from transom.errors import CheckpointError, ConfigError
from transom.hub import NANO_NAME, is_hub_id, resolve_model
from transom.supervisor import usable_cores

Status = Literal["ok", "warn", "fail"]
_MARKS: dict[str, tuple[str, str]] = {
    "ok": ("ok", "green"),
    "warn": ("warn", "yellow"),
    "fail": ("FAIL", "red"),
}
_PROBE_S = 60.0
_MIB = 1024 * 1024


@dataclass(frozen=True)
class Check:
    """One finding. `advice` says what to do and why; empty when nothing is to be done."""

    name: str
    status: Status
    detail: str
    advice: str = ""


def add_parsers(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "doctor",
        help="check this machine",
        description="Check libraries, limits, ports and the checkpoint. Exit 1 if a check fails.",
        epilog=examples("transom doctor", "transom doctor --port 9000 --json"),
    )
    parser.add_argument("--model", default="mimo-nano", metavar="MODEL", help="(default %(default)s)")
    parser.add_argument("--host", default="127.0.0.1", metavar="HOST", help="(default %(default)s)")
    parser.add_argument("--port", type=int, default=8000, metavar="PORT", help="(default %(default)s)")
    add_json_flag(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    checks = list(run_checks(args))
    failed = any(check.status == "fail" for check in checks)
    if args.json:
        write_json({"version": __version__, "ok": not failed, "checks": [asdict(check) for check in checks]})
        return int(failed)
    console = make_console()
    width = max(len(check.name) for check in checks)
    for check in checks:
        mark, style = _MARKS[check.status]
        console.print(f"{mark:4}", style=style, end="")
        console.print(f"  {check.name:{width}}  {check.detail}")
        if check.advice:
            console.print(f"{'':6}{'':{width}}  -> {check.advice}", style="dim")
    return int(failed)


def run_checks(args: argparse.Namespace) -> Iterable[Check]:
    """Yield the findings in the order in which they are shown."""
    yield _python()
    yield from (_torch(), _pyav(), _torchcodec())
    yield check_cores(usable_cores())
    yield check_shm(Path("/dev/shm"))
    yield check_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))
    yield check_numa_balancing(Path("/proc/sys/kernel/numa_balancing"))
    yield check_listen(args.host, args.port)
    yield check_model(args.model)


def _python() -> Check:
    version = platform.python_version()
    good = (3, 11) <= sys.version_info[:2] < (3, 13)
    return Check("python", "ok" if good else "fail", version, "" if good else "use Python 3.11 or 3.12")


def _probe(code: str) -> tuple[dict[str, str], str]:
    """Run code that prints a JSON object in a fresh interpreter; return (object, what went wrong)."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=_PROBE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {}, f"no answer within {_PROBE_S:.0f} s"
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return {}, lines[-1] if lines else f"ended with code {done.returncode}"
    return orjson.loads(done.stdout), ""


def _torch() -> Check:
    found, problem = _probe(
        "import json, torch; gpu = torch.cuda.is_available();"
        "print(json.dumps({'version': torch.__version__, 'threads': str(torch.get_num_threads()),"
        " 'gpu': torch.cuda.get_device_name(0) if gpu else ''}))"
    )
    if problem:
        return Check("torch", "fail", problem, "pip install 'torch>=2.11'")
    where = found["gpu"] or f"cpu, {found['threads']} threads"
    return Check("torch", "ok", f"{found['version']} on {where}")


def _pyav() -> Check:
    found, problem = _probe(
        "import json, av; print(json.dumps({'version': av.__version__,"
        " 'avcodec': '.'.join(map(str, av.library_versions['libavcodec']))}))"
    )
    if problem:
        return Check("ffmpeg (PyAV)", "fail", problem, "pip install 'av>=14': it brings its own FFmpeg")
    return Check("ffmpeg (PyAV)", "ok", f"av {found['version']}, libavcodec {found['avcodec']}")


def _torchcodec() -> Check:
    found, problem = _probe(
        "import json, torchcodec.decoders, importlib.metadata as m;"
        "print(json.dumps({'version': m.version('torchcodec')}))"
    )
    if problem:
        return Check("torchcodec", "ok", "not there, and not needed: video is decoded by PyAV")
    return Check("torchcodec", "ok", found["version"])


def check_cores(cores: int) -> Check:
    if cores >= 2:
        return Check("cpu", "ok", f"{cores} cores")
    return Check("cpu", "warn", f"{cores} core", "the stages take turns on it: answers take longer")


def check_shm(path: Path) -> Check:
    """Judge the size of the shared-memory file system."""
    try:
        usage = shutil.disk_usage(path)
    except OSError as error:
        return Check("/dev/shm", "fail", str(error), "mount a tmpfs there: embeddings are shared through it")
    detail = f"{usage.total // _MIB} MiB, {usage.free // _MIB} MiB free"
    if usage.free < 256 * _MIB:
        advice = "give it 1 GiB or more (docker: --shm-size 1g): the shared embedding cache lives there"
        return Check("/dev/shm", "warn", detail, advice)
    return Check("/dev/shm", "ok", detail)


def check_open_files(soft: int, hard: int) -> Check:
    detail = f"open files: {soft} (at most {hard})"
    if soft != resource.RLIM_INFINITY and soft < 4096:
        return Check("ulimits", "warn", detail, "ulimit -n 65536: each client and peer needs a descriptor")
    return Check("ulimits", "ok", detail)


def check_numa_balancing(path: Path) -> Check:
    """Judge the kernel's automatic NUMA balancing."""
    try:
        value = path.read_text(encoding="ascii").strip()
    except OSError:
        return Check("numa balancing", "ok", "the kernel has none")
    if value == "0":
        return Check("numa balancing", "ok", "off")
    return Check(
        "numa balancing",
        "warn",
        f"on ({value})",
        "switch it off (sysctl -w kernel.numa_balancing=0): the kernel unmaps pages to see who uses them,"
        " and the page faults stall the threads that launch GPU kernels and read the host KV pool",
    )


def check_listen(host: str, port: int) -> Check:
    """Try to listen where the HTTP API would."""
    name = f"port {port}"
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        advice = "stop what listens there, or choose another --port"
        return Check(name, "warn", f"{host}: {error.strerror or error}", advice)
    return Check(name, "ok", f"free on {host}")


def check_model(model: str) -> Check:
    """Look for the checkpoint's files without loading or downloading them."""
    try:
        folder = _folder(model)
    except CheckpointError as error:
        return Check("checkpoint", "fail", error.message, "reinstall transom, or give --model a folder")
    if folder is None:
        advice = "a hub id is downloaded at the first start; else give --model a checkpoint folder"
        return Check("checkpoint", "warn", f"{model}: not on this machine", advice)
    missing = [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]
    weights = list(folder.rglob("*.safetensors"))
    if not weights:
        missing.append("*.safetensors")
    if missing:
        advice = "give --model a complete checkpoint folder"
        return Check("checkpoint", "fail", f"{folder} lacks {', '.join(missing)}", advice)
    size = sum(file.stat().st_size for file in weights)
    return Check("checkpoint", "ok", f"{model}: {size / _MIB:.1f} MiB in {folder}")


def _folder(model: str) -> Path | None:
    """Return the checkpoint's folder, or None when it would have to be downloaded."""
    if model == NANO_NAME or Path(model).expanduser().is_dir():
        return resolve_model(model)
    if not is_hub_id(model):
        raise ConfigError(f"--model {model!r} is no folder, not {NANO_NAME!r} and no hub id like 'org/name'")
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(model, "config.json")
    except HFValidationError as error:
        raise ConfigError(f"--model {model!r} is no folder and no hub id: {error}") from None
    return Path(found).parent if isinstance(found, str) else None
