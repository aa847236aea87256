# Each target installs what it needs into .venv; a second call is fast. PYTHON=... selects another interpreter.
PYTHON ?= python3
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
# Without --no-compile pip compiles 17,000 files. Python imports about a thousand of them and compiles those itself.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
INPUTS := pyproject.toml constraints.txt
# If the environment disables bytecode files, each of a thousand processes would compile PyTorch again.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test test-all lint bench paper readme clean

help:
	@echo "make demo    train a small model, evaluate it and write a report"
	@echo "make test    run the quick tests                  (ARGS='-k trace' picks some)"
	@echo "make test-all  also the slow tests"
	@echo "make lint    ruff, ruff format and pyright"
	@echo "make bench   run the tests, then the benchmarks   (ARGS='--out results' updates the committed rows)"
	@echo "make paper   reproduce the paper and compare every method (ARGS=--quick: in miniature)"
	@echo "make readme  regenerate the README's tables and the pages in docs/ from results/"
	@echo "make clean   remove .venv, build output and caches; runs/ stays"

demo: $(VENV)/.installed-demo
	@$(BIN)/tokendepth demo $(ARGS)

# Tests sometimes wait for other processes, so three workers keep two cores busy.
test: $(VENV)/.installed-dev
	@$(BIN)/python -m pytest -n 3 --dist loadgroup -m "not slow" $(ARGS)

test-all: $(VENV)/.installed-dev
	@$(BIN)/python -m pytest -n 3 --dist loadgroup $(ARGS)

lint: $(VENV)/.installed-dev
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright

# Benchmarks of code that fails its tests are worthless, so the tests come first.
bench: $(VENV)/.installed-dev
	@$(BIN)/python -m pytest -n 3 --dist loadgroup
	@$(BIN)/python -m benchmarks timings $(ARGS)

readme: $(VENV)/.installed-dev
	@$(BIN)/python -m paper pages

# Runs what has no rows yet in the paper's tables and the comparison: hours without a GPU. ARGS=--quick: in miniature.
paper: $(VENV)/.installed-dev
	@$(BIN)/python -m paper reproduce all $(ARGS)
	@$(BIN)/python -m paper compare $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find tokendepth paper benchmarks tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.installed-demo: $(INPUTS) | $(BIN)/python
	@echo "Installing tokendepth into $(VENV) (only now and when versions change; PyTorch is large, so some minutes)"
	@$(PIP) -e '.[report]'
	@touch $@

# The development install contains everything that the demo needs.
$(VENV)/.installed-dev: $(INPUTS) | $(BIN)/python
	@echo "Installing tokendepth and its test tools into $(VENV) (only now and when versions change; some minutes)"
	@$(PIP) -e '.[dev]'
	@touch $@ $(VENV)/.installed-demo

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { echo "tokendepth needs Python 3.11 or newer, but $(PYTHON) is $$($(PYTHON) -c 'import platform; print(platform.python_version())' 2>/dev/null || echo missing); name another: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "$(PYTHON) could not make $(VENV); on Debian or Ubuntu: apt-get install python3-venv" >&2; exit 1; }
