# The two commands that matter are `make demo` and `make test`. Both need Python 3.11, make and a package index.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
BASE   := $(VENV)/.base
READY  := $(VENV)/.ready
DOCS   := $(VENV)/.docs

# Packages whose unit tests `make check` runs: no services, no worker processes, under three minutes.
CHECK_PACKAGES := core config io models algorithms buffers envs protocol storage transport docs
CHECK_PATHS     = $(wildcard $(addprefix tests/,$(CHECK_PACKAGES)) tests/test_*.py)

.PHONY: setup demo check test test-long lint format docs docs-serve bench bench-fleet gallery clean

setup: $(READY)

# The package alone: enough to train, serve and look at runs.
$(BASE): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Ludus needs Python 3.11 or newer (set PYTHON=python3.11)."; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing ludus into $(VENV) …"
	@$(PIP) torch
	@$(PIP) -e .
	@touch $(BASE)

# All extras and the development tools.
$(READY): $(BASE)
	@echo "Installing the development tools into $(VENV) …"
	@$(PIP) -e '.[dev]'
	@$(PIP) --no-deps rlgym-rocket-league  # for its collision meshes; it would ask for an old numpy
	@touch $(READY)

$(DOCS): $(BASE)
	@echo "Installing MkDocs into $(VENV) …"
	@$(PIP) -e '.[docs]'
	@touch $(DOCS)

demo: $(BASE)
	@$(BIN)/ludus demo

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

check: lint
	$(BIN)/pytest -n 2 -q -m 'not long and not system' $(CHECK_PATHS)

# Many tests start, kill and time processes and wait for them: three at once keep two cores busy. A test that fails is run once more, alone;
# only a second failure counts. Numba compiles the Arena once per machine (half a minute of one core), in parallel with the linters.
test: setup
	@$(BIN)/python -c 'from ludus.games.arena.main import prepare; prepare()' >/dev/null 2>&1 & compile=$$!; \
	  $(MAKE) --no-print-directory lint; code=$$?; wait $$compile || true; exit $$code
	@$(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder --junitxml .pytest_cache/first.xml || { \
	  code=$$?; [ $$code -eq 1 ] || exit $$code; \
	  echo "Running the failed tests once more, alone:"; \
	  $(BIN)/pytest -n 0 --last-failed --last-failed-no-failures none --junitxml .pytest_cache/second.xml; code=$$?; \
	  $(BIN)/python scripts/flaky_report.py .pytest_cache/first.xml .pytest_cache/second.xml; exit $$code; }

test-long: setup
	$(BIN)/python -m bench.longrun
	$(BIN)/python -m bench.serve --update
	$(BIN)/python -m bench.serve --soak --minutes 60
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'atheris>=3; sys_platform == "linux"'
	$(BIN)/python -m bench.fuzz --seconds 3600

# The documentation as a web site in site/; a broken link or a page without a place in the navigation is an error.
docs: $(DOCS)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "The documentation is in site/index.html."

docs-serve: $(DOCS)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

bench: setup
	$(BIN)/python -m bench.train

# Redis Streams against the alternatives, checkpoints on three stores, CartPole by a fleet whose members are killed: half an hour.
bench-fleet: setup
	$(BIN)/python -m bench.fleet --transport --checkpoints --learn

# The quick presets, each stopped half-way, resumed, and compared with its target: a quarter of an hour on two cores.
gallery: setup
	$(BIN)/python -m bench.gallery

clean:
	rm -rf $(VENV) build dist site .mypy_cache .ruff_cache .pytest_cache
