"""Plays a DNS server that lies, a public origin and a secret one, and lets a Fetcher loose among them.

Run as a program, in a network namespace of its own. Prints one JSON object.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections import Counter
from typing import Any

from aiohttp import web

from tests.lying_network import OTHER_PUBLIC, PUBLIC, REDIRECTS, SECRET, enter_namespace, start_dns
from transom.encoder.config import EncoderConfig
from transom.encoder.fetch import Fetcher, FetchLimits
from transom.errors import MediaError


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
    dns, server = await start_dns()
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
