# `make demo` and `make test` need Python 3.11 or later and nothing else: they install into .venv.
PYTHON ?= python3
VENV ?= .venv
# Pinned and installed first, so that nothing after it replaces it. PIP_EXTRA_INDEX_URL chooses a CPU build where the default is none.
TORCH ?= torch==2.13.0
JOBS ?= 2
READY = $(VENV)/.ready
BIN = $(VENV)/bin

.PHONY: demo test lint clean

demo: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --longca-preset=smoke -n $(JOBS) -q

# Bytecode is written even where PYTHONDONTWRITEBYTECODE is set: else each of the hundreds of processes that tests start compiles all
# of the plugin, and rewrites every assertion of it and of Hypothesis, again.
test: $(READY)
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist *.egg-info

$(READY): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "pytest-longca needs Python 3.11 or later: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(TORCH)
	$(BIN)/pip install --quiet --editable '.[triton,gpu,report,test,dev]'
	touch $@
