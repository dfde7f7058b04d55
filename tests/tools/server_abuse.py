"""Test a server with clients that misuse it, for a bounded time.

    python -m tests.tools.server_abuse --minutes 10

The program starts `hf-fp8kv serve` on this machine with a tiny model. Half of the requests are
good: chats, completions, responses, streams, several answers, penalties, structured output and
forced tools. The other half are bad: invalid or incomplete bodies, floods of connections, abandoned
prompts, endless headers, and responses that are never read. With `--hostile`, all clients except
one send only bad requests. The program prints all requests, and these violations:

* a response with status 5xx, a different response to a repeated request, or a request without a
  response at its deadline
* memory that still grows in the second half of the time, or by too much if clients are hostile
* pages that are not freed, so the last request, which needs all pages, fails
* a traceback in the log, a nonzero exit code or a late exit, after SIGTERM while requests run
* a 99th percentile of /health that is too high if clients are hostile. Other processes of the
  machine also delay /health.
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
import time
from collections import Counter
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
MAX_EXIT_SECONDS = 35.0
HELD_BODY = b"[" + b" " * (4 * 2**20 - 2)  # a body of 4 MiB
LONG_PROMPT = "x" * 150_000  # too long for the model, and not too long to be tokenized
REPEATED_FIELDS = {"prompt": "a steady question, ", "max_tokens": 24}
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
CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
PARTIAL_REQUESTS = (
    b"", b"GET / HT", b"POST /v1/completions HTTP", CHUNKED + b"5\r\nhel",
    CHUNKED + b"ffffffffffffffff\r\nx", CHUNKED + b"zz\r\nhello\r\n", CHUNKED + b"-1\r\n",
)  # fmt: skip


def make_request(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """Return the path and the fields of a random valid request."""
    path = rng.choice((CHAT, CHAT, COMPLETIONS, COMPLETIONS, RESPONSES))
    # Most prompts have the same beginning, so they share pages.
    text = "the same beginning of many " * rng.randrange(8) + "and words " * rng.randrange(1, 12)
    fields = {"stream": rng.random() < 0.4}
    num_tokens = rng.randrange(1, 40)
    if path == RESPONSES:
        return path, fields | {"input": text, "max_output_tokens": num_tokens}
    fields |= {"max_tokens": num_tokens, "n": rng.choice((1, 1, 3))}
    fields |= rng.choice(SHARED_FIELDS + (CHAT_FIELDS if path == CHAT else COMPLETION_FIELDS))
    if path == CHAT:
        return path, fields | {"messages": [{"role": "user", "content": text}]}
    return path, fields | {"prompt": rng.choice((text, [text, "another", "and one"]))}


def make_post(path: str, body: bytes) -> bytes:
    """Return the bytes of a request."""
    return (
        b"POST %s HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%s" % (path.encode(), len(body), body)
    )


def read_status(connection: socket.socket) -> int:
    """Return the status of the response on a connection."""
    return int(connection.recv(4000).split()[1])


class AbuseRun:
    """The requests of all clients to a server. A method `send_KIND` sends a kind of request.

    An assertion that fails in such a method is a violation.

    Attributes:
        records: Kind, status and seconds of each request.
        memory_bytes: Memory of the server over time.
        violations: Descriptions of the violations.
    """

    def __init__(self, server: Server, options: argparse.Namespace) -> None:
        self.server, self.options = server, options
        self.records: list[tuple[str, object, float]] = []
        self.memory_bytes: list[int] = []
        self.violations: list[str] = []
        self.repeated_text = self.ask(COMPLETIONS, REPEATED_FIELDS)["choices"][0]["text"]
        self.deadline = time.monotonic() + options.minutes * 60

    def run_client(self, index: int) -> None:
        """Run client `index` until the deadline of the run."""
        rng = random.Random(self.options.seed * 1000 + index)
        good_actions = (self.send_valid, self.send_repeated)
        bad_actions = (
            self.send_bad_body, self.send_and_leave, self.send_partial, self.send_long_prompts,
            self.send_pipeline, self.send_headers,
        )  # fmt: skip
        while time.monotonic() < self.deadline:
            is_good = index == 0 if self.options.hostile else rng.random() < 0.5
            action = rng.choice(good_actions if is_good else bad_actions)
            start = time.monotonic()
            status: object = None
            try:
                status = action(rng)
            except Exception as error:
                status = type(error).__name__
                if is_good or not isinstance(error, OSError):
                    self.violations.append(f"{action.__name__}: {error!r}"[:500])
            self.records.append((action.__name__, status, time.monotonic() - start))

    def request_health(self) -> None:
        """Request /health and read the memory of the process while the clients run."""
        process = psutil.Process(self.server.process.pid)
        while time.monotonic() < self.deadline:
            start = time.monotonic()
            status = self.server.ask("/health")[0]
            self.records.append(("health", status, time.monotonic() - start))
            self.memory_bytes.append(process.memory_info().rss)
            time.sleep(0.05)

    def ask(self, path: str, fields: dict[str, Any]) -> Any:
        """Return the JSON of a response, or of the last event of a stream, or None if refused."""
        status, text, _ = self.server.ask(path, fields)
        assert status in (200, 429), f"{status} to {json.dumps(fields):.300}: {text:.300}"
        if status == 429:
            return None
        if not fields.get("stream"):
            return json.loads(text)
        events = [line.removeprefix("data: ") for line in text.split("\n") if line]
        assert path == RESPONSES or events.pop() == "[DONE]", "the stream has no end"
        event = json.loads(events[-1])
        assert event.get("error") is None, event
        return event

    def send_valid(self, rng: random.Random) -> object:
        return "refused" if self.ask(*make_request(rng)) is None else "answered"

    def send_repeated(self, rng: random.Random) -> object:
        response = self.ask(COMPLETIONS, REPEATED_FIELDS)
        if response is None:
            return "refused"
        assert response["choices"][0]["text"] == self.repeated_text, response
        return "answered"

    @contextlib.contextmanager
    def _connect(self, timeout: float = MAX_SECONDS) -> Any:
        address = ("127.0.0.1", self.server.port)
        with contextlib.closing(socket.create_connection(address, timeout=timeout)) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            yield connection

    def send_bad_body(self, rng: random.Random) -> object:
        with self._connect() as connection:
            connection.sendall(make_post(COMPLETIONS, rng.choice(BAD_BODIES)))
            status = read_status(connection)
        assert status in (400, 429), f"a bad body: expected 400 or 429, got {status}"
        return status

    def send_and_leave(self, rng: random.Random) -> object:
        """Disconnect during the body, the prefill or the response."""
        path, fields = make_request(rng)
        request = make_post(path, rng.choice((json.dumps(fields).encode(), HELD_BODY)))
        with self._connect() as connection:
            connection.sendall(request if rng.random() < 0.5 else request[:-1])
            time.sleep(rng.choice((0, 0.01, 0.1, 2, 2 * MAX_IDLE_SECONDS)))
            if rng.random() < 0.5:  # with RST
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return "left"

    def send_partial(self, rng: random.Random) -> object:
        with contextlib.ExitStack() as stack:
            for _ in range(30):
                connection = stack.enter_context(self._connect())
                connection.sendall(rng.choice(PARTIAL_REQUESTS))
            time.sleep(rng.random())
        return "left"

    def send_long_prompts(self, rng: random.Random) -> object:
        """Send many long prompts at once, and leave before the responses to all except the last."""
        request = make_post(COMPLETIONS, json.dumps({"prompt": LONG_PROMPT}).encode())
        with contextlib.ExitStack() as clients:
            for _ in range(rng.randrange(8)):
                client = clients.enter_context(self._connect())
                with contextlib.suppress(ConnectionError):  # refused before it is read
                    client.sendall(request)
            time.sleep(rng.choice((0, 0.1, 1)))
        with self._connect() as connection:
            connection.sendall(request)
            status = read_status(connection)
        assert status in (400, 429), f"a long prompt: expected 400 or 429, got {status}"
        return status

    def send_pipeline(self, rng: random.Random) -> object:
        """Repeat requests in one connection, without reading a response."""
        requests = b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n" * 500
        return self._send_until_closed(requests, 10**6)

    def send_headers(self, rng: random.Random) -> object:
        header = b"x: %s\r\n" % (b"y" * 1000)
        return self._send_until_closed(b"GET /health HTTP/1.1\r\n" + header, 20_000)

    def _send_until_closed(self, data: bytes, max_repeats: int) -> object:
        """Send `data` again and again. The server must close the connection."""
        with self._connect(12 * MAX_IDLE_SECONDS) as connection:
            try:
                for _ in range(max_repeats):
                    connection.sendall(data)
            except TimeoutError:
                raise AssertionError("a client that reads nothing was not disconnected") from None
            except ConnectionError:
                return "cut off"
        raise AssertionError("the server reads without end")

    def check_shutdown(self) -> None:
        """Check that a request can use all pages, and that requests finish after SIGTERM."""
        self.server.wait_until(MAX_SECONDS, requests_active=0, requests_waiting=0)
        response = self.ask(COMPLETIONS, {"prompt": "x" * (NUM_PAGES * PAGE_SIZE - 8)})
        assert response["usage"]["completion_tokens"] == 9, "pages are missing"
        fields = REPEATED_FIELDS | {"n": 4}
        with ThreadPoolExecutor(8) as pool:
            responses = [pool.submit(self.server.ask, COMPLETIONS, fields) for _ in range(8)]
            with contextlib.suppress(AssertionError):
                self.server.wait_until(10, requests_active=8)
            start = time.monotonic()
            exit_code = self.server.stop()
            exit_seconds = time.monotonic() - start
        statuses = {response.result()[0] for response in responses}
        assert exit_code == 0, f"exit code {exit_code}"
        assert statuses <= {200, 503}, f"after SIGTERM: statuses {statuses}"
        assert exit_seconds <= MAX_EXIT_SECONDS, f"the process ended {exit_seconds:.1f} s late"
        assert "Traceback" not in self.server.log, self.server.log[-3000:]

    def check_limits(self) -> None:
        """Check the limits of memory and of the time of /health, and print the values."""
        quarter_size = len(self.memory_bytes) // 4
        quarters = [
            statistics.mean(self.memory_bytes[n * quarter_size : (n + 1) * quarter_size])
            for n in range(4)
        ]
        growth = max(self.memory_bytes) - self.memory_bytes[0]
        times = [seconds for kind, _, seconds in self.records if kind == "health"]
        health_seconds = statistics.quantiles(times, n=100)[-1]
        print(f"memory grew by {growth / 2**20:.0f} MiB, and by "
              f"{(quarters[3] - quarters[1]) / 2**20:.0f} MiB in the second half. "
              f"99th percentile of /health: {health_seconds:.3f} s")  # fmt: skip
        if self.options.hostile:
            assert growth <= MAX_HOSTILE_GROWTH_BYTES, "memory grew too much"
            assert health_seconds <= MAX_HEALTH_SECONDS, "/health took too long"
        else:
            assert quarters[3] - quarters[1] <= MAX_GROWTH_BYTES, "memory still grew"


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
            abuse = AbuseRun(server, options)
            with ThreadPoolExecutor(options.clients + 1) as pool:
                health_task = pool.submit(abuse.request_health)
                list(pool.map(abuse.run_client, range(options.clients)))
                health_task.result()
            for check in (abuse.check_shutdown, abuse.check_limits):
                try:
                    check()
                except AssertionError as error:
                    abuse.violations.append(str(error))
    counts = Counter((kind, str(status)) for kind, status, _ in abuse.records)
    for (kind, status), count in sorted(counts.items()):
        print(f"{kind:18} {status:20} {count:7}")
    for violation, count in Counter(abuse.violations).most_common(20):
        print(f"{count} violations: {violation}")
    return bool(abuse.violations)


if __name__ == "__main__":
    sys.exit(main())
