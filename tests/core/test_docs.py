"""Documentation that can go stale is compared with the code: settings, commands, dependencies, links."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from transom.cli import build_parser
from transom.commands import docs

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("bench/**/*.md"), *ROOT.glob("nano/*.md")]
)


def test_settings_page_is_up_to_date() -> None:
    written = (ROOT / "docs/config.md").read_text(encoding="utf-8")
    assert written == docs.config_markdown(), "run `make docs`"


def test_command_page_is_up_to_date() -> None:
    written = (ROOT / "docs/cli.md").read_text(encoding="utf-8")
    assert written == docs.cli_markdown(), "run `make docs`"


def declared() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [
        *project["dependencies"],
        *(line for extra in project["optional-dependencies"].values() for line in extra),
    ]
    return sorted({re.split(r"[<>=!~\[; ]", line, maxsplit=1)[0] for line in lines})


def test_every_dependency_has_its_reason_and_no_other_is_listed() -> None:
    text = (ROOT / "docs/dependencies.md").read_text(encoding="utf-8").split("## Deliberately not")[0]
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    listed: set[str] = set()
    for row in rows:
        listed |= set(re.findall(r"`([^`]+)`", row.split("|")[1]))
    assert listed == set(declared())
    assert all(len(row.strip("| ").split("|")[-1].strip()) > 10 for row in rows)


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_resolve(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        other = (page.parent / name).resolve() if name else page
        if not other.exists() or (anchor and anchor not in anchors(other)):
            broken.append(target)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_files_that_are_named_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    paths = re.findall(r"`((?:transom|gateway|encoder|llm|kernels|nano|bench|tests|docs)/[\w./-]*)`", text)
    assert [path for path in paths if not (ROOT / path).exists()] == []


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the `transom` command lines of a page's shell blocks as words."""
    text = page.read_text(encoding="utf-8")
    for block in re.findall(r"^```(?:sh|bash|console)\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words.pop(0)
            if words[:1] == [".venv/bin/transom"]:
                words[0] = "transom"
            if words[:1] == ["transom"]:
                cut = next(
                    (i for i, word in enumerate(words) if word in ("|", ">", ">>", "&", "&&", ";")), None
                )
                yield words[1:cut]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_command_lines_parse(page: Path) -> None:
    parser = build_parser()
    for words in commands(page):
        if words[-1] in ("--help", "--version"):
            continue
        assert parser.parse_args(words).command == words[0]


def test_make_targets_that_are_named_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, flags=re.MULTILINE))
    for page in PAGES:
        blocks = re.findall(r"```(?:sh|bash)\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for line in "".join(blocks).splitlines():
            if line.startswith("make "):
                named = {word for word in line.split("#")[0].split()[1:] if "=" not in word}
                assert named <= targets, f"{page.name}: {line}"


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs/README.md").read_text(encoding="utf-8")
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert {name for name in pages if f"({name})" not in index} == set()


def threats() -> list[list[str]]:
    """Return the cells of the threat model's rows."""
    text = (ROOT / "docs/threat_model.md").read_text(encoding="utf-8").split("## Threats")[1]
    rows = [line for line in text.split("\n## ")[0].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]


def test_every_threat_has_its_defence_and_tests_that_exist() -> None:
    rows = threats()
    assert len(rows) > 25
    for row in rows:
        assert len(row) == 4, row
        threat, defence, where, shown = row
        assert len(defence) > 10, threat
        assert re.findall(r"`(?:transom|gateway|encoder|llm)/[\w./]*`", where), threat
        tests = re.findall(r"`(tests/[\w./]+)`", shown)
        assert tests, f"nothing shows this: {threat}"
        for path in tests:
            found = (ROOT / path).read_text(encoding="utf-8")
            assert re.search(r"^(async )?def test_", found, flags=re.MULTILINE), path
