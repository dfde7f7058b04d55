"""The command line and the shell: completion, exit codes, interruptions, readers that go away."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_fp8kv import cli
from hf_fp8kv.environment import version
from hf_fp8kv.kernel_check import TARGETS
from hf_fp8kv.scales import CHECKPOINT_FORMATS

ROOT = Path(__file__).parent.parent


@pytest.fixture
def completed(monkeypatch, capsys):
    """Returns what a shell offers for a line of words, the last of which is not yet whole."""

    def _completed(line: str, shell: str = "bash") -> list[str]:
        monkeypatch.setattr(sys, "argv", ["hf-fp8kv"])
        monkeypatch.setenv("_HF_FP8KV_COMPLETE", f"complete_{shell}")
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(line.split(" ")) - 1))
        monkeypatch.setenv("_TYPER_COMPLETE_ARGS", line)
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        assert not exit_.value.code
        return capsys.readouterr().out.split("\n")[:-1]

    return _completed


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("hf-fp8kv gen", ["generate"]),
        ("hf-fp8kv generate --back", ["--backend"]),
        ("hf-fp8kv generate --backend t", ["torch", "triton"]),
        ("hf-fp8kv generate --attn s", ["sdpa"]),
        ("hf-fp8kv generate --key-dtype a", ["auto"]),
        ("hf-fp8kv generate --device c", ["cpu", "cuda"]),
        ("hf-fp8kv bench --suite ", ["cpu", "gpu", "quality"]),
        ("hf-fp8kv check --target ", list(TARGETS)),
        ("hf-fp8kv calibrate --granularity ", ["tensor", "head", "channel"]),
        ("hf-fp8kv calibrate --format v", ["vllm-json"]),
        ("hf-fp8kv calibrate --model-dtype b", ["bfloat16"]),
        ("hf-fp8kv inspect --dtype fp8_e5", ["fp8_e5m2"]),
        ("hf-fp8kv convert a b --to ", list(CHECKPOINT_FORMATS)),
        ("hf-fp8kv convert --to t", ["tgi", "trtllm"]),
        ("hf-fp8kv convert a b --weights ", ["copy", "link"]),
    ],
)
def test_a_shell_completes(completed, line, offered):
    assert completed(line) == offered


def test_zsh_completes_too(completed):
    (offered,) = completed("hf-fp8kv bench --suite q", "zsh")
    assert '"quality"' in offered


def _python(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **more}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False
    )


def test_completion_of_a_process_of_its_own():
    more = {"_HF_FP8KV_COMPLETE": "complete_bash", "COMP_WORDS": "hf-fp8kv bench --suite c"}
    found = _python("-m", "hf_fp8kv.cli", COMP_CWORD="3", **more)
    assert (found.returncode, found.stdout, found.stderr) == (0, "cpu\n", "")


def test_the_script_for_completion_names_the_command():
    found = _python(
        "-m", "hf_fp8kv.cli", "--show-completion", "bash",
        _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1",
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert "_HF_FP8KV_COMPLETE=complete_bash" in found.stdout
    assert "hf-fp8kv" in found.stdout


def test_python_m_is_the_same_command():
    found = _python("-m", "hf_fp8kv.cli", "--version")
    assert (found.returncode, found.stdout) == (0, version("hf-fp8kv") + "\n")
    assert "Usage: hf-fp8kv " in _python("-m", "hf_fp8kv.cli", "bench", "--help").stdout


def test_an_interruption_is_one_line(monkeypatch, capsys):
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hf_fp8kv.ops.available_backends", interrupt)
    monkeypatch.setattr(sys, "argv", ["hf-fp8kv", "check"])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    out, err = capsys.readouterr()
    assert (exit_.value.code, out, err) == (130, "", "hf-fp8kv: interrupted\n")


@pytest.mark.parametrize("arguments", [["check"], ["check", "--json"], ["--version"], ["--help"]])
def test_a_reader_that_goes_away_is_no_traceback(arguments):
    reading, writing = os.pipe()
    os.close(reading)
    found = subprocess.run(
        [sys.executable, "-m", "hf_fp8kv.cli", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=writing, stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    os.close(writing)
    assert (found.returncode, found.stderr) == (1, "")
