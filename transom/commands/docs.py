"""Write docs/config.md and docs/cli.md from the config classes and parsers: `make docs`.

Runs in a source tree only. Rendering is our own, because argparse's differs between Python versions.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transom.cli import build_parser
from transom.commands.base import Parser
from transom.commands.stages import STAGES
from transom.commands.up import UpConfig
from transom.config import ENV_PREFIX, StageConfig, describe

_CONFIG_INTRO = f"""# Settings

Made from the code by `make docs`; a test compares.

Every process reads its settings from four layers; a later one wins:

1. the defaults below,
2. a TOML file given as `--config FILE`: keys of the table `[SECTION]` over those of `[common]`,
3. the environment: `{ENV_PREFIX}SECTION_KEY` over `{ENV_PREFIX}KEY`,
4. flags: `--key` with dashes for underscores; switches also as `--no-key`; lists by repeating the flag.

Sections are `gateway`, `encoder`, `prefill`, `decode` and `up`. An unknown key, a value that can't be read
or one out of range stops the process at its start with one line that names the key, the value and what is
allowed. `transom up` checks the settings of all its stages before it starts the first, and hands its
`--config` file and its environment on to them.

```toml
[common]
log_level = "warning"

[gateway]
request_timeout_s = 120

[prefill]
device = "cuda:0"

[decode]
device = "cuda:1"
```
"""

_CLI_INTRO = """# Command line

Made from the code by `make docs`; a test compares.

`transom COMMAND --help` shows the same with examples. Settings of stages are in [config.md](config.md).
Exit codes: 0 done, 1 failed, 2 a setting or argument is wrong (one line says which), 130 interrupted.
Output is coloured on a terminal and plain elsewhere; with `--json` a command prints one JSON object on
stdout and nothing else. Logs go to stderr.
"""


def config_markdown() -> str:
    """Return docs/config.md."""
    parts = [_CONFIG_INTRO]
    parts += ["## All stages: `[common]` or any stage's section\n", *_settings(StageConfig, skip=())]
    shared = tuple(row["name"] for row in describe(StageConfig))
    parts += ["\n## `transom up`: `[up]`\n", *_settings(UpConfig, skip=())]
    for stage in STAGES.values():
        parts += [f"\n## `transom {stage.name}`: `[{stage.name}]`\n"]
        parts += _settings(stage.config, skip=shared, changed_from=StageConfig)
    return "\n".join(parts) + "\n"


def _settings(
    cls: type[Any], *, skip: tuple[str, ...], changed_from: type[Any] | None = None
) -> Iterator[str]:
    base = {row["name"]: row for row in describe(changed_from)} if changed_from else {}
    yield "| setting | type | default | allowed | meaning |"
    yield "|---|---|---|---|---|"
    for row in describe(cls):
        if row["name"] in skip and row == base.get(row["name"]):
            continue
        cells = (f"`{row['name']}`", row["type"], _default(row["default"]), _allowed(row), row["help"])
        yield "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def _default(value: Any) -> str:
    if value in ("", None, ()):
        return ""
    if isinstance(value, tuple):
        return ", ".join(f"`{item}`" for item in value)
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _allowed(row: dict[str, Any]) -> str:
    if row["choices"]:
        return ", ".join(f"`{choice}`" for choice in row["choices"])
    low, high = row["ge"], row["le"]
    if low is None and high is None:
        return ""
    if high is None:
        return f"at least {low}"
    return f"{low} to {high}" if low is not None else f"at most {high}"


def cli_markdown() -> str:
    """Return docs/cli.md."""
    parts = [_CLI_INTRO]
    for parser in _leaves(build_parser()):
        parts += [f"## `{_usage(parser)}`\n", f"{parser.description}\n"]
        section = parser.prog.split()[1]
        if section in STAGES or section == "up":
            parts.append(f"Flags: one for each setting of [config.md](config.md), `[{section}]`.\n")
        else:
            parts += [*_options(parser), ""]
        if parser.epilog:
            lines = [line.strip() for line in parser.epilog.splitlines()[1:]]
            parts += ["```sh", *lines, "```\n"]
    return "\n".join(parts).rstrip() + "\n"


def _leaves(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield the parsers that have no subcommands, in the order of the help text."""
    if isinstance(parser, Parser):
        parser.fill()
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not groups:
        yield parser
    for group in groups:
        for child in group.choices.values():
            yield from _leaves(child)


def _positional(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in parser._actions if not action.option_strings]


def _usage(parser: argparse.ArgumentParser) -> str:
    words = [
        f"[{action.metavar}]" if action.nargs == "?" else str(action.metavar)
        for action in _positional(parser)
    ]
    return " ".join([parser.prog, *words, "[flags]"])


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    yield "| argument | meaning |"
    yield "|---|---|"
    flags = [action for action in parser._actions if action.option_strings and action.dest != "help"]
    for action in [*_positional(parser), *flags]:
        value = f" {action.metavar}" if action.metavar and action.option_strings else ""
        name = f"{', '.join(action.option_strings) or action.metavar}{value}"
        text = (action.help or "") % vars(action)
        yield f"| `{name}` | {text.replace('|', chr(92) + '|')} |"


def main(folder: Path) -> int:
    (folder / "config.md").write_text(config_markdown(), encoding="utf-8")
    (folder / "cli.md").write_text(cli_markdown(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs")))
