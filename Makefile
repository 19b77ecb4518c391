# busllm: `make up` on a fresh machine (Linux, Python >= 3.11, git, make) installs, fetches the default model and starts it.

PYTHON ?= python3
MODEL ?= smollm2-135m
GPU_PYTHON ?=
TOPOLOGY ?=

BIN := .venv/bin
RUNTIME := .venv/.runtime-installed
DEVELOPMENT := .venv/.development-installed
CUDA := .venv/.cuda-installed
PLUGINS := $(patsubst %/pyproject.toml,%,$(wildcard plugins/*/pyproject.toml))
SOURCES := pyproject.toml constraints.txt $(wildcard plugins/*/pyproject.toml)
# Editable by path: a script in the folder that holds the clone finds the package and not the folder of that name.
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt \
	--config-settings editable_mode=compat

.DEFAULT_GOAL := help
.PHONY: help install up test test-long test-all gpu-check check format bench bench-peers model

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(DEVELOPMENT)  ## make .venv with everything for development, when something has changed

up: $(RUNTIME)  ## install, fetch the default model, start it (TOPOLOGY=file.toml for another topology)
	@exec $(BIN)/busllm up $(if $(TOPOLOGY),--topology $(TOPOLOGY))

test: $(DEVELOPMENT) model  ## the tests that take seconds (all together at most 10 minutes on 2 cores)
	$(BIN)/python -m pytest -m "not slow"

test-long: $(DEVELOPMENT) model  ## the slow tests
	$(BIN)/python -m pytest -m slow

test-all: $(DEVELOPMENT) model  ## both in one run, with one summary
	$(BIN)/python -m pytest

gpu-check: $(if $(GPU_PYTHON),,$(DEVELOPMENT))  ## tests and throughput on a CUDA device (GPU_PYTHON=python: an environment as it is)
	$(if $(GPU_PYTHON),,@$(BIN)/python -m tests.gpu.check --device && $(MAKE) --no-print-directory $(CUDA))
	$(or $(GPU_PYTHON),$(BIN)/python) -m tests.gpu.check

check: $(DEVELOPMENT)  ## format, lint, types, import floors
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(DEVELOPMENT)  ## put files into the format that `make check` asks for
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(RUNTIME)  ## busllm beside every installed peer, as JSON and a page (ARGUMENTS="--help" tells how to do less)
	$(BIN)/python -m bench.compare $(ARGUMENTS)

bench-peers: $(RUNTIME)  ## install the servers that `make bench` compares with (PEERS=folder for another place)
	$(BIN)/python -m bench.compare --install all

model: $(RUNTIME)
	@$(BIN)/busllm pull $(MODEL)

.venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "busllm needs Python 3.11 or later; name one with make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv

$(RUNTIME): $(SOURCES) | .venv
	$(INSTALL) --editable .
	@touch $@

$(DEVELOPMENT): $(SOURCES) $(RUNTIME)
	$(INSTALL) --editable '.[dev]' $(patsubst %,--editable ./%,$(PLUGINS))
	@touch $@ $(RUNTIME)

$(CUDA): $(DEVELOPMENT)
	$(INSTALL) --editable '.[cuda]'
	@touch $@
