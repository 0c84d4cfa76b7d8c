"""The playground's files: served as they are, under a policy that lets nothing in from outside."""

from __future__ import annotations

import re
from pathlib import Path

import aiohttp
import pytest
import yarl

from tests.gateway.conftest import FleetFactory
from tests.gateway.fake_workers import ScriptedFleet
from transom.gateway.playground import PATHS

TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}


async def test_every_file_is_served_with_a_strict_policy(fleet: ScriptedFleet) -> None:
    async with aiohttp.ClientSession() as http:
        for path in PATHS:
            async with http.get(f"{fleet.url}{path}") as response:
                assert response.status == 200
                assert response.content_type == TYPES[path.rsplit(".", 1)[-1] if "." in path else "html"]
                assert response.headers["X-Content-Type-Options"] == "nosniff"
                policy = dict(
                    part.strip().split(" ", 1)
                    for part in response.headers["Content-Security-Policy"].split(";")
                )
                tag = response.headers["ETag"]
            assert policy["default-src"] == "'none'"
            for kind in ("script-src", "style-src", "connect-src"):
                assert policy[kind] == "'self'"
            assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
            assert "unsafe" not in str(policy)
            async with http.get(f"{fleet.url}{path}", headers={"If-None-Match": tag}) as response:
                assert (response.status, await response.read()) == (304, b"")


async def test_the_page_is_open_but_nothing_else(start_fleet: FleetFactory, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    fleet = await start_fleet(api_keys_file=str(keys))
    async with aiohttp.ClientSession() as http:
        for path, expected in [("/", 200), ("/page/app.js", 200), ("/v1/fleet", 401), ("/metrics", 401)]:
            async with http.get(fleet.url + path) as response:
                assert response.status == expected, path


@pytest.mark.parametrize(
    "path", ["/page/", "/page/index.html", "/page/../server.py", "/page/%2e%2e/server.py"]
)
async def test_no_other_file_is_reachable(fleet: ScriptedFleet, path: str) -> None:
    url = yarl.URL(fleet.url + path, encoded=True)  # as it is written: no client tidies it up
    async with aiohttp.ClientSession() as http, http.get(url) as response:
        assert response.status == 404


def page_files(repository: Path) -> list[Path]:
    return sorted((repository / "gateway" / "page").iterdir())


def test_all_files_are_listed(repository: Path) -> None:
    named = {"index.html" if path == "/" else path.removeprefix("/page/") for path in PATHS}
    assert {path.name for path in page_files(repository)} == named


def test_nothing_comes_from_outside_and_no_markup_is_made_of_text(repository: Path) -> None:
    for path in page_files(repository):
        text = path.read_text(encoding="utf-8")
        assert re.findall(r"(?:https?:)?//[\w-]+\.[\w.]+", text) == [], path.name
        for banned in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "@import"):
            assert banned not in text, f"{path.name}: {banned}"
        if path.suffix == ".html":
            assert re.findall(r"\son\w+=|\sstyle=|<style|<script(?! type=\"module\" src=)", text) == []


def test_fields_have_labels(repository: Path) -> None:
    html = (repository / "gateway" / "page" / "index.html").read_text(encoding="utf-8")
    fields = re.findall(r"<(?:input|textarea)[^>]*\sid=\"([\w-]+)\"", html)
    assert len(fields) >= 6
    for field in fields:
        wrapped = re.search(rf"<label[^>]*><input id=\"{field}\"", html)
        assert f'for="{field}"' in html or wrapped, field
