"""A network for tests of downloads: public and forbidden addresses on one interface, and a DNS that lies.

For programs of their own: whoever enters the namespace has left the machine's network. What gets past a
fetcher's guard there really arrives, and can be counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import os
import socket
import struct
import sys
from collections import Counter
from pathlib import Path
from typing import Any

PUBLIC, OTHER_PUBLIC, SECRET = "93.184.216.34", "8.8.4.4", "127.0.0.1"
METADATA, PRIVATE = "169.254.169.254", "10.0.0.1"
NO_NAMESPACE = 77
# By name: the address records of the first question, of the second, and so on; the last ones stay.
RECORDS: dict[str, list[list[str]]] = {
    "honest.test": [[PUBLIC]],
    "rebind.test": [[PUBLIC], [SECRET]],
    "hop.test": [[PUBLIC], [SECRET]],
    "mixed.test": [[PUBLIC, SECRET]],
    "both.test": [[PUBLIC, OTHER_PUBLIC]],
    "inner.test": [[SECRET]],
    "metadata.google.internal": [[METADATA]],
    "mapped.test": [["::ffff:127.0.0.1"]],
    "six.test": [["::1"]],
    "alias.test": [["inner.test"]],
}
REDIRECTS = {
    "literal": "http://127.0.0.1/secret", "number": "http://2130706433/secret", "six": "http://[::1]/secret",
    "short": "http://127.1/secret", "localhost": "http://localhost/secret", "dot": "http://LOCALHOST./secret",
    "name": "http://inner.test/secret", "self": "http://hop.test/secret", "file": "file:///etc/passwd",
    "port": "http://honest.test:8080/", "elsewhere": "http://both.test/", "round": "/round",
}  # fmt: skip


def enter_namespace() -> None:
    """Leave the machine's network; exit with a code of its own where the kernel does not allow it."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_user, new_net = 0x10000000, 0x40000000
    user, group = os.geteuid(), os.getegid()
    if libc.unshare(new_net):
        if libc.unshare(new_user | new_net):
            sys.stderr.write(os.strerror(ctypes.get_errno()))
            sys.exit(NO_NAMESPACE)
        # As who we were, where that may be said: else files and processes would seem to be nobody's.
        with contextlib.suppress(PermissionError):
            Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
            Path("/proc/self/uid_map").write_text(f"{user} {user} 1", encoding="ascii")
            Path("/proc/self/gid_map").write_text(f"{group} {group} 1", encoding="ascii")
    set_address, get_flags, set_flags = 0x8916, 0x8913, 0x8914
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        names = (b"lo", b"lo:0", b"lo:1", b"lo:2", b"lo:3")
        for name, address in zip(names, (SECRET, PUBLIC, OTHER_PUBLIC, METADATA, PRIVATE), strict=True):
            packed = struct.pack("16sHH4s8x", name, socket.AF_INET, 0, socket.inet_aton(address))
            fcntl.ioctl(control, set_address, packed)
            answer = fcntl.ioctl(control, get_flags, struct.pack("16s16x", name))
            (flags,) = struct.unpack("16xH14x", answer)
            fcntl.ioctl(control, set_flags, struct.pack("16sH14x", name, flags | 1))


async def start_dns() -> tuple[LyingDns, str]:
    """Start the server; return it with ADDRESS:PORT."""
    loop = asyncio.get_running_loop()
    transport, dns = await loop.create_datagram_endpoint(LyingDns, local_addr=(SECRET, 0))
    return dns, f"{SECRET}:{transport.get_extra_info('sockname')[1]}"


class LyingDns(asyncio.DatagramProtocol):
    """Answers with a TTL of 0. `asked` counts questions for IPv4 addresses by name; silent names get none.

    A question that comes again under its number, as its answer was late, is the same one.
    """

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self._answered: dict[bytes, bytes] = {}

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, peer: Any) -> None:
        labels, at = [], 12
        while data[at]:
            labels.append(data[at + 1 : at + 1 + data[at]].decode().lower())
            at += 1 + data[at]
        name = ".".join(labels)
        (kind,) = struct.unpack_from("!H", data, at + 1)
        if name == "silent.test":
            return
        if data in self._answered:
            self._transport.sendto(self._answered[data], peer)
            return
        lists = RECORDS.get(name)
        found: list[str] = []
        if lists is not None:
            found = lists[min(self.asked[name], len(lists) - 1)]
        if kind == 1:
            self.asked[name] += 1
        answers = [record for one in found for record in self._records(one, kind)]
        code = 0 if lists is not None else 3  # no such name
        head = data[:2] + struct.pack("!HHHHH", 0x8180 | code, 1, len(answers), 0, 0)
        self._answered[data] = head + data[12 : at + 5] + b"".join(answers)
        self._transport.sendto(self._answered[data], peer)

    def _records(self, value: str, kind: int) -> list[bytes]:
        if value.endswith(".test"):
            target = b"".join(bytes([len(part)]) + part.encode() for part in value.split(".")) + b"\0"
            alias = struct.pack("!HHHIH", 0xC00C, 5, 1, 0, len(target)) + target
            where = [address for address in RECORDS[value][0] if kind == 1]
            addresses = [target + struct.pack("!HHIH", 1, 1, 0, 4) + socket.inet_aton(one) for one in where]
            return [alias, *addresses]
        family, number = (socket.AF_INET6, 28) if ":" in value else (socket.AF_INET, 1)
        if number != kind:
            return []
        packed = socket.inet_pton(family, value)
        return [struct.pack("!HHHIH", 0xC00C, number, 1, 0, len(packed)) + packed]
