"""Tests of the command line in a shell: completion, exit codes, interruptions and closed pipes."""

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from transformers.utils.logging import log_levels

import hf_fp8kv_cli as cli
from hf_fp8kv import formats, ops
from hf_fp8kv.scales import SCALE_FORMATS, Granularity
from hf_fp8kv.scales.save import Weights


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("hf-fp8kv gen", ["generate"]),
        ("hf-fp8kv generate --back", ["--backend"]),
        ("hf-fp8kv generate --backend t", ["torch", "triton"]),
        ("hf-fp8kv check --device c", ["cpu", "cuda"]),
        ("hf-fp8kv convert a b --to ", list(SCALE_FORMATS)),
    ],
)
def test_a_shell_completes_the_last_word(monkeypatch, capsys, line, expected):
    monkeypatch.setattr(sys, "argv", ["hf-fp8kv"])
    monkeypatch.setenv("_HF_FP8KV_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(line.split(" ")) - 1))
    with pytest.raises(SystemExit) as exit_info:
        cli.main()
    assert not exit_info.value.code
    assert capsys.readouterr().out.split("\n")[:-1] == expected


def test_python_m_runs_the_same_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["/somewhere/hf_fp8kv_cli/__main__.py", "capacity", "--help"])
    with pytest.raises(SystemExit) as exit_info:
        runpy.run_module("hf_fp8kv_cli", run_name="__main__")
    assert not exit_info.value.code
    assert "Usage: hf-fp8kv capacity " in capsys.readouterr().out
    # Benchmarks record this name as their command.
    assert sys.argv[0] == "hf-fp8kv"


def test_an_interruption_prints_one_line(run, monkeypatch):
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hf_fp8kv.ops.explain_backends", interrupt)
    assert run.fails("check", code=130) == "hf-fp8kv: interrupted\n"


def test_a_closed_pipe_exits_with_1(monkeypatch, capsys):
    read_end, write_end = os.pipe()
    os.close(read_end)
    with open(write_end, "w") as stdout:
        monkeypatch.setattr(sys, "argv", ["hf-fp8kv", "--help"])
        monkeypatch.setattr(sys, "stdout", stdout)
        with pytest.raises(SystemExit) as exit_info:
            cli.main()
    assert (exit_info.value.code, capsys.readouterr().err) == (1, "")


@pytest.mark.parametrize(
    "line", ["chek", "serve --help", f"{cli.NAME} generate --kv-cache-dtype fp8_e3"]
)
def test_help_typos_and_completion_import_neither_torch_nor_transformers(line):
    script = (
        "import sys, hf_fp8kv_cli as cli\n"
        "try: cli.main()\n"
        "except SystemExit: print({'torch', 'transformers', 'hf_fp8kv'} & sys.modules.keys())"
    )
    words = line.split()
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    if words[0] == cli.NAME:
        environment |= {"_HF_FP8KV_COMPLETE": "complete_bash", "COMP_WORDS": line,
                        "COMP_CWORD": str(len(words) - 1)}  # fmt: skip
        words = []
    command = [sys.executable, "-c", script, *words]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert process.stdout.splitlines()[-1] == "set()", process.stdout


def test_the_names_of_the_command_line_are_those_of_the_package():
    arguments = cli.arguments
    assert tuple(formats.FORMATS) == arguments.FORMATS
    assert formats.ALIASES == arguments.ALIASES
    for name in ("DEFAULT_DTYPE", "STATIC_DTYPE", "AUTO", "ADAPTIVE"):
        assert getattr(formats, name) == getattr(arguments, name)
    assert ops.BACKEND_CHOICES == arguments.BACKENDS
    assert tuple(SCALE_FORMATS) == arguments.SCALE_FORMATS
    assert (get_args(Granularity), get_args(Weights)) == (
        arguments.GRANULARITIES, arguments.WEIGHT_MODES
    )  # fmt: skip
    assert tuple(log_levels) == arguments.LOG_LEVELS
