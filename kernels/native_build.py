"""Compiles kernels/native for this machine, once, and keeps the library in the user's cache.

Runs at the start of llm processes, several at a time perhaps, and as `python -m transom.kernels.native_build`
at the end of an install. Knows no tensors; whoever gets no library from here computes with torch.
"""

from __future__ import annotations

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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SOURCES = Path(__file__).resolve().parent / "native"
COMPILERS = ("g++", "c++", "clang++")
_FLAGS = (
    "-O3", "-std=c++17", "-shared", "-fPIC", "-fvisibility=hidden", "-ffp-contract=fast", "-fno-math-errno",
    "-pthread",
)  # fmt: skip
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

    Safe under concurrent starts of many processes: one compiles, the others wait for its lock.
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


def _library(cache: Path) -> Path:
    compiler = find_compiler()
    folder = _private_folder(cache)
    path = folder / f"transom-{key(compiler)}.so"
    if not path.exists():
        with _locked(path.with_suffix(".lock")):
            if not path.exists():
                _compile(compiler, path)
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
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        if source.suffix in (".h", ".cpp"):
            digest.update(f"{source.name}\0{source.stat().st_size}\0".encode())
            digest.update(source.read_bytes())
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False, timeout=20).stdout
    digest.update("\0".join((compiler, *_flags(), platform.machine(), _cpu())).encode() + b"\0" + version)
    return digest.hexdigest()[:24]


def _flags() -> tuple[str, ...]:
    arm = platform.machine() in ("aarch64", "arm64")
    return (*_FLAGS, "-mcpu=native" if arm else "-march=native")


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


def _compile(compiler: str, path: Path) -> None:
    handle, name = tempfile.mkstemp(suffix=".so", dir=path.parent)
    os.close(handle)
    try:
        command = [compiler, *_flags(), str(SOURCES / "native.cpp"), "-o", name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line] or ["no message"]
            raise NoLibraryError(f"{compiler} failed: {lines[0]}")
        test = subprocess.run([sys.executable, "-c", _SELF_TEST, name], capture_output=True, check=False)
        if test.returncode:
            raise NoLibraryError(f"the compiled kernels fail their self-test (code {test.returncode})")
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)


def _prune(folder: Path) -> None:
    libraries = sorted(folder.glob("transom-*.so"), key=lambda path: path.stat().st_mtime)
    for old in libraries[:-_KEPT_LIBRARIES]:
        old.unlink(missing_ok=True)
        old.with_suffix(".lock").unlink(missing_ok=True)


def main() -> None:
    """Compile now, so that the first start needn't; say what became of it."""
    try:
        told = f"CPU kernels: {Build().wait(300)}"
    except NoLibraryError as error:
        told = f"CPU kernels: none, torch computes: {error}"
    sys.stdout.write(f"{told}\n")


if __name__ == "__main__":
    main()
