"""docs/api.md says what the code does: paths, fields, refusals and error codes."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from transom import errors
from transom.gateway import http_body
from transom.gateway.config import GatewayConfig
from transom.gateway.media import MEDIA_PARTS
from transom.gateway.parse_generation import UNSUPPORTED
from transom.gateway.server import GatewayStage


def words(page: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", page))


def test_every_path_is_described(repository: Path) -> None:
    page = (repository / "docs" / "api.md").read_text()
    for route in GatewayStage(GatewayConfig()).routes():
        path = re.sub(r"\{(\w+):.*?\}", r"{\1}", route.path)
        assert f"`{route.method} {path}`" in page


def test_every_field_that_is_read_or_refused_is_described(repository: Path) -> None:
    known = words((repository / "docs" / "api.md").read_text())
    named = {part for word in known for part in word.split(".")}
    assert set(UNSUPPORTED) <= known
    assert set(MEDIA_PARTS) <= known
    for module in ("parse.py", "parse_generation.py", "media.py"):
        tree = ast.parse((repository / "gateway" / module).read_text())
        for call in ast.walk(tree):
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
                continue
            reads = {"text", "flag", "integer", "number", "array", "object", "objects"}
            owner = call.func.value
            top_level = isinstance(owner, ast.Name) and owner.id in ("body", "fields")
            if top_level and call.func.attr in reads and isinstance(call.args[0], ast.Constant):
                assert call.args[0].value in named | {"messages"}, call.args[0].value


def test_every_error_is_described(repository: Path) -> None:
    page = (repository / "docs" / "api.md").read_text()
    for module in (errors, http_body):
        for kind in vars(module).values():
            if not isinstance(kind, type) or not issubclass(kind, errors.TransomError):
                continue
            if kind.status in (499, 500):
                continue
            row = next((line for line in page.splitlines() if line.startswith(f"| {kind.status} |")), "")
            assert f"`{kind.code}`" in row, kind
