# Needs make and Python 3.11 or newer, nothing else; everything it installs goes into .venv.
#
#   make test ARGS="-k name"     the test suite, or a part of it
#   make test WORKERS=0 ARGS=-s  in one process, with what the tests print
#   make chaos                   ten minutes of faults, a history, and its verdict in one line
#   make chaos SEED=7            what was done then, and when; RECORD=1 writes the evidence page
#   make bench                   what it costs, beside its peers; writes the page about performance
#   make bench ARGS=--quick      the same small, in two minutes, written to build/
#   make chaos-tests             the tests that take minutes, or are the same on a second broker
#   make packaged-tests          the wheel, the tutorial and the types, each in a fresh environment
#   make lint                    everything that reads the code without running it
#   make demo                    two beats, two workers, kills, and a verdict in under a minute
#   make demo ARGS=--unguarded   the same without celery-pglock
#   make PYTHON=python3.12 test  with another Python

PYTHON ?= python3
ARGS ?=
SEED ?=
RECORD ?=
# Most tests wait for other processes, so there are more workers than cores. A file stays in one of
# them: its tests share what they start. Those that take longest come first, not those that have most.
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(min(9, 2 * (os.cpu_count() or 1) + 1))')
VENV := .venv
BIN := $(VENV)/bin

# Tests start thousands of processes; compiled anew by each, the package takes longer than Celery.
unexport PYTHONDONTWRITEBYTECODE

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore

# The environment is made anew when the Python or the place of the checkout changes,
# and brought up to date when pyproject.toml does: the names of the stamps tell.
python_key := $(shell { pwd; $(PYTHON) -c 'import sys; print(sys.version, sys.base_prefix)'; } 2>&1 | cksum | cut -d' ' -f1)
project_key := $(shell cksum < pyproject.toml | cut -d' ' -f1)
made := $(VENV)/.made-$(python_key)
installed := $(VENV)/.installed-$(python_key)-$(project_key)

.PHONY: setup lint test chaos-tests packaged-tests types docs screenshots chaos demo clean bench
.DEFAULT_GOAL := test

setup: $(installed)

test: setup
	$(BIN)/python -m pytest -m "not chaos" -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

chaos-tests: setup
	$(BIN)/python -m pytest -m chaos $(ARGS)

packaged-tests: setup
	$(BIN)/python -m pytest -m "chaos or not chaos" \
		tests/acceptance/test_wheel.py tests/acceptance/test_tutorial.py tests/integration/test_typing.py $(ARGS)

chaos: setup
	@$(BIN)/python -m tests.chaos $(if $(SEED),--seed $(SEED)) $(if $(RECORD),--record) $(ARGS)

bench: setup
	@$(BIN)/python -m tests.benchmarks $(if $(SEED),--seed $(SEED)) $(ARGS)

demo: setup
	@$(BIN)/python -m celery_pglock.demo $(ARGS)

types: setup
	$(BIN)/mypy --strict celery_pglock tests

docs: setup
	$(BIN)/sphinx-build -q -W -n --keep-going -b html docs docs/_build/html

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(MAKE) --no-print-directory types
	$(BIN)/lint-imports
	$(BIN)/codespell
	$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec docker-compose.yml
	$(MAKE) --no-print-directory docs

# From a live application, in a real browser: needs chromium and chromium-driver.
screenshots: setup
	PYTHONPATH=. $(BIN)/python docs/screenshots/take.py

clean:
	rm -rf $(VENV) build dist htmlcov docs/_build .coverage .coverage.* \
		.hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find celery_pglock tests docs -name __pycache__ -type d -prune -exec rm -rf {} +

$(made):
	@command -v $(PYTHON) >/dev/null || \
		{ echo "make needs Python 3.11 or newer, and '$(PYTHON)' is not there: install it, or name another with make PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "celery-pglock needs Python 3.11 or newer, and '$(PYTHON)' is $$($(PYTHON) -V 2>&1): name another with make PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "'$(PYTHON)' cannot make virtual environments: install its venv module (on Debian and Ubuntu: apt install python3-venv)"; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	@touch $@

$(installed): | $(made)
	$(BIN)/python -m pip install --quiet --editable '.[demo,metrics,web]' --group dev
	@rm -f $(VENV)/.installed-*
	@touch $@
