# Two commands matter: `make demo` and `make test`. Both need nothing but Python 3.11, make and a package index.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: setup demo test test-long lint format bench bench-fleet gallery clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Ludus needs Python 3.11 or newer (set PYTHON=python3.11)."; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing ludus into $(VENV) …"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(READY)

demo: setup
	@$(BIN)/ludus demo

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Many tests start, kill and time processes, and wait for them: three at once keep two cores busy. What fails so is run once more, alone; what
# fails alone fails. The Arena is compiled once for each machine; that takes a core for half a minute, while the linters take the other.
test: setup
	@$(BIN)/python -c 'from ludus.games.arena.main import prepare; prepare()' >/dev/null 2>&1 & compiled=$$!; \
	  $(MAKE) --no-print-directory lint; code=$$?; wait $$compiled || true; exit $$code
	@$(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder || { \
	  code=$$?; [ $$code -eq 1 ] || exit $$code; \
	  echo "What failed is run once more, alone:"; \
	  $(BIN)/pytest -n 0 --last-failed --last-failed-no-failures none; }

test-long: setup
	$(BIN)/python -m bench.longrun
	$(BIN)/python -m bench.serve --update
	$(BIN)/python -m bench.serve --soak --minutes 60
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'atheris>=3; sys_platform == "linux"'
	$(BIN)/python -m bench.fuzz --seconds 3600

bench: setup
	$(BIN)/python -m bench.train

# Redis Streams against its rivals, checkpoints on three stores, CartPole by a fleet whose members are killed: half an hour.
bench-fleet: setup
	$(BIN)/python -m bench.fleet --transport --checkpoints --learn

# The quick presets, each stopped half-way, resumed, and held to its target: a quarter of an hour on two cores.
gallery: setup
	$(BIN)/python -m bench.gallery

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache
