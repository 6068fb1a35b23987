# Start with `make run` and `make test`. CI runs the same targets.
PYTHON ?= python3.11
# Another version uses another environment: make test PYTHON=python3.13
VENV ?= $(if $(filter python3.11,$(PYTHON)),.venv,.venv-$(notdir $(PYTHON)))
BIN := $(VENV)/bin
UV_PIP := $(BIN)/python deploy/uv_pip.py
RESOLVE := $(UV_PIP) compile --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header
EXTRAS := train serve act kubernetes collect nvml dask
export MLFLOW_DISABLE_TELEMETRY = true
export DVC_NO_ANALYTICS = 1

.DEFAULT_GOAL := help
.PHONY: help run demo screenshot results prior test test-system histories lint site size bench lock check-system clean

help:            ## list the targets
	@grep -E '^[a-z-]+: .*##|^[a-z-]+:  *##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

run: $(VENV)/.runtime  ## set up, simulate a demo fleet, train and backtest; print a table and the path of the report
	@PATH="$(abspath $(BIN)):$$PATH" dvc repro
	@$(BIN)/predrain report --show data/backtest

demo: $(VENV)/.runtime  ## run a simulated cluster and print its address; stop with Ctrl-C
	$(BIN)/predrain demo

screenshot: $(VENV)/.dev  ## take the picture of README (docs/images/fleet.png) from the demo in Chromium
	$(BIN)/python tests/screenshots.py

results: $(VENV)/.sequence  ## measure the claims on 16 simulated fleets: benchmarks/results/fleets.md; two hours, resumable
	$(BIN)/python benchmarks/results.py

prior: $(VENV)/.runtime  ## build the shipped prior from 48 simulated fleets; 5 minutes, reproducible byte by byte
	$(BIN)/predrain prior build --out models/learners/prior_data

test: $(VENV)/.dev  ## run the tests that need no server
	$(BIN)/python -m pytest -m "not system" -n 2 --dist loadfile

test-system: $(VENV)/.dev  ## run the tests with real servers; installs packages as root
	tests/system/install_packages.sh
	$(BIN)/python -m pytest -m system -n 2 --dist loadfile --no-loadscope-reorder

histories: $(VENV)/.dev  ## random tests, seeded by date: 1,000 kills of the loop, HISTORIES=400000 of the controller; 1 CPU hour
	KILLS=1000 SEED=$$(date +%F) $(BIN)/python -m pytest -q -m system tests/system/test_loop_killed.py
	HISTORIES=$(or $(HISTORIES),400000) SEED=$$(date +%F) $(BIN)/python -m pytest -q -n auto --maxfail=3 tests/policy tests/scheduler -k histor

lint: $(VENV)/.dev  ## check style, types, import directions, dependencies and generated pages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/deptry .
	$(BIN)/python -m tests.reference_pages --check

site: $(VENV)/.dev  ## build the documentation in site/; fails on a broken link or anchor
	$(BIN)/python -m zensical build --strict

size:            ## count lines by folder, modules, modules with one importer, the largest folder, import cycles
	@$(PYTHON) tests/house_size.py

bench: $(VENV)/.bench  ## run every benchmark and write benchmarks/results/speeds.md
	$(BIN)/python benchmarks/run_all.py

lock: $(VENV)/.python  ## update the lock files from pyproject.toml
	$(RESOLVE) pyproject.toml --group dev $(EXTRAS:%=--extra %) -o requirements/dev.lock
	$(RESOLVE) pyproject.toml --extra train --extra serve --extra act --extra collect -c requirements/dev.lock -o requirements/run.lock
	$(RESOLVE) pyproject.toml --extra serve --extra registry --extra collect --extra act --extra kubernetes --extra nvml -c requirements/dev.lock -o requirements/serve.lock
	$(RESOLVE) pyproject.toml --extra act --extra kubernetes -c requirements/dev.lock -o requirements/act.lock
	# Resolve for a platform without CUDA: its libraries take gigabytes, and the tests need none of them.
	MACOSX_DEPLOYMENT_TARGET=14.0 $(UV_PIP) compile requirements/sequence.in --python-platform aarch64-apple-darwin --python-version 3.11 --no-emit-index-url --no-header -c requirements/dev.lock -o requirements/sequence.lock
	$(RESOLVE) requirements/uv.in -o requirements/uv.lock
	$(RESOLVE) requirements/bench.in -c requirements/dev.lock -o requirements/bench.lock

# Fail early, and name the command that installs what pip cannot.
check-system:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "predrain needs Python 3.11 to 3.13 as '$(PYTHON)': apt-get install python3.11 (or: make $(MAKECMDGOALS) PYTHON=python3.12)" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || { \
	  echo "predrain needs Python 3.11 to 3.13, but $(PYTHON) is $$($(PYTHON) --version): make $(MAKECMDGOALS) PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "this Python has no venv module: apt-get install $$($(PYTHON) -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')" >&2; exit 1; }
	@$(PYTHON) -c 'import ctypes; ctypes.CDLL("libgomp.so.1")' 2>/dev/null || { \
	  echo "LightGBM needs the OpenMP runtime libgomp.so.1: apt-get install libgomp1" >&2; exit 1; }
	@command -v git >/dev/null || { echo "predrain records its code revision with git: apt-get install git" >&2; exit 1; }

$(VENV)/.python: | check-system
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.runtime: requirements/run.lock pyproject.toml | $(VENV)/.python
	$(UV_PIP) install -r requirements/run.lock
	$(UV_PIP) install --no-deps -e .
	@# Compile the kernels of the features once, for all later commands.
	@made=$$(mktemp -d) && $(BIN)/predrain simulate --gpus 16 --days 7 --out $$made/fleet >/dev/null && \
	  $(BIN)/predrain features --dataset $$made/fleet --out $$made/matrix >/dev/null && rm -r $$made
	@touch $@

# PyTorch, for the models of the paper
$(VENV)/.sequence: requirements/sequence.lock $(VENV)/.runtime
	$(UV_PIP) install -r requirements/sequence.lock
	@touch $@

$(VENV)/.dev: requirements/dev.lock $(VENV)/.sequence
	$(UV_PIP) install -r requirements/dev.lock
	@touch $@

$(VENV)/.bench: requirements/bench.lock $(VENV)/.dev
	$(UV_PIP) install -r requirements/bench.lock
	@touch $@

clean:           ## remove the outputs of the pipeline; keeps the environment, and datasets outside data/
	rm -rf data/dataset data/dataset-truth data/matrix data/models data/backtest dvc.lock mlflow.db mlruns
