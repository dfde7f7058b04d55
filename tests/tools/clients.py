"""Run real clients of OpenAI's API against `hf-fp8kv serve` (`make clients`).

    python -m tests.tools.clients --python .venv-clients/bin/python

`--python` is an interpreter with the clients (see client_runs.py). Each client runs in a separate
process with a time limit. The server has the demo model, with a chat template that lists tools.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hf_fp8kv import demo_model_path
from tests.helpers.serve_process import ROOT, TOOLS_TEMPLATE, Server

CLIENTS = ("openai", "langchain-openai", "lm-eval")
CLIENT_SECONDS = 600  # time limit of each client
SERVER_OPTIONS = ("--cb-num-blocks", "512", "--max-model-len", "2048")


def run_client(python: str, name: str, port: int, tokenizer: str) -> list[dict[str, Any]]:
    """Run one client, and return the JSON objects that it prints, one per line."""
    command = [python, "-m", "tests.tools.client_runs", name, f"http://127.0.0.1:{port}/v1"]
    process = subprocess.run(
        [*command, tokenizer], cwd=ROOT, text=True, capture_output=True, timeout=CLIENT_SECONDS
    )
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
    options = parser.parse_args()
    num_failed = 0
    model = str(demo_model_path())
    with tempfile.TemporaryDirectory() as folder:
        template = Path(folder, "template")
        template.write_text(TOOLS_TEMPLATE)
        with Server(model, *SERVER_OPTIONS, "--chat-template", str(template)) as server:
            for name in options.only:
                runs = run_client(options.python, name, server.port, model)
                failed_runs = [run for run in runs if run["error"] is not None]
                num_failed += len(failed_runs)
                passed_text = f"{len(runs) - len(failed_runs)} of {len(runs)} passed"
                print(f"{name:17} {runs[0].get('version', '?'):9} {passed_text}", flush=True)
                for run in failed_runs:
                    print(f"    {run['run']}: {run['error']}")
    return num_failed


if __name__ == "__main__":
    sys.exit(min(main(), 100))
