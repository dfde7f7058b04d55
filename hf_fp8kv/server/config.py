"""The configuration of a server: access, limits and its socket."""

import contextlib
import ipaddress
import os
import re
import socket
from dataclasses import dataclass

from ..errors import ConfigError

KEY_VARIABLE = "HF_FP8KV_API_KEY"
_SEND_BUFFER_BYTES = 2**17  # for each connection


@dataclass
class ServerConfig:
    """Access and limits of a server.

    Raises:
        ConfigError: A required token is missing, the token is not a valid header, or a limit is 0.
    """

    host: str | None = None  # address to listen on. None if the application is mounted
    api_key: str | None = None  # token that clients must send. None means the environment variable
    max_body: int = 4 * 2**20  # maximum size of a request's body in bytes
    max_waiting: int = 128  # maximum number of requests that wait for the engine
    grace: float = 30.0  # seconds that running requests get after a signal to stop
    metrics_interval: float = 10.0  # seconds between log lines while requests run. 0 means no lines
    header_seconds: float = 15.0  # time in which a client must send the headers of a request
    body_seconds: float = 30.0  # time in which a client must send the body of a request
    client_seconds: float = 60.0  # time for which a client may neither send nor read
    max_model_tokens: int | None = None  # for a prompt and its answer. None means the model's limit
    # Seed of the server. With it, requests without a seed get the same answers in each run that
    # receives the same requests in the same order.
    seed: int | None = None
    cors: bool = False  # whether web pages of other origins may read answers

    def __post_init__(self) -> None:
        key = os.environ.get(KEY_VARIABLE) if self.api_key is None else self.api_key
        if key is not None and not (key.isascii() and key.isprintable() and key.strip() == key):
            raise ConfigError("--api-key: expected printable ASCII without spaces around it")
        if not key and self.host is not None and not is_loopback(self.host):
            raise ConfigError(
                f"--host {self.host}: expected an access token, because other machines can reach "
                f"it, got none. Set {KEY_VARIABLE} or pass --api-key (or --host 127.0.0.1)"
            )
        for name in ("max_waiting", "max_body"):
            if (value := getattr(self, name)) < 1:
                option = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{option}: expected at least 1, got {value}")
        self.api_key = key or None

    def accepts_host(self, host_header: str) -> bool:
        """Return whether a request may have this `Host` header. No name is looked up.

        The name of a web page is refused even if it was rebound to this machine (DNS rebinding).
        """
        if self.host is None or self.api_key is not None:
            return True
        host = re.sub(r":\d*$", "", host_header.strip().lower()).strip("[]")
        is_local = host in ("localhost", self.host.lower()) or host.endswith(".localhost")
        with contextlib.suppress(ValueError):
            is_local = is_local or ipaddress.ip_address(host).is_loopback
        return is_local


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a server that listens on `host`."""
    try:
        addresses = [info[4][0] for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except OSError:
        return False
    return all(ipaddress.ip_address(str(x).split("%")[0]).is_loopback for x in addresses)


def listen(host: str, port: int) -> socket.socket:
    """Return a bound socket that does not accept connections yet. Raise ConfigError on failure."""
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        infos.sort(key=lambda info: info[0] != socket.AF_INET)  # `localhost` may be IPv4 and IPv6
        family, socket_type, protocol, _, address = infos[0]
        sock = socket.socket(family, socket_type, protocol)
        try:
            # Connections inherit the size. A larger buffer could hold megabytes that nothing reads.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
            if os.name == "posix":
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            if os.name == "posix":
                # Otherwise a second server could bind the address until the first server listens,
                # and would fail only after loading its model.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        except BaseException:
            sock.close()
            raise
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"cannot listen at {host}:{port}: {error}. Choose a different --host or --port"
        ) from error
    return sock
