"""Run real clients of OpenAI's API against `hf-fp8kv serve` (`make clients`).

    python -m tests.tools.clients --python .venv-clients/bin/python

`--python` is an interpreter with the clients (see client_runs.py). Each client runs in a separate
process with a time limit. The server has the demo model, with a chat template that lists tools.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from hf_fp8kv import demo_model_path
from tests.helpers.serve_process import ROOT, TOOLS_TEMPLATE, Server

CLIENTS = ("openai", "langchain-openai", "lm-eval")
CLIENT_SECONDS = 600  # time limit of each client
SERVER_OPTIONS = ("--cb-num-blocks", "512", "--max-model-len", "2048")


def main() -> int:
    """Run the clients, and return the number of clients that failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", required=True, help="interpreter that can import the clients")
    parser.add_argument("--only", nargs="+", choices=CLIENTS, default=CLIENTS,
                        help="clients to run (default: all)")  # fmt: skip
    options = parser.parse_args()
    model = str(demo_model_path())
    command = [options.python, "-W", "ignore", "-m", "tests.tools.client_runs"]
    num_failed = 0
    with tempfile.TemporaryDirectory() as folder:
        template = Path(folder, "template")
        template.write_text(TOOLS_TEMPLATE)
        model_options = ("--served-model-name", "demo", "--chat-template", str(template))
        with Server(model, *SERVER_OPTIONS, *model_options) as server:
            for name in options.only:
                arguments = (name, f"{server.url}/v1", "demo", model)
                process = subprocess.run([*command, *arguments], cwd=ROOT, timeout=CLIENT_SECONDS)
                num_failed += process.returncode != 0
    return num_failed


if __name__ == "__main__":
    sys.exit(main())
