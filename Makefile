# `make demo` and `make test` need a Python and nothing else: they make $(VENV) and install into it.

PYTHON ?= python3
VENV   ?= .venv
python := $(VENV)/bin/python

# The environment's own Python, once it is there, decides which end of the tested range is installed.
ifndef CONSTRAINTS
  end := $(shell $(or $(wildcard $(python)),$(PYTHON)) -c 'import sys; v = sys.version_info; \
    print("high" if v >= (3, 13) else "low" if v >= (3, 11) else "")' 2>/dev/null)
  $(if $(end),,$(error refusion_jax needs Python 3.11 or newer and PYTHON=$(PYTHON) is not: try make PYTHON=python3.12))
  CONSTRAINTS := constraints/$(end).txt
endif

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow lint install clean

help:
	@echo "refusion_jax: parallel decoding of ReFusion models in JAX"
	@echo
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "%-18s %s\n", $$1, $$2 }'
	@echo
	@echo "  PYTHON=$(PYTHON)  VENV=$(VENV)  CONSTRAINTS=$(CONSTRAINTS)  PYTEST_ARGS='$(PYTEST_ARGS)'"

demo: $(VENV)/.installed-demo ## decode the bundled prompts with the bundled model
	@$(python) -m refusion_jax.demo

test: $(VENV)/.installed-dev ## run the fast tests
	$(python) -m pytest $(PYTEST_ARGS)

test-slow: $(VENV)/.installed-dev ## run the slow tests
	$(python) -m pytest -m slow $(PYTEST_ARGS)

lint: $(VENV)/.installed-dev ## run ruff and mypy
	$(python) -m ruff check .
	$(python) -m mypy

install: $(VENV)/.installed-dev ## make the environment for development

clean: ## remove the environment and the caches
	rm -rf $(VENV) .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info

$(VENV)/bin/pip:
	$(PYTHON) -m venv $(VENV)

# A stamp is older than what it was installed from when that changes: then pip runs again.
$(VENV)/.installed-demo: extras :=
$(VENV)/.installed-dev:  extras := [train,dev]
$(VENV)/.installed-%: setup.cfg pyproject.toml $(CONSTRAINTS) | $(VENV)/bin/pip
	@echo "Installing refusion_jax$(extras) with $(CONSTRAINTS) into $(VENV): a minute or two, once."
	@$(python) -m pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS) --editable '.$(extras)'
	@touch $@
