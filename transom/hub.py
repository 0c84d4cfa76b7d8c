"""Find a model's folder: a path, the packaged demo model, or a hub id to download (CLI, any stage at start).

The only place that talks to a model hub. Knows nothing of what is in the folder.
"""

from __future__ import annotations

import re
from pathlib import Path

from transom.errors import CheckpointError

NANO_NAME = "mimo-nano"
_NANO_FOLDER = Path(__file__).parent / "nano" / "checkpoint"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_WANTED = ["*.json", "*.jinja", "*.safetensors", "*.txt"]


def resolve_model(name_or_path: str | Path, *, revision: str | None = None) -> Path:
    """Return the folder of a model: an existing folder, `mimo-nano`, or a hub id `org/name`.

    A hub id is downloaded into huggingface_hub's cache, which blocks for as long as that takes; without a
    network the cached snapshot is used. Raise CheckpointError saying what was tried.
    """
    name = str(name_or_path)
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return path.resolve()
    if name == NANO_NAME:
        if not (_NANO_FOLDER / "config.json").is_file():
            raise CheckpointError(f"the packaged model {NANO_NAME} is not at {_NANO_FOLDER}")
        return _NANO_FOLDER.resolve()
    if not is_hub_id(name):
        raise CheckpointError(f"model {name!r} is no folder, not {NANO_NAME!r} and no hub id like 'org/name'")
    return _from_hub(name, revision)


def model_name(folder: Path) -> str:
    """Return what a model's folder, as `resolve_model` gives it, is called in logs and names.

    Its last part would be "checkpoint" for the packaged model and a digest for one of the hub.
    """
    if folder == _NANO_FOLDER.resolve():
        return NANO_NAME
    if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--"):
        return folder.parent.parent.name.removeprefix("models--").replace("--", "/", 1)
    return folder.name


def is_hub_id(name: str) -> bool:
    """Tell whether a name has the form `org/name`."""
    return _HUB_ID.fullmatch(name) is not None


def _from_hub(name: str, revision: str | None) -> Path:
    # Imported late: most models are folders, and the import takes longer than all else here.
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=_WANTED))
    except Exception as error:  # its network, authorisation and disk errors share no base class
        failure = error
    try:  # a proxy that refuses makes the call above fail even with a complete cache
        return Path(snapshot_download(name, revision=revision, allow_patterns=_WANTED, local_files_only=True))
    except Exception:  # what matters to the user is why the download failed
        reason = " ".join(str(failure).split()) or type(failure).__name__
        raise CheckpointError(f"model {name!r} is not cached and cannot be downloaded: {reason}") from failure
