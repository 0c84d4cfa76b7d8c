"""The `transom` command: help, exit codes, one-line errors, and the commands that need no pipeline."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from tests.patience import PATIENCE_S
from transom import __version__
from transom.cli import build_parser, main
from transom.commands import doctor, up
from transom.commands.base import Parser, base_url
from transom.config import describe
from transom.curve import FleetKey
from transom.errors import ConfigError
from transom.supervisor import usable_cores


def leaves(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    assert isinstance(parser, Parser)
    parser.fill()
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    for group in groups:
        for child in group.choices.values():
            yield from leaves(child)
    if not groups:
        yield parser


COMMANDS = {parser.prog: parser for parser in leaves(build_parser())}


def exit_code(*argv: str) -> int:
    """Run a command line in this process; return the code it would exit with."""
    try:
        return main(argv)
    except SystemExit as end:
        return int(end.code or 0)


def test_the_commands_are_there() -> None:
    names = {name.removeprefix("transom ") for name in COMMANDS}
    assert names >= {
        "up", "gateway", "encoder", "prefill", "decode", "chat", "bench chat", "doctor", "keys", "health"
    }  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_help_says_what_it_is_for_with_examples(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    parser = COMMANDS[name]
    text = parser.format_help()
    assert all(len(line) <= 80 for line in text.split("\n\n")[1].splitlines())  # the description
    assert parser.description
    assert f"examples:\n  {name}" in text
    for action in parser._actions:
        assert action.help, f"{name} {action.option_strings}"


@pytest.mark.parametrize(
    "name", [name for name in COMMANDS if name.split()[1] in ("bench", "plan", "doctor")]
)
def test_machine_readable_commands_take_json(name: str) -> None:
    assert "--json" in COMMANDS[name].format_help()


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("--version") == 0
    assert capsys.readouterr().out == f"transom {__version__}\n"


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ((), "the following arguments are required: COMMAND"),
        (("nonsense",), "invalid choice: 'nonsense'"),
        (("up", "--prot", "1"), "unrecognized arguments: --prot 1"),
        (("up", "--port", "x"), "--port: 'x' is not a valid int"),
        (("up", "--log-level", "loud"), "'loud' is not one of debug, info, warning, error"),
        (("up", "--model", "no such thing"), "'no such thing'"),
        (("prefill", "--threads", "-1"), "--threads: -1 is out of range, allowed 0 to 1024"),
        (("gateway", "--config", "/no/such.toml"), "config file /no/such.toml"),
        (("encoder", "--curve-key-file", "/no/key"), "fleet key file /no/key"),
        (("chat", ""), "nothing to ask"),
        (("chat", "--image", "/no/picture.png", "x"), "image file /no/picture.png: No such file"),
        (("bench", "chat", "--mix", "smell=1"), "--mix 'smell=1': expected KIND=WEIGHT"),
        (("bench", "chat", "--mix", "text=-1"), "--mix 'text=-1'"),
        (("bench", "chat", "--requests", "0"), "--requests 0: must be at least 1"),
        (("bench", "radix", "--out", "/no/such/rows.jsonl"), "--out /no/such/rows.jsonl: no file can be"),
        (("bench", "serve", "--plot", "/no/such/load.svg"), "--plot /no/such/load.svg: no file can be"),
        (("health", "ftp://x"), "'ftp://x' is not an http URL"),
        (("keys", "/no/such/folder/key"), "fleet key file /no/such/folder/key"),
    ],
)
def test_wrong_arguments_are_one_line_and_code_2(
    argv: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if argv[:1] == ("encoder",):  # a stage process ends itself: run it as one
        done = subprocess.run(
            [sys.executable, "-m", "transom", *argv],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        code, out, err = done.returncode, done.stdout, done.stderr
    else:
        code = exit_code(*argv)
        out, err = capsys.readouterr()
    assert code == 2
    assert out == ""
    assert told in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("argv", [("chat", "hello"), ("bench", "chat", "--requests", "1")])
def test_no_server_is_one_line_and_code_1(argv: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        assert exit_code(*argv, "--url", url) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.strip().endswith(f"{url}: nothing listens there (connection refused)")
    assert len(err.splitlines()) == 1


def test_keys_are_made_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "key"
    assert exit_code("keys", str(path)) == 0
    key = FleetKey.load(path)
    assert exit_code("keys", str(path)) == 2
    assert exit_code("keys", str(path), "--if-missing") == 0
    assert FleetKey.load(path) == key
    path.write_text("damaged")
    assert exit_code("keys", str(path), "--if-missing") == 2
    assert key.secret.decode() not in "".join(capsys.readouterr())


def test_health_tells_why_not(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        assert exit_code("health", address) == 1
    assert address in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "base"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://h:1/", "http://h:1"),
        ("http://h:1/v1", "http://h:1"),
        ("https://h/prefix/v1/", "https://h/prefix"),
    ],
)
def test_base_urls(given: str, base: str) -> None:
    assert base_url(given) == base


# transom up


def plan(toml: Path | None = None, environ: dict[str, str] | None = None, **settings: object) -> up.Plan:
    config = up.UpConfig(**settings)  # type: ignore[arg-type]
    return up.make_plan(config, toml_path=None if toml is None else str(toml), environ=environ or {})


def flag(spec: up.ChildSpec, name: str) -> str:
    return spec.command[spec.command.index(name) + 1]


def test_plan_has_the_processes_asked_for() -> None:
    made = plan(encoders=3, prefills=1, decodes=2, port=9000, host="127.0.0.2", model="./m")
    assert list(made.workers) == ["encoder-0", "encoder-1", "encoder-2", "prefill", "decode-0", "decode-1"]
    assert made.kinds["decode-1"] == "decode"
    for spec in (*made.workers.values(), made.gateway):
        build_parser().parse_args(spec.command[spec.command.index("transom") + 1 :])
        assert flag(spec, "--model") == "./m"
    assert {spec.http_port for spec in made.workers.values()} == {0}
    assert {flag(spec, "--http-host") for spec in made.workers.values()} == {"127.0.0.1"}
    assert made.gateway.http_port == 9000
    assert flag(made.gateway, "--http-host") == "127.0.0.2"


def test_cores_are_shared_out_and_never_oversold() -> None:
    made = plan(encoders=2, prefills=1, decodes=1)
    share = max(1, usable_cores() // 4)
    for name in ("encoder-0", "encoder-1"):
        assert flag(made.workers[name], "--threads") == str(share)
    for spec in (*made.workers.values(), made.gateway):
        assert spec.env["OMP_NUM_THREADS"] == flag(spec, "--threads")
    total = sum(int(flag(spec, "--threads")) for spec in made.workers.values())
    assert total <= max(usable_cores(), 4)


def test_the_ranks_of_encoders_count_as_engines(tmp_path: Path) -> None:
    made = plan(encoders=2, encoder_ranks=3)
    share = max(1, usable_cores() // 8)
    for name in ("encoder-0", "encoder-1"):
        assert flag(made.workers[name], "--ranks") == "3"
        assert flag(made.workers[name], "--threads") == str(3 * share)
    assert flag(made.workers["prefill"], "--threads") == str(share)
    toml = tmp_path / "fleet.toml"
    toml.write_text("[encoder]\nranks = 2\n")
    own = plan(toml)
    assert "--ranks" not in own.workers["encoder"].command  # it reads the same file
    assert flag(own.workers["encoder"], "--threads") == str(2 * max(1, usable_cores() // 4))


def test_settings_of_stages_reach_them_and_win_over_shares(tmp_path: Path) -> None:
    toml = tmp_path / "fleet.toml"
    toml.write_text('[common]\ndevice = "cpu"\nmodel = "org/m"\n[encoder]\nthreads = 7\n[up]\nencoders = 2\n')
    environ = {"TRANSOM_DECODE_THREADS": "5"}
    made = plan(toml, environ)
    assert flag(made.workers["encoder"], "--threads") == "7"
    assert flag(made.workers["decode"], "--threads") == "5"
    assert made.workers["decode"].env["TRANSOM_DECODE_THREADS"] == "5"
    for spec in (*made.workers.values(), made.gateway):
        assert flag(spec, "--config") == str(toml)
        assert "--device" not in spec.command
    given = plan(toml, device="cuda", log_level="debug")
    assert flag(given.workers["prefill"], "--device") == "cuda"
    assert flag(given.gateway, "--log-level") == "debug"


@pytest.mark.parametrize(
    ("toml", "environ", "told"),
    [
        ("[decode]\nmax_batch_tokenz = 3\n", {}, "[decode] max_batch_tokenz: no such setting of decode"),
        ("[encoder]\nthreads = -3\n", {}, "[encoder] threads: -3 is out of range"),
        ("[common]\nport = 3\n", {}, "[common] port: no such setting of encoder"),
        ("", {"TRANSOM_PREFILL_THREADS": "many"}, "environment TRANSOM_PREFILL_THREADS: 'many'"),
        ("", {"TRANSOM_GATEWAY_COLOUR": "red"}, "TRANSOM_GATEWAY_COLOUR: no such setting of gateway"),
    ],
)
def test_wrong_settings_of_any_stage_stop_up_before_it_starts_one(
    tmp_path: Path, toml: str, environ: dict[str, str], told: str
) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text(toml)
    with pytest.raises(ConfigError) as caught:
        plan(path, environ)
    assert told in caught.value.message


def test_drain_times_fit_into_the_promise_to_stop_within_5_s() -> None:
    longest = next(row["le"] for row in describe(up.UpConfig) if row["name"] == "drain_s")
    made = plan(drain_s=longest)
    gateway_s = float(flag(made.gateway, "--drain-timeout-s"))
    workers_s = max(float(flag(spec, "--drain-timeout-s")) for spec in made.workers.values())
    assert gateway_s <= up._STOP_LIMIT_S < 5
    assert workers_s + 1.5 < 5  # what stage.py allows itself after its supervisor's death


@pytest.mark.parametrize(
    ("http", "url"),
    [
        ("http://0.0.0.0:80", "http://127.0.0.1:80"),
        ("http://[::]:80", "http://[::1]:80"),
        ("http://10.0.0.1:80", "http://10.0.0.1:80"),
    ],
)
def test_printed_url_can_be_used_here(http: str, url: str) -> None:
    assert up.local_url(http) == url


# transom doctor


def test_doctor_prints_one_json_object(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_PROBE_S", PATIENCE_S)
    code = exit_code("doctor", "--json", "--port", "0")
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert err == ""
    checks = {check["name"]: check for check in result["checks"]}
    assert {"python", "torch", "ffmpeg (PyAV)", "torchcodec", "/dev/shm", "ulimits", "checkpoint"} <= set(
        checks
    )
    assert "numa balancing" in checks
    assert checks["torch"]["status"] == "ok"
    assert result["ok"] is all(check["status"] != "fail" for check in result["checks"])
    assert code == (0 if result["ok"] else 1)


@pytest.mark.parametrize(("content", "status"), [("0\n", "ok"), ("1\n", "warn"), ("2\n", "warn")])
def test_numa_balancing_is_advised_against(tmp_path: Path, content: str, status: str) -> None:
    path = tmp_path / "numa_balancing"
    path.write_text(content)
    check = doctor.check_numa_balancing(path)
    assert check.status == status
    assert ("switch it off (sysctl -w kernel.numa_balancing=0): " in check.advice) == (status == "warn")
    assert doctor.check_numa_balancing(tmp_path / "absent").status == "ok"


def test_limits_are_judged(tmp_path: Path) -> None:
    assert doctor.check_open_files(1024, 4096).status == "warn"
    assert doctor.check_open_files(65536, 65536).status == "ok"
    assert doctor.check_cores(1).status == "warn"
    assert doctor.check_shm(tmp_path).status in ("ok", "warn")
    assert doctor.check_shm(tmp_path / "absent").status == "fail"


def test_ports_are_tried() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        check = doctor.check_listen("127.0.0.1", taken.getsockname()[1])
    assert (check.status, check.detail) == ("warn", "127.0.0.1: Address already in use")
    assert doctor.check_listen("no.such.host.invalid", 1).status == "warn"


def test_checkpoints_are_looked_for(tmp_path: Path) -> None:
    assert doctor.check_model("mimo-nano").status == "ok"
    check = doctor.check_model(str(tmp_path))
    assert (check.status, check.detail) == (
        "fail",
        f"{tmp_path} lacks config.json, tokenizer.json, *.safetensors",
    )
    assert doctor.check_model("nobody/never-published-this").status == "warn"
    with pytest.raises(ConfigError, match="no folder, not 'mimo-nano' and no hub id"):
        doctor.check_model("not a hub id")
    with pytest.raises(ConfigError, match="no folder, not 'mimo-nano' and no hub id"):
        doctor.check_model("mimo-nan0")


def test_output_is_plain_off_a_terminal() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "transom", "health", "127.0.0.1:9"],
        capture_output=True,
        timeout=PATIENCE_S,
        check=False,
        env={**os.environ, "TERM": "xterm-256color"},
    )
    assert done.returncode == 1
    assert b"\x1b" not in done.stdout + done.stderr


async def test_log_lines_keep_their_prefix_beside_the_spinner() -> None:
    config = up.UpConfig()
    run = up.Up(config, up.make_plan(config, toml_path=None, environ={}))
    shown = io.StringIO()
    run._log = Console(file=shown, force_terminal=True, soft_wrap=True, highlight=False, markup=False)
    with run._progress():
        run._log_line("encoder", f"[bold] {'x' * 200}")
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.getvalue())
    assert f"encoder | [bold] {'x' * 200}\n" in plain


def test_a_stage_gives_back_at_its_end_what_the_process_holds(tmp_path: Path) -> None:
    """Stages end without Python's own end; shared memory that is still read is given back all the same."""
    code = (
        "import atexit\nfrom transom.cli import main\natexit.register(print, 'given back', flush=True)\n"
        f"main(['encoder', '--model', {str(tmp_path / 'none')!r}])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 2
    assert done.stdout.splitlines()[-1] == "given back"
