"""Test a server with clients that misuse it, for a bounded time.

    python -m tests.tools.server_abuse --minutes 10

The program starts `hf-fp8kv serve` on this machine with a tiny model. Half of the requests are
good: chats, completions, responses, streams, several answers, penalties, structured output and
forced tools. The other half are bad: invalid or incomplete requests, abandoned prompts, endless
headers, and responses that are never read. The program prints all requests, and these violations:

* a response with an unexpected status, a different response to a repeated request, or a request
  without a response at its deadline
* memory that still grows in the second half of the time
* pages that are not freed, so the last request, which needs all pages, fails
* a traceback in the log, a nonzero exit code or a late exit, after SIGTERM while requests run
"""

import argparse
import contextlib
import json
import random
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from tests.helpers.serve_process import (
    CHAT,
    COMPLETIONS,
    RESPONSES,
    TOOLS_TEMPLATE,
    Server,
    save_chat_model,
)

NUM_PAGES = 96
PAGE_SIZE = 16
MAX_SECONDS = 120.0  # time limit of a request, among 60 clients on two cores
MAX_GROWTH_BYTES = 24 * 2**20  # limit for the growth of memory from the second to the last quarter
MAX_IDLE_SECONDS = 5.0  # time that a client may neither send nor read
MAX_EXIT_SECONDS = 35.0
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
LONG_PROMPT = json.dumps({"prompt": "x" * 150_000}).encode()  # too long for the model
HEADER = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
CHUNKED = HEADER + b"transfer-encoding: chunked\r\n\r\n"
PARTIAL_REQUESTS = (
    b"", b"GET / HT", HEADER, CHUNKED + b"5\r\nhel", CHUNKED + b"ffffffffffffffff\r\nx",
    CHUNKED + b"zz\r\nhello\r\n", CHUNKED + b"-1\r\n", HEADER + b"content-length: 9\r\n\r\n[",
    HEADER + b"content-length: %d\r\n\r\n%s" % (len(LONG_PROMPT), LONG_PROMPT),
)  # fmt: skip
# Data that a client sends again and again: requests whose responses it never reads, and headers.
ENDLESS_DATA = (
    b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n" * 500,
    b"GET /health HTTP/1.1\r\n" + b"x: %s\r\n" % (b"y" * 1000),
)


def make_request(rng: random.Random) -> tuple[str, dict[str, Any]]:
    path = rng.choice((CHAT, COMPLETIONS, RESPONSES))
    # Most prompts have the same beginning, so they share pages.
    text = "the same beginning of many " * rng.randrange(8) + "and words " * rng.randrange(1, 12)
    fields = {"stream": rng.random() < 0.4}
    if path == RESPONSES:
        return path, fields | {"input": text, "max_output_tokens": rng.randrange(1, 40)}
    fields |= {"max_tokens": rng.randrange(1, 40), "n": rng.choice((1, 1, 3))}
    if path == CHAT:
        fields["messages"] = [{"role": "user", "content": text}]
        return path, fields | rng.choice(SHARED_FIELDS + CHAT_FIELDS)
    fields["prompt"] = rng.choice((text, [text, "another", "and one"]))
    return path, fields | rng.choice(SHARED_FIELDS + COMPLETION_FIELDS)


class AbuseRun:
    """The requests of all clients to a server. An assertion that fails is a violation.

    Attributes:
        outcomes: Number of requests by method and result.
        violations: Descriptions of the violations.
    """

    def __init__(self, server: Server, options: argparse.Namespace) -> None:
        self.server = server
        self.seed = options.seed
        self.outcomes = Counter[tuple[str, object]]()
        self.violations: list[str] = []
        self.repeated_text = self.send(COMPLETIONS, REPEATED_FIELDS)["choices"][0]["text"]
        self.deadline = time.monotonic() + options.minutes * 60

    def run_client(self, index: int) -> None:
        rng = random.Random(self.seed * 1000 + index)
        good_actions = (self.send_valid, self.send_repeated)
        bad_actions = (self.send_bad_body, self.send_and_leave, self.send_without_end)
        while time.monotonic() < self.deadline:
            is_good = rng.random() < 0.5
            action = rng.choice(good_actions if is_good else bad_actions)
            try:
                result: object = action(rng)
            except Exception as error:
                result = type(error).__name__
                if is_good or not isinstance(error, OSError):
                    self.violations.append(f"{action.__name__}: {error!r}"[:500])
            self.outcomes[action.__name__, result] += 1

    def send(self, path: str, fields: dict[str, Any]) -> Any:
        """Return the JSON of a response, or of the last event of a stream, or None if refused."""
        status, text, _ = self.server.ask(path, fields)
        assert status in (200, 429), f"{status} to {json.dumps(fields):.300}: {text:.300}"
        if status == 429 or not fields.get("stream"):
            return json.loads(text) if status == 200 else None
        events = [line.removeprefix("data: ") for line in text.split("\n") if line]
        if path != RESPONSES:
            assert events.pop() == "[DONE]", "the stream has no end"
        event = json.loads(events[-1])
        assert event.get("error") is None, event
        return event

    def send_valid(self, rng: random.Random) -> object:
        return "refused" if self.send(*make_request(rng)) is None else "answered"

    def send_repeated(self, rng: random.Random) -> object:
        response = self.send(COMPLETIONS, REPEATED_FIELDS)
        assert response is None or response["choices"][0]["text"] == self.repeated_text, response
        return "refused" if response is None else "answered"

    def send_bad_body(self, rng: random.Random) -> object:
        status, text, _ = self.server.ask(COMPLETIONS, body=rng.choice((*BAD_BODIES, LONG_PROMPT)))
        assert status in (400, 429), f"a bad body: expected 400 or 429, got {status}: {text:.300}"
        return status

    def send_and_leave(self, rng: random.Random) -> object:
        """Disconnect many clients during the header, the body, the prefill or the response."""
        address = ("127.0.0.1", self.server.port)
        with contextlib.ExitStack() as stack:
            for _ in range(rng.randrange(30)):
                client = stack.enter_context(socket.create_connection(address, MAX_SECONDS))
                client.sendall(rng.choice(PARTIAL_REQUESTS))
            path, fields = make_request(rng)
            stack.enter_context(self.server.abandon_request(path, **fields))
            time.sleep(rng.choice((0, 0.01, 0.1, 2, 2 * MAX_IDLE_SECONDS)))
        return "left"

    def send_without_end(self, rng: random.Random) -> object:
        """Send data again and again, and read no response. The server must disconnect."""
        data = rng.choice(ENDLESS_DATA)
        address = ("127.0.0.1", self.server.port)
        with socket.create_connection(address, 12 * MAX_IDLE_SECONDS) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            try:
                for _ in range(100_000):
                    client.sendall(data)
            except ConnectionError:
                return "cut off"
            except TimeoutError:
                pass
        raise AssertionError("a client that reads nothing was not disconnected")

    def check_memory_growth(self) -> None:
        """Read the memory of the process while the clients run, and check its growth."""
        process = psutil.Process(self.server.process.pid)
        sizes = []
        while time.monotonic() < self.deadline:
            sizes.append(process.memory_info().rss)
            time.sleep(0.05)
        quarter = len(sizes) // 4
        growth = statistics.mean(sizes[-quarter:]) - statistics.mean(sizes[quarter : 2 * quarter])
        print(f"memory grew by {growth / 2**20:.0f} MiB in the second half of the time")
        if growth > MAX_GROWTH_BYTES:
            self.violations.append("memory still grew in the second half of the time")

    def check_shutdown(self) -> None:
        """Check that a request can use all pages, and that requests finish after SIGTERM."""
        self.server.wait_until(MAX_SECONDS, requests_active=0, requests_waiting=0)
        response = self.send(COMPLETIONS, {"prompt": "x" * (NUM_PAGES * PAGE_SIZE - 8)})
        assert response["usage"]["completion_tokens"] == 9, "pages are missing"
        fields = REPEATED_FIELDS | {"n": 4}
        with ThreadPoolExecutor(8) as pool:
            futures = [pool.submit(self.server.ask, COMPLETIONS, fields) for _ in range(8)]
            with contextlib.suppress(AssertionError):
                self.server.wait_until(10, requests_active=8)
            start = time.monotonic()
            exit_code = self.server.stop()
            exit_seconds = time.monotonic() - start
        statuses = {status for status, _, _ in (future.result() for future in futures)}
        assert exit_code == 0, f"exit code {exit_code}"
        assert statuses <= {200, 503}, f"after SIGTERM: statuses {statuses}"
        assert exit_seconds <= MAX_EXIT_SECONDS, f"the process took {exit_seconds:.1f} s to exit"
        assert "Traceback" not in self.server.log, self.server.log[-3000:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=1.0, help="duration of the run")
    parser.add_argument("--clients", type=int, default=60, help="number of clients")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random requests")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        template = Path(folder, "template")
        template.write_text(TOOLS_TEMPLATE)
        model = save_chat_model(Path(folder), context=2 * NUM_PAGES * PAGE_SIZE)
        limits = ("--max-waiting", "100", "--client-timeout", str(MAX_IDLE_SECONDS))
        pages = ("--cb-num-blocks", str(NUM_PAGES))
        with Server(model, "--chat-template", str(template), *limits, *pages) as server:
            abuse = AbuseRun(server, options)
            with ThreadPoolExecutor(options.clients + 1) as pool:
                memory_task = pool.submit(abuse.check_memory_growth)
                list(pool.map(abuse.run_client, range(options.clients)))
                memory_task.result()
            abuse.check_shutdown()
    for (action, result), count in sorted(abuse.outcomes.items(), key=str):
        print(f"{action:18} {result!s:20} {count:7}")
    for violation, count in Counter(abuse.violations).most_common(20):
        print(f"{count} violations: {violation}")
    return 1 if abuse.violations else 0


if __name__ == "__main__":
    sys.exit(main())
