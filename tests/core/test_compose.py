"""compose.yaml and Dockerfile against the command line: commands parse, addresses and ports fit together."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from transom.cli import build_parser
from transom.commands.stages import STAGES
from transom.config import config_from_args
from transom.curve import is_loopback
from transom.kernels import native_build

ROOT = Path(__file__).resolve().parent.parent.parent
STAGE_SERVICES = {
    "": {"gateway", "encoder-0", "encoder-1", "prefill", "decode"},
    "gpu": {"gateway-gpu", "encoder-gpu", "prefill-gpu", "decode-gpu"},
}
ALL_STAGES = sorted(STAGE_SERVICES[""] | STAGE_SERVICES["gpu"])


def with_defaults(value: Any) -> Any:
    """Return the document as compose reads it in an empty environment."""
    if isinstance(value, dict):
        return {key: with_defaults(item) for key, item in value.items()}
    if isinstance(value, list):
        return [with_defaults(item) for item in value]
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value) if isinstance(value, str) else value


COMPOSE = with_defaults(yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8")))
SERVICES: dict[str, Any] = COMPOSE["services"]


def parse(name: str) -> argparse.Namespace:
    return build_parser().parse_args(SERVICES[name]["command"])


def config(name: str) -> Any:
    args = parse(name)
    return config_from_args(STAGES[args.stage].config, args.stage, args)


def test_services_are_the_stages_and_the_key_maker() -> None:
    assert set(SERVICES) == {"keys", *ALL_STAGES}
    for profile, names in STAGE_SERVICES.items():
        for name in names:
            assert SERVICES[name].get("profiles", [""]) == [profile]
            assert parse(name).stage == name.split("-")[0]


def test_the_key_is_made_where_every_stage_reads_it() -> None:
    args = parse("keys")
    assert args.if_missing
    for name in ALL_STAGES:
        assert config(name).curve_key_file == args.file
        assert "fleet:/fleet" in SERVICES[name]["volumes"]
        assert SERVICES[name]["depends_on"]["keys"] == {"condition": "service_completed_successfully"}
    assert "fleet:/fleet" in SERVICES["keys"]["volumes"]
    assert Path(args.file).parent == Path("/fleet")


@pytest.mark.parametrize("name", ALL_STAGES)
def test_a_stage_is_reached_under_its_service_name(name: str) -> None:
    settings = config(name)
    port = settings.bind.rsplit(":", 1)[1]
    assert settings.bind == f"tcp://0.0.0.0:{port}"
    assert not is_loopback(settings.bind)
    assert settings.advertise == f"tcp://{name}:{port}"


@pytest.mark.parametrize("gateway", ["gateway", "gateway-gpu"])
def test_a_gateway_knows_exactly_the_workers_of_its_profile(gateway: str) -> None:
    settings = config(gateway)
    profile = "gpu" if gateway.endswith("-gpu") else ""
    workers = STAGE_SERVICES[profile] - {gateway}
    for stage in ("encoder", "prefill", "decode"):
        expected = {config(name).advertise for name in workers if name.startswith(stage)}
        assert set(getattr(settings, stage)) == expected
        assert len(getattr(settings, stage)) == len(expected)
    assert set(SERVICES[gateway]["depends_on"]) == workers | {"keys"}


@pytest.mark.parametrize("name", ALL_STAGES)
def test_health_checks_ask_the_stages_own_port(name: str) -> None:
    check = SERVICES[name]["healthcheck"]["test"]
    assert check[:2] == ["CMD", "transom"]
    args = build_parser().parse_args(check[2:])
    assert args.command == "health"
    assert args.url == f"http://127.0.0.1:{config(name).http_port}"


def test_only_the_api_is_published_and_on_loopback() -> None:
    for name, service in SERVICES.items():
        if name.startswith("gateway"):
            assert service["ports"] == [f"127.0.0.1:8000:{config(name).http_port}"]
            assert config(name).http_host == "0.0.0.0"
        else:
            assert "ports" not in service


@pytest.mark.parametrize("name", [*ALL_STAGES, "keys"])
def test_containers_have_no_rights_and_enough_shared_memory(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "privileged" not in service
    if name == "keys":
        return
    assert service["mem_limit"] == "0"
    if not name.startswith("gateway"):
        assert service["shm_size"] == "1gb"
    devices = "deploy" in service
    assert devices == (name in STAGE_SERVICES["gpu"] and not name.startswith("gateway"))
    if devices:
        assert config(name).device == "cuda"


def test_environment_names_are_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ALL_STAGES:
        for key, value in SERVICES[name]["environment"].items():
            if key.startswith("TRANSOM_"):
                monkeypatch.setenv(key, value)
                assert str(getattr(config(name), key.removeprefix("TRANSOM_").lower())) == value


def test_the_image_runs_without_rights_and_its_commands_parse() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    final = text[text.rindex("\nFROM ") :]
    assert "\nUSER transom\n" in final
    assert 'ENTRYPOINT ["transom"]' in final
    command = re.search(r"^CMD \[(.*)\]$", final, flags=re.MULTILINE)
    assert command is not None
    words = [word.strip(' "') for word in command.group(1).split(",")]
    args = build_parser().parse_args(words)
    assert args.command == "up"
    assert f"EXPOSE {8000}" in final
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    torch = re.search(r"^TORCH \?= (\S+)$", makefile, flags=re.MULTILINE)
    assert torch is not None
    assert f'ARG TORCH="{torch.group(1)}"' in text


def _stages_of_the_image() -> list[str]:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    return re.split(r"^FROM ", re.sub(r"\\\n\s*", " ", text), flags=re.MULTILINE)[1:]


def test_compose_passes_on_what_the_build_takes() -> None:
    """Torch's default is the Dockerfile's; pip ignores settings that are empty."""
    build, final = _stages_of_the_image()
    before_pip = build[: build.index("pip install")]
    taken = dict(re.findall(r"^ARG (\w+)(?:=\"(.*)\")?$", before_pip, flags=re.MULTILINE))
    assert {"TORCH", "PIP_EXTRA_INDEX_URL"} <= set(taken)
    assert build.count("\nARG ") == len(taken)
    assert "ARG" not in final.split()
    for service in SERVICES.values():
        assert service["image"] == "transom"
        assert service["build"] == {"context": ".", "args": taken}


def test_cpu_kernels_are_compiled_into_the_image() -> None:
    """Containers have a read-only root: what a start would compile must be there, and no compiler is."""
    build, final = _stages_of_the_image()
    (install,) = (line for line in build.splitlines() if "pip install" in line and "." in line.split())
    before, command = re.split(r" && cd / && /opt/transom/bin/python -m ", install)
    assert "pip install" in before
    assert command.split() == [native_build.__name__, "--prebuild"]
    assert any(name in build.split() for name in native_build.COMPILERS)
    assert not any(name in final.split() for name in native_build.COMPILERS)
    assert "COPY --from=build /opt/transom /opt/transom" in final
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert str(native_build.PREBUILT.relative_to(ROOT)) in ignored


def test_triton_finds_a_c_compiler_and_a_folder_that_it_may_write_to() -> None:
    """On a GPU it compiles at the first use; of the home folder only the volume can be written to."""
    _, final = _stages_of_the_image()
    (install,) = (line for line in final.splitlines() if "apt-get install" in line)
    assert {"gcc", "libc6-dev", "libpython3-dev"} <= set(install.split())
    folder = re.search(r"\bTRITON_HOME=(\S+)", final)
    assert folder is not None
    for name in STAGE_SERVICES["gpu"]:
        assert folder.group(1) in {volume.split(":")[1] for volume in SERVICES[name]["volumes"]}


@pytest.mark.parametrize("name", [*ALL_STAGES, "keys"])
def test_the_user_of_the_image_can_write_to_every_volume(name: str) -> None:
    """A named volume takes over the owner of the image's folder; where there is none it belongs to root."""
    final = _stages_of_the_image()[1]
    made = re.search(r"install -d -o transom -g transom ([^&\n]*)", final)
    assert made is not None
    for volume in SERVICES[name]["volumes"]:
        assert volume.split(":")[1] in made.group(1).split()
