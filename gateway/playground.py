"""The playground at `/`: a few files of the package, read once, served with a strict content policy.

Gateway process. The page is a client of the public API like any other.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

from aiohttp import web

_FOLDER = Path(__file__).parent / "page"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_FILES = {
    "/": "index.html",
    "/page/style.css": "style.css",
    "/page/app.js": "app.js",
    "/page/api.js": "api.js",
    "/page/composer.js": "composer.js",
    "/page/conversation.js": "conversation.js",
    "/page/panels.js": "panels.js",
}
PATHS = tuple(_FILES)

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; "
        "media-src blob: data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


@cache
def _load(name: str) -> tuple[bytes, str]:
    """Return a file of the page and its tag."""
    body = (_FOLDER / name).read_bytes()
    return body, hashlib.sha256(body).hexdigest()[:32]


async def _serve(request: web.Request) -> web.Response:
    name = _FILES[request.path]
    body, tag = _load(name)
    headers = {**HEADERS, "ETag": f'"{tag}"'}
    if any(one.value == tag for one in request.if_none_match or ()):
        return web.Response(status=304, headers=headers)
    return web.Response(body=body, headers=headers, content_type=_TYPES[Path(name).suffix], charset="utf-8")


def routes() -> list[web.RouteDef]:
    """Return one route per file; no path of a client ever reaches the file system."""
    return [web.get(path, _serve) for path in PATHS]
