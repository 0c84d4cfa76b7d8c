"""Plays a DNS server that lies, a public origin and a secret one, and lets a Fetcher loose among them.

Run as a program: it moves into a network namespace of its own, whose loopback interface also owns a public
address, so that what leaves the fetcher's guard would really arrive. Prints one JSON object.
"""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import fcntl
import json
import os
import socket
import struct
import sys
from collections import Counter
from typing import Any

from aiohttp import web

from transom.encoder.config import EncoderConfig
from transom.encoder.fetch import Fetcher, FetchLimits
from transom.errors import MediaError

PUBLIC, OTHER_PUBLIC, SECRET = "93.184.216.34", "8.8.4.4", "127.0.0.1"
NO_NAMESPACE = 77
# By name: the address records of the first question, of the second, and so on; the last ones stay.
RECORDS: dict[str, list[list[str]]] = {
    "honest.test": [[PUBLIC]],
    "rebind.test": [[PUBLIC], [SECRET]],
    "hop.test": [[PUBLIC], [SECRET]],
    "mixed.test": [[PUBLIC, SECRET]],
    "both.test": [[PUBLIC, OTHER_PUBLIC]],
    "inner.test": [[SECRET]],
    "metadata.google.internal": [["169.254.169.254"]],
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
    if libc.unshare(new_net) and libc.unshare(new_user | new_net):
        sys.stderr.write(os.strerror(ctypes.get_errno()))
        sys.exit(NO_NAMESPACE)
    set_address, get_flags, set_flags = 0x8916, 0x8913, 0x8914
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for name, address in ((b"lo", SECRET), (b"lo:0", PUBLIC), (b"lo:1", OTHER_PUBLIC)):
            packed = struct.pack("16sHH4s8x", name, socket.AF_INET, 0, socket.inet_aton(address))
            fcntl.ioctl(control, set_address, packed)
            answer = fcntl.ioctl(control, get_flags, struct.pack("16s16x", name))
            (flags,) = struct.unpack("16xH14x", answer)
            fcntl.ioctl(control, set_flags, struct.pack("16sH14x", name, flags | 1))


class LyingDns(asyncio.DatagramProtocol):
    """Answers with a TTL of 0. `asked` counts questions for IPv4 addresses by name; silent names get none."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()

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
        lists = RECORDS.get(name)
        found: list[str] = []
        if lists is not None:
            found = lists[min(self.asked[name], len(lists) - 1)]
        if kind == 1:
            self.asked[name] += 1
        answers = [record for one in found for record in self._records(one, kind)]
        code = 0 if lists is not None else 3  # no such name
        head = data[:2] + struct.pack("!HHHHH", 0x8180 | code, 1, len(answers), 0, 0)
        self._transport.sendto(head + data[12 : at + 5] + b"".join(answers), peer)

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


async def serve(address: str, hits: Counter[str], body: bytes) -> None:
    """Serve HTTP on port 80 of an address for as long as the program runs."""

    async def answer(request: web.Request) -> web.Response:
        hits[f"{request.host}{request.path}"] += 1
        target = REDIRECTS.get(request.path[1:])
        headers = {"Connection": "close"}
        if target is not None and address != SECRET:
            return web.Response(status=302, headers=headers | {"Location": target})
        return web.Response(body=body, headers=headers)

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, address, 80).start()


async def main() -> dict[str, Any]:
    """Fetch from everyone; return what came of it, by case."""
    public: Counter[str] = Counter()
    secret: Counter[str] = Counter()
    await serve(PUBLIC, public, b"public")
    await serve(OTHER_PUBLIC, public, b"public")
    await serve(SECRET, secret, b"secret")
    loop = asyncio.get_running_loop()
    transport, dns = await loop.create_datagram_endpoint(LyingDns, local_addr=(SECRET, 0))
    server = f"{SECRET}:{transport.get_extra_info('sockname')[1]}"
    defaults = FetchLimits.of(EncoderConfig(fetch_dns_servers=(server,)))
    results: dict[str, Any] = {}

    async def fetch(case: str, url: str, **changes: Any) -> None:
        fetcher = Fetcher(dataclasses.replace(defaults, **changes))
        await fetcher.start()
        try:
            results[case] = (await fetcher.fetch(url)).data.decode()
        except MediaError as error:
            results[case] = error.message
        finally:
            await fetcher.close()

    await fetch("honest", "http://honest.test/a.png")
    await fetch("both", "http://both.test/a.png")
    await fetch("first", "http://rebind.test/a.png")
    results["asked_at_first"] = dns.asked["rebind.test"]
    await fetch("again", "http://rebind.test/a.png")
    for name in ("mixed.test", "inner.test", "alias.test", "mapped.test", "six.test", "unknown.test",
                 "metadata.google.internal", "METADATA.google.internal."):  # fmt: skip
        await fetch(name, f"http://{name}/a.png")
    for path in REDIRECTS:
        host = "hop.test" if path == "self" else "honest.test"
        await fetch(f"to {path}", f"http://{host}/{path}", domains=("*",))
    await fetch("listed", "http://honest.test/elsewhere", domains=("honest.test",))
    await fetch("silent", "http://silent.test/a.png", total_s=0.3)
    return results | {
        "secret_hits": dict(secret),
        "rounds": public["honest.test/round"],
        "asked": dict(dns.asked),
        "elsewhere_hits": public["both.test/"],
    }


if __name__ == "__main__":
    enter_namespace()
    print(json.dumps(asyncio.run(main())))  # noqa: T201
