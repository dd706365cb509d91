PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2

python := $(VENV)/bin/python
pip := $(python) -m pip --disable-pip-version-check --quiet
# Stamps: touched when an installation has finished, older than a requirements file when that has changed.
ready := $(VENV)/.ready
ready-dev := $(VENV)/.ready-dev
# Present while an installation is under way; found at the start, it means that the last one was cut short.
unfinished := $(VENV)/.unfinished

.DEFAULT_GOAL := help
.PHONY: help demo test lint format smoke plans exhaustive fuzz golden docs device-check lock clean
.DELETE_ON_ERROR:

help:
	@echo 'make demo        set everything up in $(VENV), train a small model on bundled text, say which page to open'
	@echo 'make test        set everything up in $(VENV), then lint, formatting, types and tests'
	@echo 'make lint        lint, formatting and types only'
	@echo 'make format      rewrite the code in the one format'
	@echo 'make smoke       the quick tests only'
	@echo 'make plans       what is planned for TPUs, compiled with their compiler'
	@echo 'make exhaustive  the long tests that make test leaves out, several hours'
	@echo 'make fuzz        100,000 inputs that nobody thought of, for each part that reads what others wrote'
	@echo 'make golden      the tiny models that imports are tested with, anew (needs torch and transformers: PEERS=PYTHON)'
	@echo 'make docs        every command of docs/the_whole_model.md, and its measured numbers anew'
	@echo 'make device-check  on an accelerator: kernels against the plain one, a training step, generation, memory, speed'
	@echo 'make lock        requirements.lock and requirements-dev.lock anew, after a change of their .txt'
	@echo 'make clean       remove $(VENV) and caches (never runs/)'
	@echo
	@echo 'Settings: PYTHON=$(PYTHON) (3.11 or newer; read when $(VENV) is made), VENV=$(VENV), WORKERS=$(WORKERS)'

demo: $(ready)
	@echo 'Training a small model in runs/demo; stop it at any time, the same command goes on with it.'
	@$(python) -m transformer train --config=experiments/shakespeare.py --workdir=runs/demo
	@echo
	@echo 'Open this page in a browser: $(CURDIR)/runs/demo/report.html'

test: lint
	@echo 'Tests ...'
	@$(python) -m pytest -n $(WORKERS) --dist worksteal

lint: $(ready-dev)
	@echo 'Lint ...'
	@$(python) -m ruff check .
	@$(python) -m ruff format --check .
	@echo 'Types ...'
	@$(python) -m mypy $(wildcard transformer launch experiments)

format: $(ready-dev)
	@$(python) -m ruff check --fix --exit-zero --quiet .
	@$(python) -m ruff format .

smoke: $(ready-dev)
	@$(python) -m pytest -n $(WORKERS) -m smoke

# With the TPUs' compiler, which is kept apart: beside it JAX looks for a TPU in each test.
tpu := $(VENV)-tpu
plans-of = PYTHONPATH=$(tpu) JAX_PLATFORMS=cpu ALLOW_MULTIPLE_LIBTPU_LOAD=true \
	$(python) -m pytest -n $(WORKERS) tests/analysis/test_plan.py tests/analysis/test_tpu_kinds.py
plans: $(ready-dev) $(tpu)/.ready
	@echo 'Plans for TPUs ...'
	@$(plans-of)

exhaustive: $(ready-dev) $(tpu)/.ready
	@$(plans-of) -m exhaustive
	@$(python) -m pytest -n $(WORKERS) -m exhaustive

fuzz: $(ready-dev)
	@for target in overrides store tokenizer packing; do echo "$$target ..."; $(python) -m tests.fuzz $$target || exit 1; done

# By the field's own implementation, which nothing else here needs.
PEERS ?= $(python)
golden:
	@$(PEERS) tests/interop/make_golden.py

docs: $(ready)
	@$(python) -m tests.tutorial_page

# JSON in device-check.json; needs the library alone, and JAX for the accelerator (the extras cuda and tpu).
device-check: $(ready)
	@$(python) -m transformer.analysis.device_check > device-check.json

# The same packages with the hash of every file that may be installed, for every platform and Python.
lock: $(ready)
	@$(PYTHON) -m venv $(VENV)/lock && $(VENV)/lock/bin/python -m pip install --quiet uv==0.13.9
	@for what in requirements requirements-dev; do $(VENV)/lock/bin/uv pip compile --quiet --universal --python-version 3.11 \
	  --generate-hashes --no-header --no-annotate $$what.txt -o $$what.lock || exit 1; done

clean:
	@if [ -e $(VENV)/pyvenv.cfg ] || [ -e $(unfinished) ]; then rm -rf $(VENV); fi
	@if [ -d $(tpu)/libtpu ]; then rm -rf $(tpu); fi
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +

# A directory that is no virtual environment is never removed, whatever VENV was set to.
$(ready): requirements.lock setup.py pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo 'Python 3.11 or newer is needed, and PYTHON=$(PYTHON) is not; try: make PYTHON=python3.11 $(MAKECMDGOALS)' >&2; \
	  exit 1; }
	@if [ -e $(unfinished) ] || ! $(python) -m pip --version >/dev/null 2>&1; then \
	  if [ -e $(unfinished) ]; then echo '$(VENV) was left half made; making it anew.'; \
	  elif [ -n "$$(ls -A $(VENV) 2>/dev/null)" ] && [ ! -e $(VENV)/pyvenv.cfg ]; then \
	    echo '$(VENV) exists and is no virtual environment; set VENV to another name.' >&2; exit 1; fi; \
	  rm -rf $(VENV) && mkdir -p $(VENV) && touch $(unfinished) && \
	  echo "Making $(VENV) with $$($(PYTHON) --version) ..." && $(PYTHON) -m venv $(VENV) || exit 1; \
	fi
	@touch $(unfinished)
	@echo 'Installing what a run needs (a few minutes the first time) ...'
	@$(pip) install --require-hashes -r requirements.lock
	@$(pip) install --no-deps -e .
	@rm -f $(unfinished)
	@touch $@

$(tpu)/.ready: setup.py $(ready)
	@echo "Installing the TPUs' compiler in $(tpu) ..."
	@$(pip) install --upgrade --target $(tpu) "$$(grep -o 'libtpu==[0-9.]*' setup.py)"
	@touch $@

$(ready-dev): requirements-dev.lock $(ready)
	@touch $(unfinished)
	@echo 'Installing what the checks need ...'
	@$(pip) install --require-hashes -r requirements-dev.lock
	@rm -f $(unfinished)
	@touch $@
