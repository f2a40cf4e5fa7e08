# Two commands start everything: `make demo` and `make test`. Both build .venv first, once.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed

# The readers of other projects lie in an environment of their own, on top of .venv.
EXPORTS := .venv-exports
READERS := $(EXPORTS)/.installed

# PYTHON=... names the interpreter that builds .venv; otherwise the first of these that is 3.11 or newer.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	if $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo $$p; break; fi; done)

# Tests run offline, one torch thread per worker, and draw the same hypothesis examples every time
# (ARGS='--hypothesis-profile default' explores). ARGS= passes more to pytest or to the command of a target.
JOBS     ?= 2
TIMEOUT  ?= 900
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
PYTEST    = $(TEST_ENV) $(BIN)/python -m pytest -n $(JOBS) --timeout $(TIMEOUT) --hypothesis-profile ci
ARGS     ?=

.PHONY: help venv demo lint format test test-full test-gpu test-exports bench lab notebooks clean

help:  ## print this list
	@echo "usage: make TARGET [PYTHON=python3.x] [ARGS='...']"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "%-13s %s\n", $$1, $$2}'

venv: $(STAMP)  ## build .venv and install the workbench with its development tools

$(STAMP): pyproject.toml
	@if [ ! -x $(BIN)/python ]; then \
		if [ -z "$(PYTHON)" ]; then echo "Python 3.11 or newer is needed and none was found: install one, or name it with make PYTHON=/path/to/python3.x" >&2; exit 1; fi; \
		"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
			{ echo "Python 3.11 or newer is needed, and PYTHON=$(PYTHON) is not that: name another with make PYTHON=/path/to/python3.x" >&2; exit 1; }; \
		"$(PYTHON)" -m venv $(VENV) || { rm -rf $(VENV); exit 1; }; \
	fi
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

demo: venv  ## the whole job on the shipped checkpoint; figures and a page in data/runs
	$(BIN)/workbench demo $(ARGS)

lint: venv  ## style, formatting, types and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: venv  ## apply the formatter and the safe fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: lint  ## lint, then the quick tests
	$(PYTEST) $(ARGS)

test-full: venv  ## the heavier crosses that `make test` leaves out
	$(PYTEST) -m "full and not gpu" $(ARGS)

test-gpu:  ## the GPU tests, with .venv if it is there and else with PYTHON as it stands
	@if [ -x $(BIN)/python ]; then py=$(BIN)/python; else py="$(PYTHON)"; fi; \
	if [ -z "$$py" ]; then echo "Python 3.11 or newer is needed and none was found: name one with make test-gpu PYTHON=/path/to/python3.x" >&2; exit 1; fi; \
	HF_HUB_OFFLINE=1 "$$py" -m pytest -m gpu tests/gpu $(ARGS)

test-exports: $(READERS)  ## every export through the reader of the project it is for
	$(TEST_ENV) $(EXPORTS)/bin/python -m pytest -m exports tests/exports $(ARGS)

$(READERS): $(STAMP) tests/exports/readers.txt tests/exports/requirements.txt
	$(BIN)/python -m venv --clear $(EXPORTS)
	@below=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])'); \
	own=$$($(EXPORTS)/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])'); \
	echo "import site; site.addsitedir('$$below')" > "$$own/workbench.pth"
	$(EXPORTS)/bin/python -m pip install --quiet --disable-pip-version-check -r tests/exports/requirements.txt
	$(EXPORTS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r tests/exports/readers.txt
	@touch $@

bench: venv  ## the benchmarks
	$(BIN)/workbench bench $(ARGS)

lab: venv  ## JupyterLab on notebooks/, on this machine only
	$(BIN)/jupyter-lab --ip 127.0.0.1 --notebook-dir notebooks $(ARGS)

notebooks: venv  ## run the committed notebooks again, in place
	$(BIN)/python notebooks/execute.py $(ARGS)

clean:  ## remove caches and builds; .venv and runs/ stay
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find workbench kernels tests notebooks -name __pycache__ -type d -prune -exec rm -rf {} +
	find notebooks -name .ipynb_checkpoints -type d -prune -exec rm -rf {} +
