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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", required=True, help="interpreter that can import the clients")
    parser.add_argument("--only", nargs="+", choices=CLIENTS, default=CLIENTS,
                        help="clients to run (default: all)")  # fmt: skip
    options = parser.parse_args()
    model = str(demo_model_path())
    command = [options.python, "-W", "ignore", "-m", "tests.tools.client_runs"]
    exit_codes = []
    with tempfile.TemporaryDirectory() as folder:
        template_file = Path(folder, "template")
        template_file.write_text(TOOLS_TEMPLATE)
        model_options = ("--served-model-name", "demo", "--chat-template", str(template_file))
        with Server(model, *SERVER_OPTIONS, *model_options) as server:
            for client in options.only:
                arguments = (client, f"{server.url}/v1", "demo", model)
                process = subprocess.run([*command, *arguments], cwd=ROOT, timeout=CLIENT_SECONDS)
                exit_codes.append(process.returncode)
    return sum(code != 0 for code in exit_codes)


if __name__ == "__main__":
    sys.exit(main())
