# Set-up and every check, from a fresh clone with Python >= 3.11. VENV and PYTHON may be given: make test PYTHON=python3.12 VENV=/tmp/v
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STUDY ?= configs/studies/quickstart.yaml
# Byte-compiling everything at install would cost more time than it saves in one study.
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt

.PHONY: study test lint bench engines clean

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

# Each engine in a virtual environment of its own, where the tests that need it are not skipped, and where the tables of docs/engines are
# made; gigabytes. One engine alone: make engine-hf.
ENGINES ?= .venv-engines
ENGINE_NAMES := pytorch deepspeed hf torchtitan megatron olmo-core
EXPORT_TESTS := tests/scaling/exports
engines: $(ENGINE_NAMES:%=engine-%)
	$(ENGINES)/pytorch/bin/python -m tests.engines render $(ENGINES)/tables docs

.PHONY: $(ENGINE_NAMES:%=engine-%)
$(ENGINE_NAMES:%=engine-%): engine-%: $(ENGINES)/%/.installed
	MUTRANSFER_ENGINES=1 $(ENGINES)/$*/bin/python -m pytest -p no:cacheprovider $(TESTS_OF_$*:%=$(EXPORT_TESTS)/test_%.py)
	$(ENGINES)/$*/bin/python -m tests.engines collect $* $(ENGINES)/tables

TESTS_OF_pytorch := pytorch folded train_fsdp
TESTS_OF_deepspeed := deepspeed
TESTS_OF_hf := huggingface
TESTS_OF_torchtitan := torchtitan
TESTS_OF_megatron := megatron megatron_folded
TESTS_OF_olmo-core := olmo

ENGINE_BASE := torch numpy pydantic PyYAML pytest pytest-timeout

$(ENGINES)/%/.installed: constraints.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet -c constraints.txt $(ENGINE_BASE)
	$(INSTALL_$*)
	touch $@

INSTALL_deepspeed = DS_BUILD_OPS=0 $(ENGINES)/deepspeed/bin/pip install --quiet -c constraints.txt deepspeed==0.19.8
INSTALL_hf = $(ENGINES)/hf/bin/pip install --quiet -c constraints.txt transformers==5.24.0 accelerate==1.15.0
# Without the constraints: it asks for an older rich than they have.
INSTALL_olmo-core = $(ENGINES)/olmo-core/bin/pip install --quiet ai2-olmo-core==3.0.0 torch==2.13.0
INSTALL_torchtitan = $(ENGINES)/torchtitan/bin/pip install --quiet torchtitan==0.3.0 triton torch==2.13.0
# megatron-core asks for Python 3.12 for one name of `typing`, which the test provides.
INSTALL_megatron = $(ENGINES)/megatron/bin/pip install --quiet triton packaging && $(ENGINES)/megatron/bin/pip install --quiet --ignore-requires-python --no-deps megatron-core==0.19.2

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
