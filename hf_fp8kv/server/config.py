"""The configuration of a server: access, limits and its socket."""

import contextlib
import ipaddress
import os
import re
import socket
from dataclasses import dataclass

from ..errors import ConfigError

KEY_VARIABLE = "HF_FP8KV_API_KEY"
_UNREAD = 2**17  # bytes of answers that the kernel holds for a connection


@dataclass
class ServerConfig:
    """Access and limits of a server.

    Raises:
        ConfigError: Everyone could use it, the token is not a valid header, or no request fits.
    """

    host: str | None = None  # the address to listen on. None if it is mounted
    api_key: str | None = None  # the token that a client has to send. None means the environment's
    max_body: int = 4 * 2**20  # bytes of a request
    max_waiting: int = 128  # requests that may wait for the engine
    grace: float = 30.0  # seconds for running requests after a signal to stop
    metrics_interval: float = 10.0  # seconds between lines in the log while requests run, or 0
    head_seconds: float = 15.0  # that a client may take to send a request's headers
    body_seconds: float = 30.0  # that it may take to send the body
    client_seconds: float = 60.0  # that it may neither send nor read
    max_model_tokens: int | None = None  # of a prompt and its answer. None means the model's own
    # Makes answers to requests without a seed the same in each run that has the same requests in
    # the same order.
    seed: int | None = None
    cors: bool = False  # whether web pages of other origins may read answers

    def __post_init__(self) -> None:
        key = os.environ.get(KEY_VARIABLE) if self.api_key is None else self.api_key
        if key is not None and not (key.isascii() and key.isprintable() and key.strip() == key):
            raise ConfigError("--api-key: expected printable ASCII without spaces around it")
        if not key and self.host is not None and not is_loopback(self.host):
            raise ConfigError(
                f"--host {self.host}: expected an access token, since other machines can reach it, "
                f"got none; set {KEY_VARIABLE} or pass --api-key (or --host 127.0.0.1)"
            )
        for name in ("max_waiting", "max_body"):
            if (value := getattr(self, name)) < 1:
                option = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{option}: expected at least 1, got {value}")
        self.api_key = key or None

    def accepts_host(self, header: str) -> bool:
        """Return whether a request may have this `Host`. No name is looked up.

        A web page whose own name was rebound to this machine sends its own name.
        """
        if self.host is None or self.api_key is not None:
            return True
        name = re.sub(r":\d*$", "", header.strip().lower()).strip("[]")
        is_local = name in ("localhost", self.host.lower()) or name.endswith(".localhost")
        with contextlib.suppress(ValueError):
            is_local = is_local or ipaddress.ip_address(name).is_loopback
        return is_local


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a server at a host."""
    try:
        addresses = [info[4][0] for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except OSError:
        return False
    return all(ipaddress.ip_address(str(a).split("%")[0]).is_loopback for a in addresses)


def listen(host: str, port: int) -> socket.socket:
    """Return a bound socket that does not accept connections yet. Raises ConfigError."""
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        infos.sort(key=lambda info: info[0] != socket.AF_INET)  # `localhost` may be IPv4 and IPv6
        family, kind, protocol, _, address = infos[0]
        bound = socket.socket(family, kind, protocol)
        try:
            # Connections inherit it. Megabytes that a client does not read would be held for long.
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNREAD)
            if os.name == "posix":
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            if os.name == "posix":
                # Otherwise a second server could bind the address until the first one listens, and
                # would fail only after its model is loaded.
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        except BaseException:
            bound.close()
            raise
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"cannot listen at {host}:{port}: {error}; choose another --host or --port"
        ) from error
    return bound
