"""Names of media hosts to addresses, through the system or through DNS servers that the operator names.

Fetch worker. What is found is judged here, and the addresses given out are the ones that get connected to:
nobody asks for a name twice. Knows nothing of URLs.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import pycares
from aiohttp.abc import AbstractResolver, ResolveResult

from transom.errors import ConfigError

_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_DNS_TIMEOUT_S = 2.0
_DNS_TRIES = 2
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Found = list[tuple[socket.AddressFamily, str]]


def embedded_addresses(address: Address) -> list[Address]:
    """Return the address and any IPv4 address that it stands for (mapped, 6to4, Teredo, NAT64)."""
    found: list[Address] = [address]
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            found.append(address.ipv4_mapped)
        if address.sixtofour is not None:
            found.append(address.sixtofour)
        if address.teredo is not None:
            found.extend(address.teredo)
        if address in _NAT64 or int(address) >> 32 == 0:
            found.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return found


def is_public(text: str) -> bool:
    """Whether an address, as the resolver gives it, is one of the public internet."""
    try:
        address = ipaddress.ip_address(text.split("%", 1)[0])
    except ValueError:
        return False
    return all(
        item.is_global and not item.is_multicast and not item.is_reserved and not item.is_unspecified
        for item in embedded_addresses(address)
        # The IPv6 form of a mapped or translated address is never global itself; its IPv4 counts.
        if not (isinstance(item, ipaddress.IPv6Address) and (item.ipv4_mapped or item in _NAT64))
    )


class RefusedAddressError(OSError):
    """The name stands for an address that must not be reached. Of the log: no client learns the address."""


class DnsServers:
    """Asks the given servers and nothing else: neither the hosts file nor what resolv.conf names.

    Answers are kept as long as they allow (c-ares), so that one with a TTL of 0 is never used twice.
    """

    def __init__(self, servers: Sequence[str]) -> None:
        try:
            self._channel = pycares.Channel(
                servers=servers, timeout=_DNS_TIMEOUT_S, tries=_DNS_TRIES, lookups="b"
            )
        except (pycares.AresError, ValueError) as error:
            raise ConfigError(f"fetch_dns_servers {', '.join(servers)}: {error}") from None

    async def find(self, host: str, port: int, family: socket.AddressFamily) -> Found:
        """Return the addresses of a name; raise OSError when there are none."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Found] = loop.create_future()

        def settle(result: Any, code: int | None) -> None:
            if answer.done():
                return
            if code is not None:
                answer.set_exception(OSError(code, "DNS: " + _text(pycares.errno.strerror(code))))
            else:
                answer.set_result(
                    [(socket.AddressFamily(node.family), _text(node.addr[0])) for node in result.nodes]
                )

        def called_from_its_thread(result: Any, code: int | None) -> None:
            with suppress(RuntimeError):  # the loop has been closed: nobody waits any more
                loop.call_soon_threadsafe(partial(settle, result, code))

        self._channel.getaddrinfo(
            host, port, family=family, type=socket.SOCK_STREAM, callback=called_from_its_thread
        )
        return await answer

    def close(self) -> None:
        """Give up what is being asked."""
        self._channel.close()


def _text(address: str | bytes) -> str:
    return address.decode("ascii") if isinstance(address, bytes) else address


async def ask_system(host: str, port: int, family: socket.AddressFamily) -> Found:
    """Return the addresses that the system's resolver gives for a name."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, family=family)
    return [(kind, str(address[0])) for kind, _, _, _, address in found]


class JudgingResolver(AbstractResolver):
    """Gives public addresses only. Without DNS servers the system is asked."""

    def __init__(self, allow_private: bool, dns_servers: Sequence[str] = ()) -> None:
        self._allow_private = allow_private
        self._dns = DnsServers(dns_servers) if dns_servers else None

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Return what may be connected to; raise RefusedAddressError if any address is not public."""
        find: Callable[..., Any] = ask_system if self._dns is None else self._dns.find
        results: list[ResolveResult] = []
        for kind, text in await find(host, port, family):
            # One bad address among good ones refuses the name: it is a rebinding attempt.
            if not self._allow_private and not is_public(text):
                raise RefusedAddressError(f"{host} stands for {text}")
            results.append(
                ResolveResult(
                    hostname=host, host=text, port=port, family=kind, proto=0, flags=socket.AI_NUMERICHOST
                )
            )
        return results

    async def close(self) -> None:
        if self._dns is not None:
            self._dns.close()
