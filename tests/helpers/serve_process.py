"""A tiny model with a chat template, and `hf-fp8kv serve` in a process of its own."""

import contextlib
import http.client
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_fp8kv import FP8PagedCache

ROOT = Path(__file__).parents[2]
TEMPLATE = (
    "{% if messages[0]['role'] == 'wizard' %}{{ raise_exception('no wizards') }}{% endif %}"
    "{% if messages[0]['role'] == 'sloth' %}{% for i in range(200) %}{% for j in range(50000) %}"
    "{% endfor %}{% endfor %}{% endif %}"
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }};{% endfor %}a:"
)
PAGES, PAGE, CONTEXT = 24, 16, 320
WAIT = 120.0


def save_chat_model(folder: Path, *, tokens: int = 95) -> str:
    """Save a tiny Llama whose tokens are characters; it never ends by itself. Return the folder."""
    letters = [chr(code) for code in range(32, 32 + tokens)]
    inner = Tokenizer(models.WordLevel({x: at for at, x in enumerate(letters)}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    inner.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="?")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(letters), hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=CONTEXT,
        bos_token_id=None, eos_token_id=None, pad_token_id=0, initializer_range=0.5,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def generate_answer(folder: str, question: str, tokens: int) -> str:
    """Return what `generate()` answers from FP8 pages that it reads as they are stored."""
    model, tokenizer = (
        LlamaForCausalLM.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    messages = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    cache = FP8PagedCache(model.config, prefill="stored")
    with torch.inference_mode():
        found = model.generate(
            **inputs, past_key_values=cache, max_new_tokens=tokens, do_sample=False
        )
    return tokenizer.decode(found[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


class Server:
    """`hf-fp8kv serve` on a free port; its log is read while it runs."""

    def __init__(
        self, model: str, *options: str, environment: dict[str, str] | None = None,
        program: tuple[str, ...] = ("-m", "hf_fp8kv.cli"),
    ):  # fmt: skip
        self.model = model
        batching = ("--cb-num-blocks", str(PAGES), "--cb-block-size", str(PAGE))
        self.process = subprocess.Popen(
            [sys.executable, *program, "serve", model, "--device", "cpu",
             "--port", "0", *batching, "--cb-max-batch-tokens", "64", *options],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
        )  # fmt: skip
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            self.port = int(self.wait_for(r"serving .* at http://[\d.]+:(\d+)")[1])
        except BaseException:
            self.stop()
            raise
        self.url = f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return "".join(self.lines)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)

    def wait_for(self, pattern: str, seconds: float = WAIT) -> re.Match[str]:
        """Return where the log matches, once it does."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if found := re.search(pattern, self.log):
                return found
            if self.process.poll() is not None:
                self._reader.join(5)
                if found := re.search(pattern, self.log):
                    return found
                break
            time.sleep(0.02)
        raise AssertionError(f"expected {pattern!r} in the log of the server, got:\n{self.log}")

    def ask(
        self,
        path: str,
        body: Any = None,
        *,
        raw: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> tuple[int, str, dict[str, str]]:
        """Return the status, the text and the headers of an answer; GET without a body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT)
        with contextlib.closing(connection):
            data = raw if raw is not None else None if body is None else json.dumps(body).encode()
            sent = {"content-type": "application/json", **(headers or {})}
            connection.request("GET" if data is None else "POST", path, data, sent)
            answer = connection.getresponse()
            return answer.status, answer.read().decode(), dict(answer.getheaders())

    def metrics(self) -> dict[str, float]:
        """Return the numbers of /metrics by name."""
        status, text, _ = self.ask("/metrics")
        assert status == 200
        rows = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        return {name.removeprefix("hf_fp8kv_"): float(value) for name, value in rows}

    def wait_until(self, seconds: float = WAIT, **wanted: float) -> dict[str, float]:
        """Return the numbers of /metrics, once some of them are as wanted."""
        until = time.monotonic() + seconds
        while True:
            found = self.metrics()
            if wanted.items() <= found.items():
                return found
            if time.monotonic() > until:
                raise AssertionError(f"expected {wanted}, got {found}; the log:\n{self.log}")
            time.sleep(0.05)

    def cpu_ticks(self) -> int:
        """Return the time that processors spent on the server, in ticks of 10 ms."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    def stop(self) -> int:
        """Ends it, and returns its exit code."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.process.wait(WAIT)
        finally:
            self.process.kill()
            self._reader.join(5)
            assert self.process.stdout is not None
            self.process.stdout.close()


@contextlib.contextmanager
def serving(
    model: str, *options: str, environment: dict[str, str] | None = None,
    program: tuple[str, ...] = ("-m", "hf_fp8kv.cli"),
) -> Iterator[Server]:  # fmt: skip
    """Run a server inside."""
    server = Server(model, *options, environment=environment, program=program)
    try:
        yield server
    finally:
        server.stop()
