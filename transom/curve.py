"""Fleet authentication: one CURVE key pair shared by all processes of a fleet.

Loopback needs no key; any other address does. The key file is made by `transom keys FILE`.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import zmq
import zmq.auth.asyncio

from transom.errors import ConfigError


@dataclass(frozen=True, repr=False)
class FleetKey:
    """The fleet's key pair, Z85-encoded. Whoever holds it belongs to the fleet."""

    public: bytes
    secret: bytes

    @classmethod
    def load(cls, path: str | Path) -> FleetKey:
        """Read a key file; raise ConfigError when it is missing, malformed or readable by others."""
        path = Path(path)
        try:
            mode = path.stat().st_mode
            lines = path.read_text(encoding="ascii").split()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"fleet key file {path}: {error}") from None
        if mode & 0o077:
            raise ConfigError(f"fleet key file {path} is readable by others: chmod 600 it")
        if len(lines) != 2 or any(len(line) != 40 for line in lines):
            raise ConfigError(f"fleet key file {path}: expected two Z85 keys of 40 characters")
        return cls(lines[0].encode(), lines[1].encode())

    @staticmethod
    def create(path: str | Path) -> None:
        """Write a new key pair to `path` (mode 600); an existing file is an error."""
        public, secret = zmq.curve_keypair()
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise ConfigError(f"fleet key file {path}: {error}") from None
        with os.fdopen(handle, "wb") as file:
            file.write(public + b"\n" + secret + b"\n")

    def start_authenticator(self, context: Any) -> Any:
        """Start the ZAP handler that admits holders of the fleet key only."""
        authenticator = zmq.auth.asyncio.AsyncioAuthenticator(context)
        authenticator.start()
        authenticator.configure_curve_callback("*", credentials_provider=_Provider(self.public))
        return authenticator

    def secure_server(self, socket: Any) -> None:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public)

    def secure_client(self, socket: Any) -> None:
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public)


class _Provider:
    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        """Called by pyzmq with the client's public key, Z85-encoded."""
        return hmac.compare_digest(key, self._public)


def is_loopback(address: str) -> bool:
    """Tell whether a ZMQ address can be reached from this machine only."""
    parts = urlsplit(address)
    if parts.scheme == "ipc":
        return True
    host = parts.hostname or ""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def require_fleet_key(address: str, key: FleetKey | None) -> None:
    """Raise ConfigError for an address off loopback when there is no fleet key."""
    if key is None and not is_loopback(address):
        raise ConfigError(
            f"address {address} is not loopback: set --curve-key-file (make one with `transom keys FILE`)"
        )
