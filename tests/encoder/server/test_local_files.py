"""file: URLs: what may be read, what may not, and that nobody learns what lies elsewhere."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from transom.encoder.config import EncoderConfig
from transom.encoder.fetch import Fetcher, FetchLimits
from transom.encoder.local_files import LocalFiles
from transom.errors import ConfigError, MediaError

NOT_THERE = "no readable file of this path"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "media"
    found.mkdir()
    (found / "a b?.png").write_bytes(b"picture")
    (tmp_path / "secret").write_bytes(b"secret")
    return found


def files(folder: Path, max_bytes: int = 100) -> LocalFiles:
    return LocalFiles([str(folder)], max_bytes)


def test_files_below_the_folder_are_read(folder: Path) -> None:
    (folder / "deep").mkdir()
    (folder / "deep" / "c.png").write_bytes(b"c" * 100)
    (folder / "link.png").symlink_to(folder / "deep" / "c.png")
    own = files(folder)
    assert own.read((folder / "a b?.png").as_uri()) == b"picture"
    assert own.read(f"FILE://LOCALHOST{folder}/deep/c.png") == b"c" * 100
    assert own.read(f"file:{folder}/link.png") == b"c" * 100
    assert own.read(f"file://{folder}/deep/../link.png") == b"c" * 100


def test_a_folder_that_is_a_link_stands_for_its_target(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "alias").symlink_to(folder)
    own = files(tmp_path / "alias")
    assert own.read((folder / "a b?.png").as_uri()) == b"picture"
    assert own.read(f"file://{tmp_path}/alias/a%20b%3F.png") == b"picture"


def test_nothing_outside_is_read_and_all_refusals_sound_the_same(folder: Path, tmp_path: Path) -> None:
    (folder / "out").symlink_to(tmp_path / "secret")
    (folder / "up").symlink_to(tmp_path)
    (folder / "loop").symlink_to(folder / "loop")
    (tmp_path / "media-too").mkdir()
    (tmp_path / "media-too" / "x").write_bytes(b"x")
    own = files(folder)
    said = set()
    for path in (
        f"{tmp_path}/secret",
        f"{tmp_path}/missing",
        f"{folder}/missing",
        f"{folder}/out",
        f"{folder}/up/secret",
        f"{folder}/loop",
        f"{folder}/../secret",
        f"{folder}/%2e%2e/secret",
        f"{tmp_path}/media-too/x",
        "/etc/passwd",
        "/proc/self/environ",
        f"{folder}/" + "n" * 300,
    ):
        with pytest.raises(MediaError) as caught:
            own.read(f"file://{path}")
        said.add(caught.value.message)
    assert len(said) == 1
    assert NOT_THERE in said.pop()


@given(parts=st.lists(st.sampled_from(["..", ".", "media", "secret", "up", "%2e%2e", "", "a"]), max_size=8))
def test_no_spelling_of_a_path_leads_out(tmp_path_factory: pytest.TempPathFactory, parts: list[str]) -> None:
    base = tmp_path_factory.getbasetemp() / "spellings"
    if not base.exists():
        (base / "media" / "a").mkdir(parents=True)
        (base / "secret").write_bytes(b"secret")
        (base / "media" / "a" / "up").symlink_to(base)
    with pytest.raises(MediaError):
        LocalFiles([str(base / "media")], 100).read(f"file://{base}/media/{'/'.join(parts)}")


def test_only_regular_files_of_limited_size(folder: Path) -> None:
    own = files(folder, max_bytes=10)
    (folder / "large").write_bytes(b"x" * 11)
    os.mkfifo(folder / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "socket"))
        for name, words in (
            ("large", "11 bytes, limit 10"),
            ("pipe", "not a regular file"),
            ("", "not a regular file"),
            ("socket", NOT_THERE),
        ):
            with pytest.raises(MediaError, match=words):
                own.read(f"file://{folder}/{name}")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("file://host/x", "names a host"),
        ("file://user@localhost/x", "names a host"),
        ("file:x", "no absolute path"),
        ("file://", "no absolute path"),
        ("file:///x%00y", "no absolute path"),
        ("file:///x?y", "query or a fragment"),
        ("file:///x#y", "query or a fragment"),
        ("file://[::1/x", "malformed"),
    ],
)
def test_other_forms_are_refused(folder: Path, url: str, words: str) -> None:
    with pytest.raises(MediaError, match=words):
        files(folder).read(url)


def test_a_folder_swapped_for_a_link_meanwhile_leads_nowhere(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "inner").mkdir()
    (folder / "inner" / "secret").write_bytes(b"mine")
    really_open = os.open

    def swap_and_open(path: Path, flags: int) -> int:
        (folder / "inner").rename(folder / "was")
        (folder / "inner").symlink_to(tmp_path)
        return really_open(path, flags)

    monkeypatch.setattr(os, "open", swap_and_open)
    with pytest.raises(MediaError, match=NOT_THERE):
        files(folder).read(f"file://{folder}/inner/secret")


def test_folders_must_be_there(tmp_path: Path) -> None:
    for wrong in ("relative", str(tmp_path / "missing")):
        with pytest.raises(ConfigError, match="absolute path of a folder"):
            LocalFiles([wrong], 10)


async def test_no_file_is_read_by_default_nor_after_a_redirect(folder: Path) -> None:
    url = (folder / "a b?.png").as_uri()
    off = Fetcher(FetchLimits.of(EncoderConfig()))
    with pytest.raises(MediaError, match="file: URLs are not allowed here"):
        await off.fetch(url)

    async def redirect(request: web.Request) -> web.Response:
        return web.Response(status=302, headers={"Location": url})

    app = web.Application()
    app.router.add_get("/", redirect)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    config = EncoderConfig(media_folders=(str(folder),), allow_private_addresses=True, fetch_ports=(0,))
    fetcher = Fetcher(FetchLimits.of(config))
    await fetcher.start()
    try:
        result = await fetcher.fetch(url)
        assert result is not None
        assert result.data == b"picture"
        with pytest.raises(MediaError, match="scheme 'file' is not allowed"):
            await fetcher.fetch(f"http://127.0.0.1:{runner.addresses[0][1]}/")
    finally:
        await fetcher.close()
        await runner.cleanup()
