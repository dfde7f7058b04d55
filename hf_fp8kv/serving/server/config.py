"""What the server is told beside what transformers' own server knows."""

import ipaddress
import os
import socket
from dataclasses import dataclass

from ...errors import ConfigError

__all__ = ["KEY_VARIABLE", "ServerConfig", "is_loopback", "listen"]

KEY_VARIABLE = "HF_FP8KV_API_KEY"


@dataclass(frozen=True)
class ServerConfig:
    """Limits and manners of a server.

    Attributes:
        api_key: what a client has to show; None: nothing.
        max_body: bytes of a request.
        max_waiting: requests that may wait for the engine.
        grace: seconds that running requests get when the server is told to stop.
        metrics_interval: seconds between lines in the log while requests run; 0: no lines.
        head_seconds: how long a client may take to send a request's headers.
        body_seconds: the same, of its body.
    """

    api_key: str | None = None
    max_body: int = 4 * 2**20
    max_waiting: int = 128
    grace: float = 30.0
    metrics_interval: float = 10.0
    head_seconds: float = 15.0
    body_seconds: float = 30.0

    @classmethod
    def checked(cls, host: str, api_key: str | None, **others: float) -> "ServerConfig":
        """Returns the settings of a server that listens at `host`.

        Raises:
            ConfigError: everyone could use it, the token fits no header, or no request fits.
        """
        key = api_key if api_key is not None else os.environ.get(KEY_VARIABLE)
        if key is not None and not (key.isascii() and key.isprintable() and key.strip() == key):
            raise ConfigError("--api-key: expected printable ASCII without spaces around it")
        if not key and not is_loopback(host):
            raise ConfigError(
                f"--host {host}: expected a token for access, since other machines can reach it, "
                f"got none; set {KEY_VARIABLE} or pass --api-key (or --host 127.0.0.1)"
            )
        if others.get("max_body", 1) < 1:
            raise ConfigError("--max-body: expected one byte or more, got 0")
        return cls(api_key=key or None, **others)  # type: ignore[arg-type]


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens at a host."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return all(ipaddress.ip_address(str(at[4][0]).split("%")[0]).is_loopback for at in found)


def listen(host: str, port: int) -> socket.socket:
    """Returns a socket that is bound, and that nobody can connect to yet.

    Raises:
        ConfigError: the address is taken, or is not one of this machine's.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        found.sort(key=lambda at: at[0] != socket.AF_INET)  # `localhost` may be both
        family, kind, protocol, _, address = found[0]
        bound = socket.socket(family, kind, protocol)
        try:
            if os.name == "posix":
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except BaseException:
            bound.close()
            raise
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"cannot listen at {host}:{port}: {error}; choose another --host or --port"
        ) from error
    return bound
