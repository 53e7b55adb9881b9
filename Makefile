# make demo   everything set up, then a tiny model trained: the whole way from recipe to number
# make test   everything set up, then every test
# Both say what they download before they do, and do only what is missing when run again.

SHELL := /bin/bash
VENV := .venv
# All cores; tests/conftest.py says which worker runs what.
PYTEST_ARGS ?= -n auto --durations=25 -m "not drill"
BIN := $(VENV)/bin
# Each of a thousand processes would compile what it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test drills clean

demo: $(VENV)/.train
	@FP8LAUNCH=$(BIN)/fp8launch bash tools/demo.sh

test: $(VENV)/.test
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/python -m pytest $(PYTEST_ARGS)

# Time limits, power cuts, preemption: minutes each, alone on the machine.
drills: $(VENV)/.test
	@$(BIN)/python -m pytest -m drill

$(VENV)/.train: pyproject.toml tools/setup.sh
	@bash tools/setup.sh train $(VENV)

$(VENV)/.test: $(VENV)/.train
	@bash tools/setup.sh test $(VENV)

clean:
	rm -rf $(VENV) .cache build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
