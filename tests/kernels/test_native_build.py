"""Compiling the CPU kernels once: concurrent starts, every way to fail, and what the cache depends on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S
from transom.kernels import native_build
from transom.kernels.native_build import Build, NoLibraryError

NEEDED = "flags\t: fpu avx avx2 bmi1 bmi2 f16c fma abm movbe"


@pytest.fixture(autouse=True)
def no_prebuilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this checkout holds: a package without libraries, as a plain install is."""
    monkeypatch.setattr(native_build, "PREBUILT", tmp_path / "none")


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, native_library: Path) -> Path:
    """A compiler that hands out the real library and logs its calls; the shell code in `body` runs before."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "g++"
    script.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = --version ]; then echo fake 1.0; exit; fi\n'
        f'echo called >> "{tmp_path}/calls"\n'
        f'[ ! -e "{tmp_path}/body" ] || . "{tmp_path}/body"\n'
        "for last; do :; done\n"
        f'cp "{native_library}" "$last"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return script


def calls(tmp_path: Path) -> int:
    return len((tmp_path / "calls").read_text().splitlines())


def test_the_first_start_compiles_and_the_next_ones_load(tmp_path: Path, compiler: Path) -> None:
    path = Build(tmp_path / "cache").wait(PATIENCE_S)
    assert path.is_file()
    assert Build(tmp_path / "cache").wait(PATIENCE_S) == path
    assert calls(tmp_path) == 1
    assert [file.name for file in path.parent.glob("*.so")] == [path.name], "the compiler's output stayed"


def test_processes_that_start_together_compile_once(tmp_path: Path, compiler: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from transom.kernels.native_build import Build\n"
        "print(Build(Path(sys.argv[1])).wait(180))"
    )
    (tmp_path / "body").write_text("sleep 0.3\n")  # the compiler's time, in which the others come to the lock
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path / "cache")], stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    paths = {process.communicate(timeout=PATIENCE_S)[0].strip() for process in started}
    assert [process.returncode for process in started] == [0, 0, 0]
    assert len(paths) == 1
    assert Path(paths.pop()).is_file()
    assert calls(tmp_path) == 1


def test_a_slow_compiler_holds_up_nobody(tmp_path: Path, compiler: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    (tmp_path / "body").write_text(f'read line < "{gate}"\n')
    build = Build(tmp_path / "cache")
    with pytest.raises(NoLibraryError, match="longer than 0 s"):
        build.wait(0)
    gate.write_text("go\n")
    assert build.wait(PATIENCE_S).is_file()


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoLibraryError, match=r"no C\+\+ compiler \(g\+\+, c\+\+, clang\+\+\)"):
        Build(tmp_path / "cache").wait(PATIENCE_S)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("echo 'native.cpp:1: error: no such header' >&2; exit 1", "native.cpp:1: error: no such header"),
        ('echo garbage > "$(eval echo \\${$#})"; exit 0', "fail their self-test"),
    ],
)
def test_a_failure_leaves_nothing_behind(tmp_path: Path, compiler: Path, body: str, message: str) -> None:
    (tmp_path / "body").write_text(body + "\n")
    with pytest.raises(NoLibraryError, match=message):
        Build(tmp_path / "cache").wait(PATIENCE_S)
    assert list((tmp_path / "cache").glob("*.so")) == []
    (tmp_path / "body").unlink()
    assert Build(tmp_path / "cache").wait(PATIENCE_S).is_file(), "the next start tries again"


def test_a_cache_that_others_can_write_is_refused(tmp_path: Path, compiler: Path) -> None:
    shared = tmp_path / "cache"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(NoLibraryError, match="can be written by others"):
        Build(shared).wait(PATIENCE_S)


def test_the_key_covers_sources_and_compiler(
    tmp_path: Path, compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = native_build.key(str(compiler))
    sources = tmp_path / "native"
    shutil.copytree(native_build.SOURCES, sources)
    monkeypatch.setattr(native_build, "SOURCES", sources)
    assert native_build.key(str(compiler)) == before
    (sources / "vec.h").write_text((sources / "vec.h").read_text() + "// changed\n")
    changed = native_build.key(str(compiler))
    compiler.write_text(compiler.read_text().replace("fake 1.0", "fake 2.0"))
    assert len({before, changed, native_build.key(str(compiler))}) == 3


def test_old_libraries_are_dropped(tmp_path: Path, compiler: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    for i in range(12):
        old = cache / f"transom-{i:024d}.so"
        old.touch()
        os.utime(old, (i, i))
    path = Build(cache).wait(PATIENCE_S)
    kept = {file.name for file in cache.glob("*.so")}
    assert path.name in kept
    assert kept - {path.name} == {f"transom-{i:024d}.so" for i in range(5, 12)}


@pytest.fixture
def prebuilt(tmp_path: Path, compiler: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Libraries for kinds of x86 CPUs, and a machine of the better kind that has lost its compiler."""
    folder = tmp_path / "prebuilt"
    monkeypatch.setattr(native_build, "PREBUILT", folder)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(native_build, "_cpu", lambda: f"{NEEDED} avx512f avx512bw avx512cd avx512dq avx512vl")
    (tmp_path / "body").write_text(f'echo "$@" >> "{tmp_path}/arguments"\n')
    assert native_build.main(["--prebuild"]) == 0
    monkeypatch.setenv("PATH", str(tmp_path))
    return folder


def kind_of(path: Path) -> str:
    return path.name.removeprefix("transom-").rpartition("-")[0]


def test_without_a_compiler_the_best_prebuilt_library_is_taken(
    tmp_path: Path, prebuilt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = (tmp_path / "arguments").read_text()
    assert "-march=x86-64-v4" in asked
    assert "-march=x86-64-v3" in asked
    assert "native " not in asked
    found = Build(tmp_path / "cache").wait(PATIENCE_S)
    assert (found.parent, kind_of(found)) == (prebuilt, "x86-64-v4")
    monkeypatch.setattr(native_build, "_cpu", lambda: NEEDED)
    assert kind_of(Build(tmp_path / "cache").wait(PATIENCE_S)) == "x86-64-v3"
    monkeypatch.setattr(native_build, "_cpu", lambda: "flags\t: fpu sse2")
    with pytest.raises(NoLibraryError, match=r"no C\+\+ compiler"):
        Build(tmp_path / "cache").wait(PATIENCE_S)


def test_a_prebuilt_library_that_does_not_work_here_is_passed_over(tmp_path: Path, prebuilt: Path) -> None:
    (best,) = prebuilt.glob("transom-x86-64-v4-*.so")
    best.write_bytes(b"garbage")
    assert kind_of(Build(tmp_path / "cache").wait(PATIENCE_S)) == "x86-64-v3"


def test_prebuilt_libraries_of_other_sources_are_not_taken(
    tmp_path: Path, prebuilt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = tmp_path / "native"
    shutil.copytree(native_build.SOURCES, sources, ignore=shutil.ignore_patterns("prebuilt"))
    (sources / "vec.h").write_text((sources / "vec.h").read_text() + "// changed\n")
    monkeypatch.setattr(native_build, "SOURCES", sources)
    with pytest.raises(NoLibraryError, match=r"no C\+\+ compiler"):
        Build(tmp_path / "cache").wait(PATIENCE_S)


def test_a_compiler_that_is_there_is_used_first(
    tmp_path: Path, prebuilt: Path, compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{compiler.parent}{os.pathsep}/usr/bin{os.pathsep}/bin")
    assert Build(tmp_path / "cache").wait(PATIENCE_S).parent == tmp_path / "cache"


def test_prebuilding_that_fails_fails_the_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(native_build, "PREBUILT", tmp_path / "prebuilt")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert native_build.main(["--prebuild"]) == 1
    assert "no C++ compiler" in capsys.readouterr().out
