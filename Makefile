# Two commands: `make run` does the main job once, `make test` proves it. Both make .venv first, once.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PLUGINS := ops xla cache packed triton bench

# A second `make` installs nothing: the stamp is newer than everything that says what to install.
STAMP := $(VENV)/.installed
PROJECTS := pyproject.toml $(PLUGINS:%=plugins/%/pyproject.toml)
EDITABLE := -e '.[dev]' $(PLUGINS:%=-e plugins/%)

.PHONY: run test test-long lint types wheels clean

run: $(STAMP)
	$(BIN)/python -m ejkernel_bench run

# Cheap cases first: a broken core is told within seconds. pytest itself compiles nothing twice: one process a core.
test: $(STAMP)
	$(BIN)/python -m pytest -q tests -m "not long and not gpu" -n 2 -x
	$(BIN)/python -m pytest -q plugins -m "not long and not gpu" -n 2

test-long: $(STAMP)
	$(BIN)/python -m pytest -q -m "long and not gpu" -n 2

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

wheels: $(STAMP)
	rm -rf build/wheels
	$(BIN)/python -m pip wheel -q --no-deps -w build/wheels . $(PLUGINS:%=./plugins/%)
	ls build/wheels

$(STAMP): $(PROJECTS) | $(BIN)/python
	$(BIN)/python -m pip install -qq $(EDITABLE)
	touch $@

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip

clean:
	rm -rf $(VENV) build dist
