# Two commands for a newcomer: `make demo` and `make test`. Both make the virtual environment they need.
#   make demo VENV=/path/to/venv     use another environment, for example one that already has CUDA or ROCm torch
#   make test TESTS=tests/model      run a part of the tests

VENV ?= .venv
PYTHON ?= python3
TESTS ?= tests
JOBS ?= 2
BIN := $(VENV)/bin
# Spinning OpenMP threads slow two cores many times over as soon as something else runs.
export OMP_WAIT_POLICY := PASSIVE

.PHONY: demo test test-slow lint format bench agreement clean

demo: $(VENV)/.installed-demo
	$(BIN)/moestro train sotu-tiny run.resume=auto
	@echo
	$(BIN)/moestro generate runs/sotu-tiny "The people of the United States" --max-new-tokens 60
	@echo
	@echo "report: runs/sotu-tiny/report.html   (open it in a browser)"
	@echo "again from the start: rm -r runs/sotu-tiny && make demo"

test: $(VENV)/.installed-dev lint
	OMP_NUM_THREADS=1 $(BIN)/pytest $(TESTS) -m "not slow" -n $(JOBS) --durations=10

test-slow: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/pytest $(TESTS) -m slow -n $(JOBS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.installed-bench
	$(BIN)/python benchmarks/train_step.py
	$(BIN)/python benchmarks/train_step.py --dtype bf16 --layers 2 --rounds 3

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit("Moestro needs Python 3.11 or newer; try make PYTHON=python3.12") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-demo: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[demo]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@ $(VENV)/.installed-demo

# LitGPT pins other versions of some packages, so the peers are not held to constraints.txt.
$(VENV)/.installed-bench: $(VENV)/.installed-dev
	$(BIN)/python -m pip install -q --disable-pip-version-check torch==2.13.0 -e '.[bench]'
	@touch $@

agreement: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/agreement.py

clean:
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
