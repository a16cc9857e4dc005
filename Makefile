# Two commands set everything up on a fresh machine: `make quickstart` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
COVERED := kvcq/spec/*,kvcq/stats/*,kvcq/transforms/*,kvcq/codecs/*,kvcq/methods/*,kvcq/artifacts/*

.PHONY: quickstart test lint clean

quickstart: $(VENV)/.installed
	$(BIN)/kvcq quickstart --out quickstart --force

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 --dist worksteal --cov --cov-report=
	$(BIN)/python -m coverage report --include='$(COVERED)' --fail-under=90 --skip-covered

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# torch goes first: a later resolver step must not replace the pinned build.
$(VENV)/.torch: constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt torch
	touch $@

$(VENV)/.installed: pyproject.toml $(VENV)/.torch
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/.installed-dev: pyproject.toml $(VENV)/.torch
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) quickstart .coverage .mypy_cache .ruff_cache .pytest_cache .hypothesis
