"""Who may import whom, on the syntax trees of all modules, and what importing the gateway loads."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parent.parent.parent
STAGES = ("gateway", "encoder", "llm", "shared_cache", "kernels", "nano", "bench")

# What each part may import of transom; "core" is everything outside the stage folders.
ALLOWED = {
    "core": {"core"},
    "gateway": {"core", "gateway"},
    "kernels": {"kernels"},
    "shared_cache": {"core", "shared_cache"},
    "encoder": {"core", "shared_cache", "kernels", "encoder"},
    "llm": {"core", "shared_cache", "kernels", "llm"},
    "nano": {"core", *STAGES} - {"bench"},
    "bench": {"core", *STAGES} - {"nano"},
}
# Kernels know no message and no process, but a damaged checkpoint has one error type everywhere.
ALSO_ALLOWED = {"kernels": ("transom.errors.",)}
# The command line is where the parts are put together.
ENTRY_POINTS = {"transom/cli.py", "transom/__main__.py", "transom/commands"}
TORCH_FREE = {"core", "gateway"}
HEAVY = {"torch", "triton", "transformers", "torchcodec", "torchvision", "numpy.random"}
PICKLERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "copyreg"}


def sources(part: str) -> list[Path]:
    """Return the modules of a part, by their real paths."""
    folder = ROOT / ("transom" if part == "core" else part)
    found = []
    for path in sorted(folder.rglob("*.py")):
        inside = path.relative_to(folder).parts
        if "__pycache__" in inside or (part == "core" and inside[0] in STAGES):
            continue
        found.append(path)
    return found


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, absolute module) of every import of a module, those inside functions too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"


def part_of(module: str) -> str | None:
    """Return the part that a module belongs to, or None when it is none of ours."""
    names = module.split(".")
    if names[0] != "transom":
        return None
    return names[1] if len(names) > 1 and names[1] in STAGES else "core"


def is_entry_point(path: Path) -> bool:
    relative = path.relative_to(ROOT).as_posix()
    return any(relative == entry or relative.startswith(f"{entry}/") for entry in ENTRY_POINTS)


@pytest.mark.parametrize("part", ALLOWED)
def test_parts_import_only_what_they_may(part: str) -> None:
    assert part == "shared_cache" or sources(part), f"no module found of {part}"
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {part} imports {module}"
        for path in sources(part)
        if not is_entry_point(path)
        for line, module in imports(path)
        if (target := part_of(module)) is not None
        and target not in ALLOWED[part]
        and not module.startswith(ALSO_ALLOWED.get(part, ()) or "-")
    ]
    assert wrong == []


@pytest.mark.parametrize("part", sorted(TORCH_FREE))
def test_torch_free_parts_do_not_import_torch(part: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {module}"
        for path in sources(part)
        for line, module in imports(path)
        if any(module == heavy or module.startswith(f"{heavy}.") for heavy in HEAVY)
    ]
    assert wrong == []


@pytest.mark.parametrize("part", ALLOWED)
def test_no_module_pickles_or_imports_a_stage_by_its_bare_name(part: str) -> None:
    banned = PICKLERS | set(STAGES)
    wrong = []
    for path in sources(part):
        wrong += [
            f"{path.relative_to(ROOT)}:{line}: {module}"
            for line, module in imports(path)
            if module.split(".")[0] in banned
        ]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                name = ast.unparse(node.func)
                arguments = {keyword.arg for keyword in node.keywords}
                if name in ("torch.load", "torch.save") or "allow_pickle" in arguments:
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: {name}")
    assert wrong == []


def test_stage_folders_are_symlinked_namespaces() -> None:
    for stage in STAGES:
        link = ROOT / "transom" / stage
        assert link.is_symlink()
        assert link.resolve() == ROOT / stage
        assert not (ROOT / stage / "__init__.py").exists()


@pytest.mark.parametrize("part", ALLOWED)
def test_modules_say_what_they_are_for(part: str) -> None:
    wrong = []
    for path in sources(part):
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        if not docstring or len(docstring.splitlines()) > 6:
            wrong.append(f"{path.relative_to(ROOT)}: needs a docstring of at most 6 lines")
    assert wrong == []


def loaded_by(code: str) -> set[str]:
    """Return the modules in a fresh interpreter after running `code`."""
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules)"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
        cwd=ROOT,
    )
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "code",
    [
        "import transom.gateway.server",
        "from transom.cli import build_parser; build_parser()",
        "import transom.stage, transom.transport, transom.client, transom.supervisor",
        "import transom.encoder.server, transom.encoder.media.worker",
    ],
)
def test_torch_stays_unloaded(code: str) -> None:
    loaded = loaded_by(code)
    assert "transom" in loaded
    assert not loaded & {"torch", "transformers", "triton"}


def test_the_rules_catch_what_they_should(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text("def f():\n    from transom.llm import decode\n    import torch.nn as nn\n")
    found = list(imports(path))
    assert found == [(2, "transom.llm.decode"), (3, "torch.nn")]
    assert [part_of(module) for _, module in found] == ["llm", None]
    assert part_of("transom.messages.Ping") == "core"
