# Two commands for a newcomer: `make demo` and `make test`. Both make the virtual environment they need.
#   make demo VENV=/path/to/venv     use another environment, for example one that already has CUDA or ROCm torch
#   make test TESTS=tests/model      run a part of the tests

VENV ?= .venv
PYTHON ?= python3
TESTS ?= tests
JOBS ?= 2
BIN := $(VENV)/bin
# Without compiling all 16,000 modules, a minute's work: those that are used are compiled and kept when they are.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := $(BIN)/python -m pip install -q --disable-pip-version-check --no-compile -c constraints.txt
# Spinning OpenMP threads slow two cores many times over as soon as something else runs.
export OMP_WAIT_POLICY := PASSIVE

.PHONY: demo test test-slow lint style format bench agreement clean

demo: $(VENV)/.installed-demo
	$(BIN)/moestro train sotu-tiny run.resume=auto
	@echo
	$(BIN)/moestro generate runs/sotu-tiny "The people of the United States" --max-new-tokens 60
	@echo
	@echo "report: runs/sotu-tiny/report.html   (open it in a browser)"
	@echo "again from the start: rm -r runs/sotu-tiny && make demo"

# mypy beside the tests, whose ranks leave processors idle while they wait for each other; what it says comes last.
test: $(VENV)/.installed-dev style
	@$(BIN)/mypy > $(VENV)/mypy.log 2>&1 & types=$$!; \
	OMP_NUM_THREADS=1 $(BIN)/pytest $(TESTS) -m "not slow" -n $(JOBS) --durations=10; tests=$$?; \
	wait $$types; types=$$?; cat $(VENV)/mypy.log; exit $$((tests | types))

test-slow: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/pytest $(TESTS) -m slow -n $(JOBS)

lint: style
	$(BIN)/mypy

style: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

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
	$(INSTALL) -e '.[demo]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/bin/python pyproject.toml constraints.txt
	$(INSTALL) -e '.[dev]'
	@touch $@ $(VENV)/.installed-demo

# LitGPT pins other versions of some packages, so the peers are not held to constraints.txt.
$(VENV)/.installed-bench: $(VENV)/.installed-dev
	$(BIN)/python -m pip install -q --disable-pip-version-check torch==2.13.0 -e '.[bench]'
	@touch $@

agreement: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/agreement.py

clean:
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
