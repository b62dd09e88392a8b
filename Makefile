# Two commands: `make run` does the main job once, `make test` proves it. Both make .venv first, once.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PLUGINS := $(patsubst plugins/%/pyproject.toml,%,$(sort $(wildcard plugins/*/pyproject.toml)))

# A second `make` installs nothing: the stamp is newer than everything that says what to install.
STAMP := $(VENV)/.installed
PROJECTS := pyproject.toml $(PLUGINS:%=plugins/%/pyproject.toml)
EDITABLE := -e '.[dev]' $(PLUGINS:%=-e plugins/%)

.PHONY: run install test test-long test-all tpu-check tpu-estimates lint types docs docs-in-browser doc-tables changes pictures wheels clean

# Where `make run` saves its picture.
PICTURE := build/run.png

run: $(STAMP)
	@mkdir -p $(dir $(PICTURE))
	$(BIN)/ejkernel run --picture $(PICTURE)

# For use: into the active environment, where nothing refers to this clone. With uv: make install PIP="uv pip".
ACTIVE := $(or $(VIRTUAL_ENV),$(CONDA_PREFIX))
PIP    ?= "$(ACTIVE)/bin/python" -m pip

# Where none is active, or that of make itself: into the latter, where all packages are editable.
ifeq ($(filter-out $(abspath $(VENV)),$(ACTIVE)),)
install: $(STAMP)
	@echo "The core and all plugins are installed in $(VENV): . $(BIN)/activate"
else
install:
	@echo "Installing the core and all plugins into $(ACTIVE); it takes about a minute."
	@$(PIP) install -q . $(PLUGINS:%=./plugins/%)
endif

# As many seconds of the processor as the tests may cost together, and what draws them: tests/selection.py. TESTS may be
# the tests of one package.
BUDGET := 340
TESTS  := tests plugins

# With worksteal most files are run by one process, so that fixtures and programs are made once.
test: export EJKERNEL_TESTS = quick
test: $(VENV)/.installed-integration
	$(BIN)/python -m pytest -q $(TESTS) -m "not long and not gpu" --budget $(BUDGET) $(SEED:%=--seed %) -n 2 --dist worksteal

# The sweeps, which are all tests of a package, on which something has changed since they last passed, as
# tests/long-sweeps.json has it. With TENTH=commit, of the others a tenth each, drawn by the commit, and of those on
# which something has changed as much as costs at most so many MINUTES, after which none begins; nothing is recorded.
test-long: $(VENV)/.installed-integration
	$(BIN)/python .ci/long_sweeps.py $(TENTH:%=--tenth %) $(MINUTES:%=--minutes %)

# Everything, whatever is recorded: before each release.
test-all: $(VENV)/.installed-integration
	$(BIN)/python .ci/long_sweeps.py --all

# By the real compiler of TPUs, in an environment of its own: it is large, and comes under terms of its own.
TPU := build/tpu

tpu-check: $(TPU)/.installed
	$(TPU)/bin/ejkernel tpu fits sharded

tpu-estimates: $(TPU)/.installed
	$(TPU)/bin/ejkernel tpu estimates

$(TPU)/.installed: Makefile $(PROJECTS)
	$(PYTHON) -m venv $(TPU)
	$(TPU)/bin/python -m pip install -q "jax[tpu]" -e . -e plugins/ops -e plugins/xla -e plugins/testing -e plugins/pallas_tpu -e plugins/cli
	@touch $@

# The pictures of the README and the pages, from the tables of docs/measurements.
pictures: $(STAMP)
	$(BIN)/python .ci/pictures.py

# In one folder: docs/ has settings of its own, and a cache there would count as a page that has changed.
lint: export RUFF_CACHE_DIR := $(CURDIR)/.ruff_cache
lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

# The site, in build/docs.
docs: $(VENV)/.installed-docs
	rm -rf build/docs
	$(BIN)/sphinx-build -q -W --keep-going -E -c docs -d build/doctrees . build/docs
	$(BIN)/python .ci/check_site.py build/docs

# The same in Chromium, which has to be there: apt-get install chromium chromium-driver
docs-in-browser: docs
	$(BIN)/python -m pip install -qq selenium
	$(BIN)/python .ci/site_in_browser.py build/docs --pictures build/docs-pictures

# The tables of docs/ that are made from the code.
doc-tables: $(STAMP)
	JAX_PLATFORMS=cpu $(BIN)/python .ci/doc_tables.py

# The changelog of the next version, as it would be.
changes: $(VENV)/.installed-docs
	$(BIN)/towncrier build --draft --version next

# What only tests and the site need: installed when it is first needed, so that `make run` does not wait for it.
$(VENV)/.installed-%: $(STAMP)
	@echo "Installing what '$*' in pyproject.toml lists into $(VENV), once."
	@$(BIN)/python .ci/install.py --no-build-isolation -e '.[$*]'
	@touch $@

wheels: $(STAMP)
	rm -rf build/wheels
	$(BIN)/python -m pip wheel -q --no-deps -w build/wheels . $(PLUGINS:%=./plugins/%)
	ls build/wheels

# Without isolation, pip builds all packages with one setuptools; with it, it would install one for each of them.
$(STAMP): $(PROJECTS) | $(BIN)/python
	@echo "Installing JAX, the tools and the packages of this repository into $(VENV), once; it takes about a minute."
	@$(BIN)/python -m pip install -q --upgrade pip "setuptools>=77"
	@$(BIN)/python .ci/install.py --no-build-isolation $(EDITABLE)
	@touch $@

$(BIN)/python:
	@echo "Making the environment $(VENV) with $(PYTHON)."
	@$(PYTHON) -m venv $(VENV)

clean:
	rm -rf $(VENV) build dist *.egg-info $(PLUGINS:%=plugins/%/build) $(PLUGINS:%=plugins/%/*.egg-info)
