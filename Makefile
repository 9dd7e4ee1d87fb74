# Everything runs in virtual environments inside the checkout. `make bench` and `make test` set theirs up on first use.
PYTHON ?= python3
VENV ?= .venv
VENV_FRAMEWORKS ?= .venv-frameworks
VENV_DOCS ?= .venv-docs
PYTEST_SPREAD ?= -n auto --maxprocesses 4 --dist worksteal
PIP_FLAGS ?= -q --disable-pip-version-check
RUN := $(VENV)/bin/python

.PHONY: bench test test-frameworks check docs lint clean

# The main job: the six ragged-dot classes of MoE layers, checked, against the padded baselines; tables and plots go to bench/out.
bench: $(VENV)/.bench
	$(RUN) bench/run.py

# Triton reads TRITON_INTERPRET when it is imported, so what it interprets has a process of its own
test: $(VENV)/.test
	$(RUN) -m pytest --ignore tests/integrations $(PYTEST_SPREAD) $(PYTEST_FLAGS)
	TRITON_INTERPRET=1 $(RUN) -m pytest -m interpreter tests/backends/triton tests/operands $(PYTEST_SPREAD) $(PYTEST_FLAGS)

# the frameworks have an environment of their own: the core tests must pass without torch and transformers
test-frameworks: $(VENV_FRAMEWORKS)/.test
	$(VENV_FRAMEWORKS)/bin/python -m pytest -m torch tests/test_torch.py tests/integrations tests/examples $(PYTEST_SPREAD) $(PYTEST_FLAGS)
	$(VENV_FRAMEWORKS)/bin/python -m pytest tests/integrations $(PYTEST_SPREAD) $(PYTEST_FLAGS)

lint: $(VENV)/.test
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

check: lint test test-frameworks

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# the extras that fit what this machine has: see tools/extras.py
$(VENV)/.bench: pyproject.toml setup.py | $(VENV)/bin/python
	$(RUN) -m pip install $(PIP_FLAGS) -e ".[$$($(RUN) tools/extras.py bench)]"
	touch $@

$(VENV)/.test: pyproject.toml setup.py | $(VENV)/bin/python
	$(RUN) -m pip install $(PIP_FLAGS) -e ".[$$($(RUN) tools/extras.py test lint)]"
	touch $@

$(VENV_FRAMEWORKS)/.test: pyproject.toml setup.py tests/requirements-frameworks.txt
	$(PYTHON) -m venv $(VENV_FRAMEWORKS)
	$(VENV_FRAMEWORKS)/bin/python -m pip install $(PIP_FLAGS) -r tests/requirements-frameworks.txt -e .
	touch $@

# the documentation site; warnings are errors
docs: $(VENV_DOCS)/.docs
	NO_MKDOCS_2_WARNING=1 $(VENV_DOCS)/bin/python -m mkdocs -q build --strict

$(VENV_DOCS)/.docs: docs/requirements.txt
	$(PYTHON) -m venv $(VENV_DOCS)
	$(VENV_DOCS)/bin/python -m pip install $(PIP_FLAGS) -r docs/requirements.txt
	touch $@

clean:
	rm -rf $(VENV) $(VENV_FRAMEWORKS) $(VENV_DOCS) build bench/out *.egg-info

include tools/check_hipblaslt.mk
