# Set-up and every check, from a fresh clone with Python >= 3.11. VENV and PYTHON may be given: make test PYTHON=python3.12 VENV=/tmp/v
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STUDY ?= configs/studies/quickstart.yaml
# Byte-compiling everything at install would cost more time than it saves in one study.
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt

.PHONY: study test lint bench clean

study: $(VENV)/.installed
	$(BIN)/mutransfer study $(STUDY)

test: lint
	$(BIN)/pytest -n 2 tests
	$(BIN)/pytest -n 0 --nbmake notebooks

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.installed-dev
	$(BIN)/python -m tests.bench

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'mutransfer needs Python 3.11 or newer; give one: make PYTHON=python3.12')"
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
