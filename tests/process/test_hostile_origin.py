"""Media servers that lie, through the whole pipeline: every client gets a clear answer, nobody is reached.

The program `hostile_origin.py` plays all of it in a network of its own: public addresses that are hostile,
and loopback, private and metadata addresses that would answer if anything asked them.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest

from tests.lying_network import NO_NAMESPACE
from tests.process.hostile_origin import MAX_MEDIA_MB, READ_S, STATUSES, TOTAL_S, cases

pytestmark = [pytest.mark.process, pytest.mark.slow]

PART = "messages[0].content[2].image_url.url"
ALLOWANCE_S = 60.0  # of a starved machine; without a limit some of them would never end
NOT_PUBLIC, UNUSUAL = "' is not a public address", "' is an unusual spelling of an address"
NOWHERE = "' is not known or has no public address"
NO_HTTP = "download of the URL failed: its server's answer is not HTTP"
TOO_LARGE = f"media at the URL is larger than {MAX_MEDIA_MB * 1024 * 1024:.0f} bytes, the limit"
SAID = {
    "url loopback": NOT_PUBLIC, "url number": UNUSUAL, "url hex": UNUSUAL, "url octal": UNUSUAL,
    "url short": UNUSUAL, "url zero": NOT_PUBLIC, "url six": NOT_PUBLIC, "url mapped": NOT_PUBLIC,
    "url local six": NOT_PUBLIC, "url nat64": NOT_PUBLIC, "url metadata": NOT_PUBLIC,
    "url private": NOT_PUBLIC, "url wide": NOT_PUBLIC, "url stops": NOT_PUBLIC, "url localhost": NOWHERE,
    "url capitals": NOWHERE, "url port": "URL port 8080 is not allowed; allowed: 80, 443",
    "url ssh": "URL port 22 is not allowed; allowed: 80, 443",
    "url password": "user names and passwords in URLs are not allowed",
    "url file": "file: URLs are not allowed here",
    "url ftp": "scheme 'ftp' is not allowed, use http, https or data",
    "name inner.test": NOWHERE, "name mixed.test": NOWHERE, "name alias.test": NOWHERE,
    "name mapped.test": NOWHERE, "name six.test": NOWHERE, "name metadata.google.internal": NOWHERE,
    "name unknown.test": NOWHERE, "name silent.test": NOWHERE,
    "rebound a": NOWHERE, "rebound b": NOWHERE,
    "to literal": NOT_PUBLIC, "to number": UNUSUAL, "to six": NOT_PUBLIC, "to short": UNUSUAL,
    "to localhost": NOWHERE, "to dot": NOWHERE, "to name": NOWHERE, "to self": NOWHERE,
    "to metadata": NOT_PUBLIC, "to private": NOT_PUBLIC, "to mapped": NOT_PUBLIC, "to inside": NOWHERE,
    "to file": "URL scheme 'file' is not allowed; allowed: http, https",
    "to data": "URL scheme 'data' is not allowed; allowed: http, https",
    "to port": "URL port 8080 is not allowed; allowed: 80, 443",
    "to password": "URL carries a user name or password",
    "to round": "the URL redirects more than 5 times, the limit",
    "to nowhere": "the URL redirects more than 5 times, the limit",
    "body endless": TOO_LARGE, "body bomb": TOO_LARGE,
    "body drip": f"download of the URL took over {TOTAL_S:g} s, the limit",
    "body silent": f"download of the URL failed: no data for {READ_S:g} s, the limit",
    "body html.png": "image format is not supported: the bytes look like an HTML page",
    "body packed.txt": "the URL's content is badly compressed",
    "body br": "the URL's server sends Content-Encoding 'br', which is not read",
    "body header": "image of 10000000000 pixels, limit 100000000",
    "body half": "download of the URL failed: the content is cut off",
    "body chunk": "download of the URL failed: the content is cut off",
    "body huge": "media at the URL has 99999999999 bytes, limit 1048576",
    "body cut": NO_HTTP, "body negative": NO_HTTP, "body word": NO_HTTP, "body two": NO_HTTP,
    "body ssh": NO_HTTP,
    "body nothing": "download of the URL failed: its server closed the connection without an answer",
    "body empty": "image is empty (0 bytes)",
    **{f"status {status}": f"the URL's server answered {status}" for status in STATUSES},
}  # fmt: skip


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    with subprocess.Popen(
        [sys.executable, "-m", "tests.process.hostile_origin"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as program:
        try:
            out, problems = program.communicate(timeout=800)
        finally:
            program.kill()
    if program.returncode == NO_NAMESPACE:
        pytest.skip(f"no network namespace of our own: {problems}")
    assert program.returncode == 0, problems
    return dict(json.loads(out))


def test_no_case_is_left_out() -> None:
    assert set(cases()) | {"rebound a", "rebound b"} == set(SAID)


@pytest.mark.parametrize("case", SAID)
def test_a_hostile_url_is_refused_by_part_and_in_time(results: dict[str, Any], case: str) -> None:
    found = results["cases"][case]
    error = found["said"]["error"]
    assert (found["status"], error["param"], error["type"]) == (400, PART, "invalid_request_error"), error
    assert error["message"].startswith(f"{PART}: ")
    assert error["message"].endswith(SAID[case])
    assert found["took_s"] < TOTAL_S + ALLOWANCE_S


def test_no_error_tells_an_address_that_its_url_did_not(results: dict[str, Any]) -> None:
    """Names of inner hosts, the DNS server and the pipeline's own sockets have addresses too."""
    for case in SAID:
        message = results["cases"][case]["said"]["error"]["message"].removeprefix(PART)
        address = re.search(r"\d+\.\d+\.\d+\.\d+|[0-9a-f]*::[0-9a-f]+", message)
        assert address is None or SAID[case] in (NOT_PUBLIC, UNUSUAL), message
        assert "tcp:" not in message


def test_what_a_name_stood_for_is_in_the_log_alone(results: dict[str, Any]) -> None:
    assert "a URL is refused: rebind.test stands for 127.0.0.1" in results["log"]
    assert "a URL is refused: metadata.google.internal stands for 169.254.169.254" in results["log"]


def test_nobody_forbidden_was_even_connected_to(results: dict[str, Any]) -> None:
    assert results["forbidden"] == {}
    assert results["origin"]["round"] == 6
    assert results["origin"]["literal"] == 1


def test_a_name_is_asked_for_once_a_download(results: dict[str, Any]) -> None:
    """Its first answer is judged and connected to; the second one, another address, is refused."""
    first = results["cases"]["rebound first"]
    assert "red circle" in first["said"]["choices"][0]["message"]["content"].lower()
    assert results["asked_at_first"] == 1
    assert results["names"]["rebind.test"] == 3


def test_good_pictures_beside_them_are_answered(results: dict[str, Any]) -> None:
    """Whatever their server calls them, packed or without a length: what counts is the content."""
    good = {case: found for case, found in results["cases"].items() if case.startswith("good ")}
    assert len(good) == 10
    for case, found in good.items():
        assert found["status"] == 200, found
        assert "red circle" in found["said"]["choices"][0]["message"]["content"].lower(), case


def test_a_page_is_no_video_and_no_sound_either(results: dict[str, Any]) -> None:
    for kind in ("video", "audio"):
        found = results["cases"][f"html {kind}"]
        assert found["status"] == 400
        assert found["said"]["error"]["param"] == f"messages[0].content[1].{kind}_url.url"
        assert "the bytes look like an HTML page" in found["said"]["error"]["message"]


def test_the_deadline_of_a_request_ends_its_downloads(results: dict[str, Any]) -> None:
    found = results["cases"]["deadline"]
    assert (found["status"], found["said"]["error"]["code"]) == (504, "deadline_exceeded")
    # The same server dripped on for as long as a download may take at those who had no deadline.
    assert found["took_s"] < results["cases"]["body drip"]["took_s"]


def test_nothing_is_left(results: dict[str, Any]) -> None:
    assert results["leaks"] == []
    assert "Traceback" not in results["log"]
