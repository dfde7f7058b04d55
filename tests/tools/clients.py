"""Run real clients of OpenAI's API against `hf-fp8kv serve` (`make clients`).

    python -m tests.tools.clients --python .venv-clients/bin/python
    python -m tests.tools.clients ... --record tests/serving/client_requests.json

`--python` is an interpreter with the clients (see client_runs.py). Each client runs in a separate
process with a time limit. The server has the demo model, with a chat template that lists tools.
`--record` writes one request of each form that a client sends. test_clients.py sends them again.
"""

import argparse
import contextlib
import http.client
import http.server
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hf_fp8kv import demo_model_path
from tests.helpers.serve_process import ROOT, TOOLS_TEMPLATE, Server

CLIENTS = (
    "openai", "langchain-openai", "litellm", "instructor", "openai-agents", "llm", "lm-eval",
    "guidellm",
)  # fmt: skip
CLIENT_SECONDS = 600  # time limit of each client
SERVER_OPTIONS = ("--cb-num-blocks", "512", "--max-model-len", "2048")


class Recorder(http.server.ThreadingHTTPServer):
    """Forwards requests to a server, and keeps the requests of each client that have a body."""

    def __init__(self, port: int) -> None:
        self.server_port = port
        self.client_name = ""
        self.requests: dict[str, dict[str, Any]] = {name: {} for name in CLIENTS}
        super().__init__(("127.0.0.1", 0), ForwardingHandler)

    def handle_error(self, *_: Any) -> None:
        """Print nothing, because a client may close its connection."""

    def add_request(self, path: str, content: bytes) -> None:
        """Keep the request unless a kept request of the client has the same form."""
        body = json.loads(content)
        form = json.dumps([path, describe_form(body)])
        self.requests[self.client_name].setdefault(form, {"path": path, "body": body})


class ForwardingHandler(http.server.BaseHTTPRequestHandler):
    """One connection of a Recorder. It uses HTTP/1.0, so the connection ends with the response."""

    server: Recorder

    def _forward(self) -> None:
        content = self.rfile.read(int(self.headers.get("content-length", 0)))
        if content:
            self.server.add_request(self.path, content)
        port = self.server.server_port
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=CLIENT_SECONDS)
        with contextlib.closing(connection):
            headers = {"content-type": self.headers.get("content-type", "")}
            connection.request(self.command, self.path, content or None, headers)
            response = connection.getresponse()
            self.send_response(response.status)
            self.send_header("content-type", response.getheader("content-type", ""))
            self.end_headers()
            while chunk := response.read1():
                self.wfile.write(chunk)

    do_GET = do_POST = do_HEAD = _forward

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


def describe_form(value: Any) -> Any:
    """Return a JSON value with types in place of strings and numbers, except in some fields."""
    if isinstance(value, dict):
        kept_fields = ("type", "role", "tool_choice", "stream")
        fields = sorted(value.items())
        return {name: x if name in kept_fields else describe_form(x) for name, x in fields}
    if isinstance(value, list):
        forms = [describe_form(element) for element in value]
        return [form for i, form in enumerate(forms) if form not in forms[:i]]
    return type(value).__name__


@contextlib.contextmanager
def run_recorder(port: int) -> Iterator[Recorder]:
    """Run a Recorder for the server at `port` until the context ends."""
    with Recorder(port) as recorder:
        thread = threading.Thread(target=recorder.serve_forever, daemon=True)
        thread.start()
        yield recorder
        recorder.shutdown()


def run_client(python: str, name: str, port: int, tokenizer: str) -> list[dict[str, Any]]:
    """Run one client, and return the JSON objects that it prints, one per line."""
    command = [python, "-m", "tests.tools.client_runs", name]
    try:
        process = subprocess.run(
            [*command, f"http://127.0.0.1:{port}/v1", tokenizer], cwd=ROOT, text=True,
            capture_output=True, timeout=CLIENT_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        return [{"run": "all", "error": f"not done within {CLIENT_SECONDS} s: {error.stdout!r}"}]
    lines = [line for line in process.stdout.splitlines() if line.startswith('{"')]
    if not lines:
        return [{"run": "all", "error": process.stderr[-1000:]}]
    return [json.loads(line) for line in lines]


def main() -> int:
    """Run the clients, print a table, and return the number of failed runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", required=True, help="interpreter that can import the clients")
    parser.add_argument("--only", nargs="+", choices=CLIENTS, default=CLIENTS,
                        help="clients to run (default: all)")  # fmt: skip
    parser.add_argument("--record", type=Path, help="file to which requests are written")
    options = parser.parse_args()
    num_failed = 0
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "template").write_text(TOOLS_TEMPLATE)
        model = str(demo_model_path())
        server = stack.enter_context(
            Server(model, *SERVER_OPTIONS, "--chat-template", str(folder / "template"))
        )
        recorder = stack.enter_context(run_recorder(server.port)) if options.record else None
        print(f"{'client':17} {'version':9} {'passed':>7}")
        for name in options.only:
            port = server.port
            if recorder is not None:
                recorder.client_name, port = name, recorder.server_address[1]
            header, *runs = run_client(options.python, name, port, model)
            if "client" not in header:  # the client has printed no version
                header, runs = {}, [header, *runs]
            failed_runs = [run for run in runs if run["error"] is not None]
            num_failed += len(failed_runs)
            passed_text = f"{len(runs) - len(failed_runs)} of {len(runs)}"
            print(f"{name:17} {header.get('version', '?'):9} {passed_text:>7}", flush=True)
            for run in failed_runs:
                print(f"    {run['run']}: {run['error']}")
            if recorder is not None:
                requests = json.loads(options.record.read_text()) if options.record.exists() else {}
                requests[name] = [*recorder.requests[name].values()]
                options.record.write_text(format_requests(requests))
    return num_failed


def format_requests(requests_by_client: dict[str, list[dict[str, Any]]]) -> str:
    """Return JSON with one request per line."""
    entries = []
    for name, requests in requests_by_client.items():
        lines = ",\n".join(f"  {json.dumps(request, ensure_ascii=False)}" for request in requests)
        entries.append(f"{json.dumps(name)}: [\n{lines}\n]")
    return "{\n" + ",\n".join(entries) + "\n}\n"


if __name__ == "__main__":
    sys.exit(min(main(), 100))
