"""Names that lie: a DNS server that changes its mind between two questions, against real origins.

The program `lying_names.py` runs the fetcher with its default limits in a network of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.lying_network import NO_NAMESPACE
from tests.patience import PATIENCE_S
from transom.encoder.resolver import DnsServers
from transom.errors import ConfigError

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.encoder.server.lying_names"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    if done.returncode == NO_NAMESPACE:
        pytest.skip(f"no network namespace of our own: {done.stderr}")
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_honest_names_are_fetched(results: dict[str, Any]) -> None:
    assert results["honest"] == "public"
    assert results["both"] == "public"


def test_what_was_judged_is_what_is_connected_to(results: dict[str, Any]) -> None:
    """The name is asked for once; a second answer, the secret address, would come with a second question."""
    assert results["first"] == "public"
    assert results["asked_at_first"] == 1
    assert results["again"] == "URL host 'rebind.test' is not known or has no public address"


@pytest.mark.parametrize(
    "name",
    [
        "mixed.test", "inner.test", "alias.test", "mapped.test", "six.test", "metadata.google.internal",
        "METADATA.google.internal.", "unknown.test",
    ],
)  # fmt: skip
def test_names_of_private_addresses_and_unknown_ones_sound_alike(results: dict[str, Any], name: str) -> None:
    said = results[name].lower()
    assert said == f"url host '{name.lower()}' is not known or has no public address"


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("literal", "'127.0.0.1' is not a public address"),
        ("number", "'2130706433' is an unusual spelling of an address"),
        ("short", "'127.1' is an unusual spelling of an address"),
        ("six", "'::1' is not a public address"),
        ("localhost", "'localhost' is not known or has no public address"),
        ("dot", "is not known or has no public address"),
        ("name", "'inner.test' is not known or has no public address"),
        ("self", "'hop.test' is not known or has no public address"),
        ("file", "scheme 'file' is not allowed"),
        ("port", "port 8080 is not allowed"),
        ("round", "redirects more than 5 times"),
    ],
)
def test_every_hop_is_judged(results: dict[str, Any], target: str, said: str) -> None:
    assert said in results[f"to {target}"]


def test_a_chain_ends_after_the_fifth_redirect(results: dict[str, Any]) -> None:
    assert results["rounds"] == 6


def test_a_hop_off_the_domain_list_is_not_even_resolved(results: dict[str, Any]) -> None:
    assert results["to elsewhere"] == "public"
    assert results["listed"] == "URL host 'both.test' is not on the list of allowed domains"
    assert results["elsewhere_hits"] == 1
    assert results["asked"]["both.test"] == 2  # once by its own URL, once by the redirect without a list


def test_a_name_without_an_answer(results: dict[str, Any]) -> None:
    assert results["silent"] == "download of the URL took over 0.3 s, the limit"


def test_nothing_private_was_reached(results: dict[str, Any]) -> None:
    assert results["secret_hits"] == {}


@pytest.mark.parametrize("server", ["nonsense", "1.2.3.4:http", "dns.example"])
async def test_a_server_that_is_no_address_is_refused_at_the_start(server: str) -> None:
    with pytest.raises(ConfigError, match=f"fetch_dns_servers {server}"):
        DnsServers((server,))
