"""Finding a model's folder, without a network."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from huggingface_hub import constants

import transom.hub
from transom.errors import CheckpointError
from transom.hub import NANO_NAME, model_name, resolve_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def test_a_folder_is_itself(tmp_path: Path) -> None:
    assert resolve_model(tmp_path) == tmp_path.resolve()
    assert resolve_model(str(tmp_path)) == tmp_path.resolve()


def test_a_folder_is_called_by_its_name_and_the_packaged_one_by_its_own(tmp_path: Path) -> None:
    assert model_name(tmp_path) == tmp_path.name
    packaged = resolve_model(NANO_NAME)
    assert packaged.name != NANO_NAME == model_name(packaged) == model_name(resolve_model(str(packaged)))


@pytest.mark.parametrize("name", ["nowhere", "/no/such/folder", "a/b/c", "../x", "org/", "org/na me"])
def test_neither_folder_nor_id(name: str) -> None:
    with pytest.raises(CheckpointError, match="no folder"):
        resolve_model(name)


def test_offline_uses_the_cache(cache: Path) -> None:
    snapshot = cache / "models--some-org--some-model" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    refs = cache / "models--some-org--some-model" / "refs"
    refs.mkdir()
    (refs / "main").write_text(COMMIT)
    assert resolve_model("some-org/some-model") == snapshot
    assert model_name(snapshot) == "some-org/some-model"
    assert resolve_model("some-org/some-model", revision=COMMIT) == snapshot


def test_offline_and_not_cached_is_one_clear_error(cache: Path) -> None:
    with pytest.raises(CheckpointError, match="'some-org/other' is not cached and cannot be downloaded"):
        resolve_model("some-org/other")


def test_an_unreachable_hub_is_one_clear_error(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as refusing:  # bound but not listening: connecting is refused at once
        refusing.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{refusing.getsockname()[1]}")
        with pytest.raises(CheckpointError, match="cannot be downloaded"):
            resolve_model("some-org/other")


def test_a_missing_packaged_model_names_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transom.hub, "_NANO_FOLDER", tmp_path)
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        resolve_model("mimo-nano")
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model("mimo-nano") == tmp_path.resolve()
