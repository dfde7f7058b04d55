"""Test a server with clients that misuse it, for a bounded time.

    python -m tests.tools.server_abuse --minutes 10

The program starts `hf-fp8kv serve` on this machine with a tiny model. For some minutes, good
clients request chats, completions, responses, streams, several answers, penalties, structured
output and forced tools. Bad clients send incomplete bodies, bad chunks and floods of connections,
abandon long prompts, or close connections while the response is sent. The program prints a table
of all requests, and all violations:

* a response with status 5xx, a different response to a repeated request, or a request without a
  response at its deadline
* memory that still grows in the second half of the time
* pages that are not freed, so the last request, which needs all pages, fails
* a traceback in the log, a nonzero exit code or an exit after more than 35 s, after SIGTERM while
  requests run

With `--hostile`, all clients except one send requests that must not harm a server: long prompts
that are abandoned, pipelined requests whose responses are never read, endless headers, and bodies
without the last byte. There are two further violations: the 99th percentile of /health exceeds
0.5 s, or memory grows by more than 256 MiB. Other processes of the machine also delay /health.
"""

import argparse
import contextlib
import json
import random
import socket
import statistics
import struct
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from tests.helpers.serve_process import TOOLS_TEMPLATE, Server, save_chat_model

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
NUM_PAGES, PAGE_SIZE = 96, 16
CONTEXT_LENGTH = 2 * NUM_PAGES * PAGE_SIZE
MAX_SECONDS = 120.0  # time limit of a request, among 60 clients on two cores
MAX_GROWTH_BYTES = 24 * 2**20  # limit for the growth of memory from the second to the last quarter
# Limit for the growth since the start, if clients are hostile: 64 MiB of bodies take 150 MiB of the
# heap, and the tokens of a long prompt take 90 MiB.
MAX_HOSTILE_GROWTH_BYTES = 256 * 2**20
MAX_HEALTH_SECONDS = 0.5  # limit for the 99th percentile of /health, if clients are hostile
MAX_IDLE_SECONDS = 5.0  # time that a client may neither send nor read
HELD_BODY_BYTES = 4 * 2**20 - 1  # size of a body whose last byte is not sent
# Actions of hostile clients. The first action is also an action of bad clients.
HOSTILE_ACTIONS = ("do_long_prompts", "do_pipeline", "do_headers", "do_stall")
# Actions whose connections must not break.
GOOD_ACTIONS = ("do_request", "do_repeat")
LONG_PROMPT = "x" * 150_000  # too long for the model, and not too long to be tokenized
MAX_EXIT_SECONDS = 35.0
REPEATED_FIELDS = {"prompt": "a steady question, ", "max_tokens": 24}
WORDS = ("one", "page", "after", "another", "holds", "what", "was", "said", "before")
SCHEMA = {
    "type": "object", "required": ["name", "age"], "additionalProperties": False,
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
}  # fmt: skip
# Fields of requests.
SHARED_FIELDS = (
    {},
    {"temperature": 2.0, "top_p": 0.5, "seed": 3},
    {"temperature": 1e-40, "top_p": 1e-9, "stop": ["e", "no such text"]},
    {"presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.3},
    {"min_p": 0.05, "min_tokens": 3, "logit_bias": {"5": 2}},
    {"structured_outputs": {"json": SCHEMA}},
    {"structured_outputs": {"regex": "[a-z]{3,9}-[0-9]{2}"}},
)
TOOL = {"type": "function", "function": {"name": "f", "description": "f", "parameters": SCHEMA}}
CHAT_FIELDS = (
    {"tools": [TOOL], "tool_choice": "required"},
    {"tools": [TOOL], "tool_choice": "auto"},
    {"logprobs": True, "top_logprobs": 3},
)
COMPLETION_FIELDS = ({"logprobs": 3, "echo": True}, {"structured_outputs": {"choice": ["a", "b"]}})
BAD_BODIES = (
    b"{nope", b"[]", b'{"prompt": ""}', b'{"prompt": "x", "bogus": 1}', b"\xff\xfe",
    b'{"prompt": "x", "temperature": NaN}', b'{"prompt": "x", "max_tokens": 100000000}',
    b'{"prompt": "x", "structured_outputs": {"regex": "("}}', b"[" * 50_000,
)  # fmt: skip


class AbuseRun:
    """The requests of all clients to a server. A method `do_ACTION` sends a kind of requests.

    Args:
        server: The server.
        seconds: Duration of the run.
        seed: Seed of the random requests.
        is_hostile: Whether all clients except one are hostile.
    """

    def __init__(self, server: Server, seconds: float, seed: int, *, is_hostile: bool) -> None:
        self.server, self.seed, self.is_hostile = server, seed, is_hostile
        self.request_seconds: dict[str, list[float]] = defaultdict(list)  # by action
        self.status_counts: Counter[tuple[str, object]] = Counter()  # by action and status
        self.memory_bytes: list[int] = []  # of the process over time
        self.violations: list[str] = []
        self.lock = threading.Lock()
        self.repeated_text = self.send(COMPLETIONS, REPEATED_FIELDS)[1]["choices"][0]["text"]
        self.deadline = time.monotonic() + seconds

    def run_client(self, index: int) -> None:
        """Run client `index` until the deadline of the run."""
        rng = random.Random(self.seed * 1000 + index)
        all_names = {name for name in dir(self) if name.startswith("do_")}
        mixed_names = sorted(all_names.difference(HOSTILE_ACTIONS[1:]))
        names = HOSTILE_ACTIONS if self.is_hostile else mixed_names
        # Among hostile clients, client 0 is good. Otherwise half of the requests are good, so bad
        # requests have clients to disturb.
        good_name = "do_repeat" if self.is_hostile else "do_request"
        while time.monotonic() < self.deadline:
            is_good = index == 0 if self.is_hostile else rng.random() < 0.5
            name = good_name if is_good else rng.choice(names)
            start = time.monotonic()
            try:
                status: object = getattr(self, name)(rng)
            except Exception as error:
                status = type(error).__name__
                is_bad_client = isinstance(error, OSError) and name not in GOOD_ACTIONS
                if not is_bad_client:
                    self.add_violation(f"{name}: {error!r}"[:500])
            self.record(name.removeprefix("do_"), status, time.monotonic() - start)

    def record(self, name: str, status: object, seconds: float) -> None:
        with self.lock:
            self.status_counts[name, status] += 1
            self.request_seconds[name].append(seconds)

    def add_violation(self, text: str) -> None:
        with self.lock:
            self.violations.append(text)

    # -- good clients -----------------------------------------------------------------------------

    def send(self, path: str, fields: dict[str, Any]) -> tuple[int, Any]:
        """Return the status and the JSON of a response, or of the last event of a stream."""
        status, text, _ = self.server.ask(path, fields)
        if not fields.get("stream") or status != 200:
            return status, json.loads(text)
        events = [line.removeprefix("data: ") for line in text.split("\n") if line]
        if path != RESPONSES and events.pop() != "[DONE]":
            raise AssertionError("the stream does not end with [DONE]")
        return status, json.loads(events[-1])

    def do_request(self, rng: random.Random) -> object:
        path, fields = make_request(rng)
        status, response = self.send(path, fields)
        if status not in (200, 429) or (status == 200 and response.get("error") is not None):
            self.add_violation(
                f"{status} to {json.dumps(fields):.300}: {json.dumps(response):.300}"
            )
        return status

    def do_repeat(self, rng: random.Random) -> object:
        status, response = self.send(COMPLETIONS, REPEATED_FIELDS)
        if self.is_hostile:
            time.sleep(1)
        if status == 200 and response["choices"][0]["text"] != self.repeated_text:
            self.add_violation(f"a different response: {response['choices'][0]['text']!r}")
        elif status not in (200, 429):
            self.add_violation(f"{status} to the repeated request: {json.dumps(response):.300}")
        return status

    def do_bad_body(self, rng: random.Random) -> object:
        with self._connect() as connection:
            self._send_post(connection, COMPLETIONS, rng.choice(BAD_BODIES))
            status = _read_status(connection)
        if status not in (400, 429):
            self.add_violation(f"a bad body: expected 400 or 429, got {status}")
        return status

    # -- bad clients ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _connect(self, timeout: float = MAX_SECONDS) -> Any:
        address = ("127.0.0.1", self.server.port)
        with contextlib.closing(socket.create_connection(address, timeout=timeout)) as connection:
            yield connection

    def _send_post(
        self, connection: socket.socket, path: str, body: bytes, *, length: int | None = None
    ) -> None:
        size = len(body) if length is None else length
        connection.sendall(
            b"POST %s HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%s" % (path.encode(), size, body)
        )

    def do_disconnect(self, rng: random.Random) -> object:
        """Disconnect during the body, the prefill or the response, which is read slowly."""
        path, fields = make_request(rng)
        body = json.dumps(fields).encode()
        with self._connect() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            length = len(body) if rng.random() < 0.8 else rng.randrange(1, len(body))
            self._send_post(connection, path, body[:length], length=len(body))
            time.sleep(rng.choice((0, 0.01, 0.1, 2)))
            if rng.random() < 0.5:  # with RST
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return "left"

    def do_bad_chunks(self, rng: random.Random) -> object:
        chunk = rng.choice((b"zz\r\nhello\r\n", b"5\r\nhel", b"-1\r\n", b"ffffffffffffffff\r\nx"))
        with self._connect(10) as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
                b"content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n" + chunk
            )
            if chunk[:1] in b"5f":  # the server waits for the rest of the chunk
                return "left"
            return _read_status(connection)

    def do_flood(self, rng: random.Random) -> object:
        with contextlib.ExitStack() as stack:
            for _ in range(30):
                connection = stack.enter_context(self._connect())
                connection.sendall(rng.choice((b"", b"GET / HT", b"POST /v1/completions HTTP")))
            time.sleep(rng.random())
        return "left"

    # -- hostile clients --------------------------------------------------------------------------

    def do_long_prompts(self, rng: random.Random) -> object:
        """Send many long prompts at once, and leave before the responses to all except the last."""
        body = json.dumps({"prompt": LONG_PROMPT, "max_tokens": 1}).encode()
        with contextlib.ExitStack() as clients:
            for _ in range(rng.randrange(8)):
                client = clients.enter_context(self._connect())
                with contextlib.suppress(ConnectionError):  # refused before it is read
                    self._send_post(client, COMPLETIONS, body)
            time.sleep(rng.choice((0, 0.1, 1)))
        with self._connect() as connection:
            self._send_post(connection, COMPLETIONS, body)
            status = _read_status(connection)
        if status not in (400, 429):
            self.add_violation(f"a long prompt: expected 400, got {status}")
        return status

    def do_pipeline(self, rng: random.Random) -> object:
        """Repeat requests in one connection, without reading a response."""
        requests = b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n" * 500
        with self._connect(12 * MAX_IDLE_SECONDS) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            try:
                while time.monotonic() < self.deadline:
                    connection.send(requests)
            except TimeoutError:
                self.add_violation("a client that reads nothing was not disconnected")
                return "hang"
            except ConnectionError:
                return "cut off"
        return "left"

    def do_headers(self, rng: random.Random) -> object:
        with self._connect(30) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n")
            try:
                for number in range(20_000):
                    connection.sendall(b"x%d: %s\r\n" % (number, b"y" * 1000))
            except ConnectionError:
                return "cut off"
        self.add_violation("20 MB of headers were read")
        return "read"

    def do_stall(self, rng: random.Random) -> object:
        """Send a body except its last byte, and wait."""
        with self._connect(30) as connection:
            self._send_post(
                connection, COMPLETIONS, b"[" + b" " * (HELD_BODY_BYTES - 2), length=HELD_BODY_BYTES
            )
            connection.settimeout(rng.uniform(1, 20))
            try:
                return _read_status(connection)
            except TimeoutError:
                return "left"

    def request_health(self) -> None:
        """Request /health and read the memory of the process while the clients run."""
        process = psutil.Process(self.server.process.pid)
        while time.monotonic() < self.deadline:
            start = time.monotonic()
            status = self.server.ask("/health")[0]
            self.record("health", status, time.monotonic() - start)
            self.memory_bytes.append(process.memory_info().rss)
            time.sleep(0.05)


def _read_status(connection: socket.socket) -> object:
    """Return the status of the response on a connection, or "closed" without a response."""
    header = connection.recv(4000)
    return int(header.split()[1]) if header.startswith(b"HTTP/1.1 ") else "closed"


def make_request(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """Return the path and the fields of a random valid request."""
    path = rng.choice((CHAT, CHAT, COMPLETIONS, COMPLETIONS, RESPONSES))
    # Most prompts have the same beginning, so they share pages.
    text = "the same beginning of many " * rng.randrange(8)
    text += " ".join(rng.choices(WORDS, k=rng.randrange(1, 16)))
    stream = rng.random() < 0.4
    if path == RESPONSES:
        fields = {"input": text, "max_output_tokens": rng.randrange(1, 40), "stream": stream}
        return path, fields
    fields = {"max_tokens": rng.randrange(1, 40), "stream": stream, "n": rng.choice((1, 1, 3))}
    if path == CHAT:
        fields["messages"] = [{"role": "user", "content": text}]
    else:
        fields["prompt"] = rng.choice((text, [text, "another", "and one"]))
    path_fields = CHAT_FIELDS if path == CHAT else COMPLETION_FIELDS
    return path, fields | rng.choice(SHARED_FIELDS + path_fields)


def check_shutdown(abuse: AbuseRun) -> None:
    """Check that a request can use all pages, and that requests finish after SIGTERM."""
    server = abuse.server
    server.wait_until(MAX_SECONDS, requests_active=0, requests_waiting=0)
    status, response = abuse.send(COMPLETIONS, {"prompt": "x" * (NUM_PAGES * PAGE_SIZE - 8)})
    if status != 200 or response["usage"]["completion_tokens"] != 9:
        abuse.add_violation(f"the last request: {status} {json.dumps(response):.200}")
    with ThreadPoolExecutor(8) as pool:
        futures = [
            pool.submit(abuse.send, COMPLETIONS, REPEATED_FIELDS | {"n": 4}) for _ in range(8)
        ]
        with contextlib.suppress(AssertionError):
            server.wait_until(10, requests_active=8)
        start = time.monotonic()
        exit_code = server.stop()
        exit_seconds = time.monotonic() - start
    statuses = {future.result()[0] for future in futures}
    if exit_code != 0 or not statuses <= {200, 503}:
        abuse.add_violation(f"after SIGTERM: exit code {exit_code}, statuses {statuses}")
    if exit_seconds > MAX_EXIT_SECONDS:
        abuse.add_violation(f"the process ended {exit_seconds:.1f} s after SIGTERM")
    if "Traceback" in server.log:
        index = server.log.index("Traceback")
        abuse.add_violation(f"a traceback in the log: {server.log[index : index + 3000]}")


def main() -> int:
    """Run the clients, print a report, and return 1 after a violation."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=1.0, help="duration of the run")
    parser.add_argument("--clients", type=int, default=60, help="number of clients")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random requests")
    parser.add_argument("--hostile", action="store_true", help="run hostile clients instead")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        (folder / "template").write_text(TOOLS_TEMPLATE)
        model = save_chat_model(folder, context=CONTEXT_LENGTH)
        arguments = ("--chat-template", str(folder / "template"), "--max-waiting", "100")
        arguments += ("--client-timeout", str(MAX_IDLE_SECONDS))
        with Server(model, *arguments, "--cb-num-blocks", str(NUM_PAGES)) as server:
            abuse = AbuseRun(server, options.minutes * 60, options.seed, is_hostile=options.hostile)
            with ThreadPoolExecutor(options.clients + 1) as pool:
                health_task = pool.submit(abuse.request_health)
                list(pool.map(abuse.run_client, range(options.clients)))
                health_task.result()
            check_shutdown(abuse)
    check_limits(abuse)
    return bool(abuse.violations)


def check_limits(abuse: AbuseRun) -> None:
    """Check the limits of memory and time. Print a line for each action, and the violations."""
    quarter_size = max(len(abuse.memory_bytes) // 4, 1)
    quarters = [
        statistics.mean(abuse.memory_bytes[n * quarter_size : (n + 1) * quarter_size])
        for n in range(4)
    ]
    growth = max(abuse.memory_bytes) - abuse.memory_bytes[0]
    health_seconds = statistics.quantiles(abuse.request_seconds["health"], n=100)[-1]
    if not abuse.is_hostile and quarters[3] - quarters[1] > MAX_GROWTH_BYTES:
        abuse.add_violation("memory still grew in the second half of the time")
    if abuse.is_hostile and growth > MAX_HOSTILE_GROWTH_BYTES:
        abuse.add_violation("memory grew by more than hostile clients may use")
    if abuse.is_hostile and health_seconds > MAX_HEALTH_SECONDS:
        abuse.add_violation(f"/health took more than {MAX_HEALTH_SECONDS} s")
    for (name, status), count in sorted(abuse.status_counts.items(), key=str):
        seconds = abuse.request_seconds[name]
        print(f"{name:12} {status!s:20} {count:7}, at most {max(seconds):.2f} s")
    means = ", ".join(f"{mean / 2**20:.0f}" for mean in quarters)
    print(f"mean memory in each quarter of the time: {means} MiB")
    print(f"memory grew by at most {growth / 2**20:.0f} MiB")
    print(f"/health, 99th percentile: {health_seconds:.3f} s")
    print(f"violations: {len(abuse.violations)}")
    for violation, count in Counter(abuse.violations).most_common(20):
        print(f"  {count} times: {violation}")


if __name__ == "__main__":
    sys.exit(main())
