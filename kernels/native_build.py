"""Compiles kernels/native for this machine, once, and keeps the library in the user's cache.

Runs at the start of llm processes, several at a time perhaps, and as `python -m transom.kernels.native_build`
at the end of an install; with `--prebuild` for kinds of CPUs, into the package of an image without compiler.
Knows no tensors; whoever gets no library from here computes with torch.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

SOURCES = Path(__file__).resolve().parent / "native"
PREBUILT = SOURCES / "prebuilt"  # as trusted as the code beside it
COMPILERS = ("g++", "c++", "clang++")
_FLAGS = (
    "-O3", "-std=c++17", "-shared", "-fPIC", "-fvisibility=hidden", "-ffp-contract=fast", "-fno-math-errno",
    "-pthread",
)  # fmt: skip
_AVX2 = ("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe")
# Kinds of CPUs by the compiler's name, the best first, and what Linux calls their instructions.
_KINDS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "x86-64-v4": (*_AVX2, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"),
        "x86-64-v3": _AVX2,
    },
    "aarch64": {"armv8-a": ("asimd",)},
}
_KEPT_LIBRARIES = 8  # of earlier versions and other machines that share the folder
_POLL_S = 0.05
_SELF_TEST = "import ctypes, sys; sys.exit(ctypes.CDLL(sys.argv[1]).transom_self_test())"


class NoLibraryError(Exception):
    """There is no compiled library; the message says why, in one line."""


def default_cache() -> Path:
    """Return the folder for compiled libraries of this user."""
    return Path.home() / ".cache" / "transom" / "kernels"


class Build:
    """The library for this machine, compiled in the background unless it is in the cache already.

    Safe under concurrent starts of many processes: one compiles, the others wait for its lock. Where nothing
    can be compiled, a prebuilt library for this kind of CPU does, if the package holds one.
    """

    def __init__(self, cache: Path | None = None) -> None:
        self._cache = cache or default_cache()
        self._result: Path | str = ""
        self._thread = threading.Thread(target=self._run, name="compile-kernels", daemon=True)
        self._thread.start()

    def wait(self, wait_s: float) -> Path:
        """Return the library; raise NoLibraryError when there is none after `wait_s` or never will be.

        A compilation that takes longer goes on in the background, for the next start.
        """
        self._thread.join(wait_s)
        if self._thread.is_alive():
            raise NoLibraryError(f"compiling takes longer than {wait_s:g} s; a later start will find it done")
        if isinstance(self._result, str):
            raise NoLibraryError(self._result)
        return self._result

    def _run(self) -> None:
        try:
            self._result = _library(self._cache)
        except (OSError, subprocess.SubprocessError, NoLibraryError) as error:
            self._result = str(error)
            with suppress(OSError):
                self._result = _prebuilt() or str(error)


def _library(cache: Path) -> Path:
    compiler = find_compiler()
    folder = _private_folder(cache)
    path = folder / f"transom-{key(compiler)}.so"
    if not path.exists():
        with _locked(path.with_suffix(".lock")):
            if not path.exists():
                _compile(compiler, path, _flags())
                _prune(folder)
    return path


def find_compiler() -> str:
    """Return the path of a C++ compiler, or raise NoLibraryError."""
    for name in COMPILERS:
        found = shutil.which(name)
        if found:
            return found
    raise NoLibraryError(f"no C++ compiler ({', '.join(COMPILERS)}) on the path")


def key(compiler: str) -> str:
    """Return a digest of everything that the compiled code depends on: sources, flags, compiler and CPU."""
    digest = _sources()
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False, timeout=120).stdout
    digest.update("\0".join((compiler, *_flags(), platform.machine(), _cpu())).encode() + b"\0" + version)
    return digest.hexdigest()[:24]


def _sources() -> hashlib._Hash:
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        if source.suffix in (".h", ".cpp"):
            digest.update(f"{source.name}\0{source.stat().st_size}\0".encode())
            digest.update(source.read_bytes())
    return digest


def _flags() -> tuple[str, ...]:
    arm = platform.machine() in ("aarch64", "arm64")
    return (*_FLAGS, "-mcpu=native" if arm else "-march=native")


def _prebuilt_path(kind: str) -> Path:
    digest = _sources()
    digest.update("\0".join(_FLAGS).encode())
    return PREBUILT / f"transom-{kind}-{digest.hexdigest()[:24]}.so"


def _prebuilt() -> Path | None:
    """Return the best prebuilt library of these sources that works on this CPU."""
    instructions = {word for line in _cpu().splitlines() for word in line.partition(":")[2].split()}
    for kind, needed in _KINDS.get(platform.machine(), {}).items():
        path = _prebuilt_path(kind)
        if instructions.issuperset(needed) and path.exists() and _fails(path) == 0:
            return path
    return None


def prebuild() -> list[Path]:
    """Compile a library for each kind of CPU of this architecture; raise NoLibraryError if one fails."""
    compiler = find_compiler()
    kinds = _KINDS.get(platform.machine())
    if kinds is None:
        raise NoLibraryError(f"no kinds of {platform.machine()} CPUs are known")
    PREBUILT.mkdir(exist_ok=True)
    made = []
    for kind in kinds:
        path = _prebuilt_path(kind)
        # This CPU may be of a lesser kind: whoever starts with the library tests it.
        _compile(compiler, path, (*_FLAGS, f"-march={kind}"), test=False)
        path.chmod(0o644)
        made.append(path)
    return made


def _cpu() -> str:
    """Return the instruction sets of this CPU: a home folder may be shared by machines that differ."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _private_folder(folder: Path) -> Path:
    """Make the folder; refuse one that others could put a library into."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = folder.stat()
    except OSError as error:
        raise NoLibraryError(f"no cache folder {folder}: {error.strerror}") from error
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise NoLibraryError(f"cache folder {folder} can be written by others")
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock that dies with the process; polled, because a blocked flock can't be given up."""
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(_POLL_S)
        yield


def _compile(compiler: str, path: Path, flags: Sequence[str], *, test: bool = True) -> None:
    handle, name = tempfile.mkstemp(suffix=".so", dir=path.parent)
    os.close(handle)
    try:
        command = [compiler, *flags, str(SOURCES / "native.cpp"), "-o", name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line] or ["no message"]
            raise NoLibraryError(f"{compiler} failed: {lines[0]}")
        code = _fails(Path(name)) if test else 0
        if code:
            raise NoLibraryError(f"the compiled kernels fail their self-test (code {code})")
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)


def _fails(library: Path) -> int:
    """Return 0 if a library computes on this CPU; in a process of its own, which it may end."""
    command = [sys.executable, "-c", _SELF_TEST, str(library)]
    return subprocess.run(command, capture_output=True, check=False).returncode


def _prune(folder: Path) -> None:
    libraries = sorted(folder.glob("transom-*.so"), key=lambda path: path.stat().st_mtime)
    for old in libraries[:-_KEPT_LIBRARIES]:
        old.unlink(missing_ok=True)
        old.with_suffix(".lock").unlink(missing_ok=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile now, so that the first start needn't; say what became of it. Only `--prebuild` can fail."""
    parser = argparse.ArgumentParser(prog="python -m transom.kernels.native_build")
    parser.add_argument(
        "--prebuild", action="store_true", help="for the kinds of CPUs of this architecture, into the package"
    )
    wanted = parser.parse_args(arguments).prebuild
    try:
        made = prebuild() if wanted else [Build().wait(300)]
    except (NoLibraryError, OSError) as error:
        sys.stdout.write(f"CPU kernels: none, torch computes: {error}\n")
        return int(wanted)
    sys.stdout.write("".join(f"CPU kernels: {path}\n" for path in made))
    return 0


if __name__ == "__main__":
    sys.exit(main())
