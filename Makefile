# make up     run the whole pipeline with the demo model (HOST and PORT override 127.0.0.1:8000)
# make test   install what the tests need, then lint, types and all tests
# make lint   ruff and mypy only
# make docs   write docs/config.md and docs/cli.md from the code
# make clean  remove the environment and everything built
#
# PYTHON=python3.12 names the interpreter of a new environment (default python3), VENV=.venv312 another
# environment than .venv: each keeps the interpreter that it was made with.

PYTHON ?= python3
HOST ?= 127.0.0.1
PORT ?= 8000
# The version that the tests run with; TORCH=torch takes the newest that fits pyproject.toml.
TORCH ?= torch==2.13.0
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
CORE := $(VENV)/.transom-core
DEV := $(VENV)/.transom-dev

.DEFAULT_GOAL := help
.PHONY: help up test lint types pytest docs clean

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info[:2] < (3, 13) else "transom needs Python 3.11 or 3.12, $(PYTHON) is " + sys.version.split()[0] + ": name another one, as in make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

# The stamps make a second run start without asking pip anything. Each install names torch's version,
# so that no later one replaces it.
$(CORE): pyproject.toml | $(BIN)/python
	$(BIN)/pip install --disable-pip-version-check -e . "$(TORCH)"
	@$(BIN)/python -m transom.kernels.native_build
	@touch $@

$(DEV): pyproject.toml $(CORE) | $(BIN)/python
	$(BIN)/pip install --disable-pip-version-check -e ".[dev]" "$(TORCH)"
	@touch $@

up: $(CORE)
	@exec $(BIN)/transom up --host "$(HOST)" --port "$(PORT)" $(ARGS)

test: lint types pytest

lint: $(DEV)
	$(BIN)/ruff check .

types: $(DEV)
	$(BIN)/mypy

pytest: $(DEV)
	$(BIN)/python -m pytest $(ARGS)

docs: $(CORE)
	$(BIN)/python -m transom.commands.docs

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
