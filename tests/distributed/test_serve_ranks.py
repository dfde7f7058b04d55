"""`torchrun ... hf-fp8kv serve`: two processes (gloo) answer what one does, and end together."""

import contextlib
import json
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig

from hf_fp8kv import ConfigError
from hf_fp8kv.modeling.tensor_parallel import check_plan
from tests.distributed import cases
from tests.helpers import command_line
from tests.helpers.serve_process import Server, generate_answer, save_chat_model, serving, text_in
from tests.helpers.tiny_models import tiny

pytestmark = [pytest.mark.text, pytest.mark.full]

pytest.importorskip("fastapi", reason="needs the extra serve")
from hf_fp8kv.serving.server.ranks import Ranks, _order_cancellations, check_batching, load_split  # noqa: E402

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
QUESTIONS = [f"question {n} about {'pages ' * (3 * n)}" for n in range(6)]
PERSON = {
    "type": "object",
    "properties": {"age": {"type": "integer", "maximum": 150}, "kind": {"enum": ["red", "blue"]}},
    "required": ["age", "kind"],
    "additionalProperties": False,
}
# The server, where a prompt of two tokens that ends with "~" has no finite logits; with "}", the
# logits of the second process are others than those of the first; with "{", that one has no memory.
# No grammar survives a "z".
POISONED = """
import functools, os
from transformers import LlamaForCausalLM

forward = LlamaForCausalLM.forward

@functools.wraps(forward)
def poisoned(self, *args, **kwargs):
    out = forward(self, *args, **kwargs)
    rows = kwargs.get("logits_to_keep")
    if rows is not None:
        token, at = kwargs["input_ids"][0, rows], kwargs["position_ids"][0, rows]
        out.logits[0, (token == ord("~") - 32) & (at == 1)] = float("nan")
        if os.environ.get("RANK") == "1":
            out.logits[0, (token == ord("}") - 32) & (at == 1)] *= -1.0
            if ((token == ord("{") - 32) & (at == 1)).any():
                raise MemoryError("no memory for the step")
    return out

LlamaForCausalLM.forward = poisoned
from hf_fp8kv.serving.server.grammars import Guide

accept = Guide.accept

def fail(self, *tokens):
    assert ord("z") - 32 not in tokens, "a bug of the library"
    accept(self, *tokens)

Guide.accept = fail
from hf_fp8kv.cli import main
main()
"""
TORCHRUN = (
    "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1",
    "--nproc-per-node", "2", "--no-python", sys.executable, "-c", POISONED,
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    # Transformers 5.17 splits the output layer evenly or not at all.
    return save_chat_model(tmp_path_factory.mktemp("chat"), tokens=96)


@contextlib.contextmanager
def two_processes(model: str, *options: str):
    """Run a server of two processes inside, none of which is left."""
    environment = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    ranks: dict[int, int] = {}
    try:
        with serving(model, *options, environment=environment, program=TORCHRUN) as server:
            ranks.update(find_ranks(server))
            yield server, ranks
    finally:
        for process in filter(is_alive, ranks.values()):
            os.kill(process, signal.SIGKILL)


def find_ranks(server: Server) -> dict[int, int]:
    """Return torchrun's processes by rank."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = (path / "stat").read_text().rpartition(")")[2].split()[1]
            if int(parent) == server.process.pid:
                lines = (path / "environ").read_bytes().decode().split("\0")
                found[int(dict(line.split("=", 1) for line in lines if line)["RANK"])] = int(
                    path.name
                )
    return found


def is_alive(process: int) -> bool:
    return Path(f"/proc/{process}").exists()


def body(question: str, **fields: object) -> dict:
    return {"messages": [{"role": "user", "content": question}], "max_tokens": 24, **fields}


def leave_early(server: Server) -> None:
    """Ask for a long answer, and go away once the engine has it."""
    with server.leaving(CHAT, **body("a long story", max_tokens=250, stream=True)):
        server.wait_until(requests_active=1)
    server.wait_until(**{'requests_total{status="499"}': 1, "requests_active": 0})


def text_of(server: Server, path: str, sent: dict) -> str:
    return text_in(server.answer(path, **sent))


def answers(server: Server) -> dict[str, object]:
    """Return what a server answers to everything that could differ between processes."""
    leave_early(server)
    sent = {f"greedy {q}": body(q, stream=n % 2 == 0) for n, q in enumerate(QUESTIONS)}
    for seed in (1, 2):
        sent[f"seed {seed}"] = body("x", temperature=1.5, top_p=0.9, top_k=60, seed=seed)
    penalties = {"repetition_penalty": 1.4, "frequency_penalty": 0.5, "logit_bias": {"33": 2}}
    sent["penalties"] = body("x", temperature=1.0, seed=3, min_p=0.01, **penalties)
    sent["stopped"] = body("stop here", stop=["no such text", "b"])
    for name, form in (
        ("choice", {"choice": ["Paris", "London"]}),
        ("regex", {"regex": "[a-c]{3}[0-9]{2,9}"}),
        ("json", {"json": PERSON}),
    ):
        sent[name] = body("?", structured_outputs=form, temperature=1.0, seed=3, max_tokens=60)
    failing = {
        "no logits": {"prompt": "x~", "max_tokens": 9},
        "grammar": {"prompt": "x", "structured_outputs": {"regex": "[a-y]{9}z[a-y]{9}"}},
    }
    with ThreadPoolExecutor(len(sent) + 3) as pool:
        bad = {name: pool.submit(server.ask, COMPLETIONS, one) for name, one in failing.items()}
        other = pool.submit(text_of, server, COMPLETIONS, {"prompt": "x}", "max_tokens": 24})
        asked = {name: pool.submit(text_of, server, CHAT, fields) for name, fields in sent.items()}
        found: dict[str, object] = {name: one.result() for name, one in asked.items()}
        found["other logits"] = other.result()
    scored = {"prompt": "a prompt that is scored", "echo": True, "logprobs": 2, "max_tokens": 4}
    for number in range(2):  # the second time its beginning is in the pages
        found[f"scored {number}"] = server.answer(COMPLETIONS, **scored)["choices"][0]["logprobs"]
    for name, one in bad.items():
        status, text, _ = one.result()
        found[name] = status, json.loads(text)["error"]["message"]
    found["again"] = text_of(server, CHAT, body(QUESTIONS[-1]))
    return found


def test_two_processes_answer_as_one(model):
    with ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as stack:
        program = ("-c", POISONED)
        starting = pool.submit(lambda: stack.enter_context(serving(model, program=program)))
        two, ranks = stack.enter_context(two_processes(model))
        one = starting.result()
        assert len(ranks) == 2
        asked, found = pool.submit(answers, one), answers(two)
        wanted = asked.result()
        for number in range(2):
            parts = [one.pop(f"scored {number}") for one in (found, wanted)]
            assert parts[0]["tokens"] == parts[1]["tokens"]
            ours, theirs = (part["token_logprobs"][1:] for part in parts)
            assert ours == pytest.approx(theirs, abs=1e-3)
        assert found == wanted
        for question in QUESTIONS:
            assert found[f"greedy {question}"] == generate_answer(model, question, 24)
        assert found["again"] == found[f"greedy {QUESTIONS[-1]}"]
        assert len(set(map(str, found.values()))) == len(found) - 1
        assert found["choice"] in ("Paris", "London")
        assert json.loads(found["json"])["age"] <= 150
        for name, says in (("no logits", "expected finite logits"), ("grammar", "a bug of the")):
            status, message = found[name]
            assert (status, says in message) == (500, True), message
        # Half of the KV heads.
        assert one.metrics()["bytes_total"] == 2 * two.metrics()["bytes_total"]
        two.process.terminate()
        two.process.wait(60)
        two.wait_for("Finished server process")
        assert "the engine ended" not in two.log
        assert not any(map(is_alive, ranks.values()))


@pytest.mark.parametrize(
    ("rank", "killed"), [(1, True), (0, True), (1, False)], ids=["killed", "first killed", "failed"]
)
def test_a_process_that_dies_ends_all(model, rank, killed):
    with two_processes(model) as (server, ranks), ThreadPoolExecutor(2) as pool:
        answer = pool.submit(server.ask, CHAT, body("a long story", max_tokens=250))
        server.wait_until(requests_active=1)
        if killed:
            os.kill(ranks[rank], signal.SIGKILL)
        else:
            pool.submit(server.ask, COMPLETIONS, {"prompt": "x{"})
        assert server.process.wait(60) == 1
        server.wait_for(r"hf-fp8kv: error: .*one of the 2 processes that serve the model")
        said = [line for line in server.lines if "hf-fp8kv: error" in line]
        assert len(said) == 1 if killed else "no memory for the step" in "".join(said), said
        if rank == 0:
            assert answer.exception() is not None
        else:
            status, text, _ = answer.result()
            assert status in (500, 503)
            assert "one of the 2 processes" in text
        until = time.monotonic() + 30
        while any(map(is_alive, ranks.values())) and time.monotonic() < until:
            time.sleep(0.05)
        assert not any(map(is_alive, ranks.values()))


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options", "size", "says"),
    [
        ("llama", {"num_key_value_heads": 1}, 2, "the 1 KV heads .* got 2; use 1, or one process"),
        ("llama", {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}, 2,
         "the 3 KV heads .* got 2; use 1 or 3, or one process"),
        ("olmo2", {}, 2, "gathers all of them, .*; serve it in one process"),
        ("gpt2", {}, 2, "plan for tensor parallelism, got GPT2LMHeadModel, .* in one process"),
    ],
    ids=["one head", "three heads", "gathered", "no plan"],
)  # fmt: skip
def test_a_model_that_cannot_be_split_is_refused_before_its_weights_are_read(
    tmp_path, monkeypatch, capsys, kind, options, size, says
):
    whole, _ = tiny(kind, **options)
    whole.config.save_pretrained(tmp_path)  # and no weights
    cases.save_tokenizer(tmp_path)
    check_plan(tiny("phi3")[0], size)  # it can be split
    with torch.device("meta"), pytest.raises(ConfigError, match=says):
        check_plan(AutoModelForCausalLM.from_config(whole.config), size)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(size))
    run = command_line.runner(monkeypatch, capsys)
    code, _, err = run("serve", str(tmp_path), "--port", "0")
    assert code == 1
    assert "process" in err
    assert "cannot load" not in err
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--device", "toaster"], "--device: expected auto or"),
        (["--quantization", "bnb-4bit"], "--quantization: not supported with 2 processes"),
        (["--cb-use-cuda-graph"], "--cb-use-cuda-graph: not supported with several processes"),
    ],
)
def test_options_that_several_processes_cannot_have(model, monkeypatch, capsys, options, says):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, _, err = command_line.runner(monkeypatch, capsys)("serve", model, "--port", "0", *options)
    assert (code, says in " ".join(err.split())) == (1, True), err


def test_a_torch_for_gpus_without_one_serves_on_the_cpu(model, monkeypatch):
    gpu = torch.device("cuda")
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: None
        if check_available else gpu,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="--quantization"):  # and not of the device
        load_split(model, "main", 2, device="cpu", quantization="bnb-4bit")


def test_steps_that_do_not_wait_are_refused():
    config = ContinuousBatchingConfig()
    assert check_batching(config).use_async_batching is False
    assert config.use_async_batching is None
    for name in ("use_async_batching", "use_cuda_graph"):
        with pytest.raises(ConfigError, match=f"--cb-{name.replace('_', '-')}: not supported"):
            check_batching(ContinuousBatchingConfig(**{name: True}))


def test_cancelled_requests_end_in_one_order():
    class Scheduler:
        _cancellation_lock = threading.Lock()
        _requests_to_cancel: Any = frozenset("cabdfe")

        def clear_cancelled_requests(self) -> list[str]:
            return list(self._requests_to_cancel)

    scheduler = Scheduler()
    _order_cancellations(scheduler)
    assert scheduler.clear_cancelled_requests() == list("abcdef")


def test_what_torchrun_says(monkeypatch):
    for rank, size, found in ((None, None, Ranks()), ("0", "1", Ranks()), ("1", "2", Ranks(1, 2))):
        for name, value in (("RANK", rank), ("WORLD_SIZE", size)):
            monkeypatch.delenv(name, raising=False)
            if value is not None:
                monkeypatch.setenv(name, value)
        assert Ranks.from_environment() == found
    for rank, size in (("2", "2"), ("x", "2"), ("0", "two"), ("", "2")):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", size)
        with pytest.raises(ConfigError, match="expected RANK and WORLD_SIZE as torchrun sets them"):
            Ranks.from_environment()
