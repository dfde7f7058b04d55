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
        ConfigError: A required key is missing, the key is not a valid header, or a limit is 0.
    """

    host: str | None = None  # address to listen on. None if the application is mounted
    api_key: str | None = None  # key that clients must send. None means the environment variable
    max_body_bytes: int = 4 * 2**20  # maximum size of a request's body
    max_waiting: int = 128  # maximum number of requests that wait for the engine
    grace_seconds: float = 30.0  # time that running requests get after a signal to stop
    log_seconds: float = 10.0  # time between log lines while requests run. 0 means no lines
    stop_seconds: float = 30.0  # time that a running step gets when the engine stops
    header_seconds: float = 15.0  # time in which a client must send the headers of a request
    body_seconds: float = 30.0  # time in which a client must send the body of a request
    client_seconds: float = 60.0  # time for which a client may neither send nor read
    max_model_tokens: int | None = None  # for a prompt and its answer. None means the model's limit
    # Seed of the requests that have no seed. With it, every run that receives the same requests in
    # the same order gives the same answers.
    seed: int | None = None
    ignore_unknown_fields: bool = False  # whether to ignore fields that no path has
    enable_cors: bool = False  # whether web pages of other origins may read responses

    def __post_init__(self) -> None:
        key = os.environ.get(KEY_VARIABLE) if self.api_key is None else self.api_key
        if key is not None and not (key.isascii() and key.isprintable() and key.strip() == key):
            raise ConfigError("--api-key: expected printable ASCII without spaces around it")
        if not key and self.host is not None and not is_loopback(self.host):
            raise ConfigError(
                f"--host {self.host}: expected an API key, because other machines can reach "
                f"it, got none. Set {KEY_VARIABLE} or pass --api-key (or --host 127.0.0.1)"
            )
        limits = (("--max-waiting", self.max_waiting), ("--max-body", self.max_body_bytes))
        for option, limit in limits:
            if limit < 1:
                raise ConfigError(f"{option}: expected at least 1, got {limit}")
        self.api_key = key or None

    def accepts_host(self, host_header: str) -> bool:
        """Return whether a request may have this `Host` header, without a DNS query.

        A website's host name is refused, even if it resolves to this machine (DNS rebinding).
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
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    addresses = [str(address[0]).partition("%")[0] for *_, address in infos]  # without the zone
    return all(ipaddress.ip_address(address).is_loopback for address in addresses)


def bind_socket(host: str, port: int) -> socket.socket:
    """Return a bound socket that does not accept connections yet. Raise ConfigError on failure."""
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        # `localhost` may have addresses of IPv4 and IPv6. Prefer IPv4.
        ipv4_infos = [info for info in infos if info[0] == socket.AF_INET]
        family, socket_type, protocol, _, address = (ipv4_infos or infos)[0]
        sock = socket.socket(family, socket_type, protocol)
        try:
            # Connections inherit the size. Larger buffers could hold megabytes for stalled clients.
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
            f"--host, --port: cannot listen at {host}:{port}: {error}. Choose another address"
        ) from error
    return sock
