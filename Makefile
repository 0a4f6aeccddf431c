# `make train` and `make test` need Python 3.10 or newer and, for the fast CPU path, a C++17 compiler.
# `make test-gpu VENV=` uses the python3 at hand, with what is installed there, and installs nothing.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
export PIP_DISABLE_PIP_VERSION_CHECK = 1

ifeq ($(strip $(VENV)),)
PY := $(PYTHON)
READY := extension
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
else
PY := $(VENV)/bin/python
READY := $(VENV)/.installed
endif

# two processes of one thread each are faster than one of two on these small shapes; those who are done take
# tests from the others, since neighbours compile the same kernels and are slow together
PYTEST = OMP_NUM_THREADS=1 $(PY) -m pytest -q -n $(WORKERS) --dist worksteal
WORKERS ?= auto

.PHONY: install extension train test test-gpu lint bench

install: $(READY)

$(VENV)/.installed: pyproject.toml setup.py constraints.txt $(wildcard csrc/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q -e '.[train,bench,dev]' -c constraints.txt
	touch $@

extension:
	$(PY) setup.py -q build_ext --inplace

train: $(READY)
	$(PY) -m moe_aiter.cli train $(ARGS)

# 5: ARGS has chosen no test that the interpreter runs
test: $(READY)
	@status=0; \
	echo "The kernels under Triton's interpreter:"; TRITON_INTERPRET=1 $(PYTEST) -m interpret $(ARGS) || $(if $(ARGS),[ $$? -eq 5 ] ||) status=1; \
	echo "Everything, with C++ and torch:"; $(PYTEST) $(ARGS) || status=1; \
	exit $$status

# what needs a GPU; `make test` runs the rest
test-gpu: $(READY)
	$(PYTEST) -m gpu $(ARGS)

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

bench: $(READY)
	$(PY) -m moe_aiter.cli bench layer --out benchmarks/results/layer.csv $(ARGS)
	$(PY) -m moe_aiter.cli bench report
