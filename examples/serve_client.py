"""Send sixteen simultaneous requests to a server, which streams half of the answers.

    python examples/serve_client.py

Without --url, which names a running server, the script starts `hf-fp8kv serve`.
"""

import argparse
import contextlib
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from openai import OpenAI

WORDS = ["sea", "sun", "moon", "rain", "snow", "wind", "tree", "rose"]


@contextlib.contextmanager
def run_server(model: str | None) -> Iterator[str]:
    command = [sys.executable, "-m", "hf_fp8kv_cli", "serve", "--port", "0"]
    command += ["--cb-num-blocks", "64", "--cb-block-size", "64"]
    if model:
        command.append(model)
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        yield next(line.split()[-1] for line in process.stderr if "hf-fp8kv: serving" in line)
        process.terminate()
        process.communicate()
    print(f"the server ended with {process.returncode}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--url", help="URL of a running server. Default: start one.")
    parser.add_argument("--model", help="Model of a started server. Default: the demo model.")
    parser.add_argument("--new-tokens", type=int, default=32, help="Maximum tokens of an answer.")
    args = parser.parse_args()
    server = contextlib.nullcontext(args.url) if args.url else run_server(args.model)
    with server as url:
        client = OpenAI(base_url=f"{url}/v1", api_key="none")
        name = client.models.list().data[0].id

        def ask(number: int) -> str:
            question = f"Tell me about the {WORDS[number // 2]}."
            is_streamed = number % 2 == 0
            messages = [{"role": "user", "content": question}]
            options = {"max_tokens": args.new_tokens, "temperature": 0, "stream": is_streamed}
            response = client.chat.completions.create(model=name, messages=messages, **options)
            if not is_streamed:
                return response.choices[0].message.content
            return "".join(chunk.choices[0].delta.content or "" for chunk in response)

        with client, ThreadPoolExecutor(16) as pool:
            for number, answer in enumerate(pool.map(ask, range(16))):
                print(f"{'streamed' if number % 2 == 0 else 'at once '} {answer!r}")
        print(urllib.request.urlopen(f"{url}/metrics").read().decode())


if __name__ == "__main__":
    main()
