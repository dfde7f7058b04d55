"""A tiny model with a chat template, and `hf-fp8kv serve` in a thread or a separate process."""

import contextlib
import http.client
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self
from unittest import mock

import torch
import typer
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoTokenizer,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
)

import hf_fp8kv_cli as cli
from hf_fp8kv import FP8PagedCache
from tests.helpers.command_line import save_tiny_weights

ROOT = Path(__file__).parents[2]
# A chat template that refuses the role "wizard", and takes long for the role "sloth".
TEMPLATE = (
    "{% if messages[0]['role'] == 'wizard' %}{{ raise_exception('no wizards') }}{% endif %}"
    "{% if messages[0]['role'] == 'sloth' %}{% for i in range(200) %}{% for j in range(50000) %}"
    "{% endfor %}{% endfor %}{% endif %}"
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }};{% endfor %}a:"
)
# ChatML with tools. Calls have the format of Hermes and Qwen models.
TOOLS_TEMPLATE = r"""
{%- set has_system = messages[0].role == 'system' -%}
{{- '<|im_start|>system\n' }}
{{- messages[0].content if has_system else 'You are a helpful assistant.' }}
{%- if tools %}{{- '\nYou can call these functions:' }}
{%- for tool in tools %}{{- '\n' + tool | tojson }}{% endfor %}{% endif %}
{{- '<|im_end|>\n' }}
{%- for m in messages %}{% if not (loop.first and has_system) %}
{{- '<|im_start|>' + m.role + '\n' }}{{- m.content or '' }}
{%- for call in m.tool_calls or [] %}
{{- '<tool_call>' + call.function | tojson + '</tool_call>' }}{% endfor %}
{{- '<|im_end|>\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}
"""
NUM_PAGES = 24
PAGE_SIZE = 16
STEP_TOKENS = 64
CONTEXT_LENGTH = 320
SERVE_OPTIONS = (
    "--device", "cpu", "--port", "0", "--cb-num-blocks", str(NUM_PAGES),
    "--cb-block-size", str(PAGE_SIZE), "--cb-max-batch-tokens", str(STEP_TOKENS),
)  # fmt: skip
TIMEOUT = 120.0  # seconds
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
NAN_CHARACTER = "~"  # after `add_nan_token`, the logits of a prompt with this character are NaN


def make_step_requests(sequences: Sequence[Any], position: int) -> list[Any]:
    """Return the requests of an engine's step, with one new token per sequence at `position`."""
    return [
        SimpleNamespace(
            state=SimpleNamespace(
                logit_processor_kwargs={"sequence": sequence}, position_offset=position
            ),
            has_new_token=True, query_length=1,
        )
        for sequence in sequences
    ]  # fmt: skip


def save_chat_model(folder: Path, *, vocab_size: int = 95, context: int = CONTEXT_LENGTH) -> str:
    """Save a tiny Llama whose tokens are characters, without an end token. Return the folder."""
    characters = [chr(code) for code in range(32, 32 + vocab_size)]
    backend = Tokenizer(
        models.WordLevel({character: i for i, character in enumerate(characters)}, unk_token="?")
    )
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="?")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return save_tiny_weights(folder, vocab_size, context)


def add_nan_token(folder: str) -> None:
    """Change a saved model so that `NAN_CHARACTER` makes its logits NaN. No answer contains it."""
    model = LlamaForCausalLM.from_pretrained(folder)
    [token] = encode(NAN_CHARACTER)
    with torch.no_grad():
        model.model.embed_tokens.weight[token] = torch.nan
        model.lm_head.weight[token] = 0
        model.lm_head.weight[token, 0] = 1e-30
    model.save_pretrained(folder)


def generate_paged(folder: str, question: str, num_tokens: int, **options: object) -> str:
    """Return the answer of `generate()` with FP8 pages and a prefill that reads stored values."""
    model = LlamaForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    cache = FP8PagedCache(model, prefill="stored", **options)
    with torch.inference_mode():
        output = model.generate(
            **inputs, past_key_values=cache, max_new_tokens=num_tokens, do_sample=False
        )
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def parse_events(text: str) -> list[Any]:
    """Parse the events of a streamed response, except the final [DONE]."""
    *events, end = re.findall("^data: (.*)$", text, re.MULTILINE)
    assert end == "[DONE]"
    return [json.loads(event) for event in events]


def read_answer(response: Any) -> str:
    """Return the text of a parsed response of any endpoint, or of the events of a stream."""
    if isinstance(response, list):
        return "".join(map(read_answer, response))
    if "output" in response:
        return response["output"][0]["content"][0]["text"]
    choice = response["choices"][0]
    message = choice.get("message") or choice.get("delta") or {}
    return choice.get("text") or message.get("content") or ""


def encode(text: str) -> list[int]:
    return [ord(character) - 32 for character in text]


def generate_stock(model: Any, prompt: str, num_tokens: int, *processors: LogitsProcessor) -> str:
    inputs = torch.tensor([encode(prompt)])
    with torch.inference_mode():
        output = model.generate(
            inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=num_tokens,
            do_sample=False, logits_processor=LogitsProcessorList(processors),
        )  # fmt: skip
    return "".join(chr(token + 32) for token in output[0, inputs.shape[1] :].tolist())


class RunningServer:
    """A running server on this machine, and methods that send requests. A `with` block stops it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(
        self, path: str, fields: Any = None,
        *, body: bytes | None = None, headers: dict[str, str] | None = None,
    ) -> tuple[int, str, dict[str, str]]:  # fmt: skip
        """Send POST with `fields` or `body`, or GET. Return the status, text and headers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT)
        with contextlib.closing(connection):
            if fields is not None:
                body = json.dumps(fields).encode()
            all_headers = {"content-type": "application/json", **(headers or {})}
            connection.request("GET" if body is None else "POST", path, body, all_headers)
            response = connection.getresponse()
            return response.status, response.read().decode(), dict(response.getheaders())

    def answer(self, path: str, **fields: object) -> Any:
        """Return the parsed response to a request that must succeed, or the events of a stream."""
        status, text, _ = self.ask(path, fields)
        assert status == 200, text
        return parse_events(text) if fields.get("stream") else json.loads(text)

    @contextlib.contextmanager
    def abandon_request(self, path: str, **fields: object) -> Iterator[None]:
        """Send a request. When the block ends, close the connection, and read no response."""
        body = json.dumps(fields).encode()
        header = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", self.port)) as connection:
            connection.sendall(f"{header}content-length: {len(body)}\r\n\r\n".encode() + body)
            yield

    def metrics(self) -> dict[str, float]:
        """Return the values of /metrics by name, without the prefix `hf_fp8kv_`."""
        status, text, _ = self.ask("/metrics")
        assert status == 200
        rows = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        return {name.removeprefix("hf_fp8kv_"): float(value) for name, value in rows}

    def wait_until(self, seconds: float = TIMEOUT, **expected: float) -> dict[str, float]:
        """Wait until /metrics has the expected values, and return all its values."""
        deadline = time.monotonic() + seconds
        while True:
            metrics = self.metrics()
            if expected.items() <= metrics.items():
                return metrics
            if time.monotonic() > deadline:
                raise AssertionError(f"expected {expected}, got {metrics}")
            time.sleep(0.05)


class HostedServer(RunningServer):
    """`hf-fp8kv serve` on a free port, in a thread of this process, to save the time of imports."""

    def __init__(self, model: str, *options: str, environment: dict[str, str] | None = None):
        import uvicorn

        self.model = model
        self._server: uvicorn.Server | None = None
        self._error: BaseException | None = None
        run = uvicorn.Server.run

        def run_without_signals(server: uvicorn.Server, sockets: Any = None) -> None:
            server.capture_signals = contextlib.nullcontext  # only the main thread may catch them
            self._server = server
            run(server, sockets)

        self._thread = threading.Thread(target=self._run, args=(model, *options), daemon=True)
        with (
            mock.patch.object(uvicorn.Server, "run", run_without_signals),
            mock.patch.dict(os.environ, environment or {}),
        ):
            self._thread.start()
            while not (self._server and self._server.started):
                if not self._thread.is_alive():
                    raise AssertionError("the server did not start") from self._error
                time.sleep(0.01)
        self.port = self._server.servers[0].sockets[0].getsockname()[1]

    def _run(self, model: str, *options: str) -> None:
        arguments = ["serve", model, *SERVE_OPTIONS, *options]
        try:
            command = typer.main.get_command(cli.app)
            command.main(arguments, prog_name=cli.NAME, standalone_mode=False)
        except BaseException as error:
            self._error = error

    def wait(self, seconds: float) -> BaseException | None:
        """Wait until the command has ended. Return the error that it raised, or None."""
        self._thread.join(seconds)
        assert not self._thread.is_alive(), "the server has not ended"
        return self._error

    def stop(self) -> None:
        """Stop the server when all its requests are answered."""
        assert self._server is not None
        self._server.should_exit = True
        self.wait(TIMEOUT)


class Server(RunningServer):
    """`hf-fp8kv serve` on a free port, in a separate process. Its log is read while it runs."""

    def __init__(self, model: str, *options: str, environment: dict[str, str] | None = None):
        self.model = model
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hf_fp8kv_cli", "serve", model, *SERVE_OPTIONS, *options],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
        )  # fmt: skip
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()
        try:
            self.port = int(self.wait_for_log(r"serving .* at http://[\d.]+:(\d+)")[1])
        except BaseException:
            self.stop()
            raise

    @property
    def log(self) -> str:
        return "".join(self.lines)

    def _read_log(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)

    def wait_for_log(self, pattern: str, seconds: float = TIMEOUT) -> re.Match[str]:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if match := re.search(pattern, self.log):
                return match
            if self.process.poll() is not None:
                self._reader.join(5)
                if match := re.search(pattern, self.log):
                    return match
                break
            time.sleep(0.02)
        raise AssertionError(f"expected {pattern!r} in the server's log, got:\n{self.log}")

    def stop(self) -> int:
        """Stop the server, and return its exit code."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.process.wait(TIMEOUT)
        finally:
            self.process.kill()
            self._reader.join(5)
            assert self.process.stdout is not None
            self.process.stdout.close()
