# `make train` and `make test` need Python 3.10 or newer and, for the fast CPU path, a C++17 compiler.
# `make test-gpu VENV=` uses the python3 at hand, with what is installed there, and installs nothing.
# `make install CPU=1` takes PyTorch's build without CUDA, where pip's own index would bring the one with CUDA.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
export PIP_DISABLE_PIP_VERSION_CHECK = 1
CPU ?=
TORCH_INDEX = $(if $(CPU),--index-url https://download.pytorch.org/whl/cpu)

ifeq ($(strip $(VENV)),)
PY := $(PYTHON)
READY := extension
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
else
PY := $(VENV)/bin/python
READY := $(VENV)/.installed
endif

# two processes of one thread each are faster than one of two on these small shapes; those who are done take
# tests from the others, since neighbours compile the same kernels and are slow together; without files of bytecode,
# every process would compile all modules and tests anew
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(PY) -m pytest -q -rs -n $(WORKERS) --dist worksteal
WORKERS ?= auto

.PHONY: install lock extension train test test-quick test-full test-gpu test-versions fuzz scan-gpu scan-invariance lint docs dist hub bench sanitize sanitize-threads sanitize-gpu

install: $(READY)

# torch has builds for the CPU, CUDA and ROCm under one version, so the lock file has no hash for torch
$(VENV)/.installed: pyproject.toml setup.py constraints.txt requirements.lock $(wildcard csrc/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: make PYTHON=...")'
	@echo "Installing into $(VENV): some minutes, and 2 GB on disk with PyTorch for CPUs; with CUDA's libraries several times as much."
	@$(CXX) --version > /dev/null 2>&1 || echo "There is no C++ compiler ($(CXX)): on CPUs moe_aiter will run in plain torch, which is slower."
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --no-deps --require-hashes -r requirements.lock
	$(PY) -m pip install $(TORCH_INDEX) -c constraints.txt torch
	$(PY) -m pip install -q --no-deps --no-build-isolation --config-settings editable_mode=compat -e .
	touch $@
	@echo "Installed. In each new shell: source $(VENV)/bin/activate"

# renews requirements.lock after a change of pyproject.toml or constraints.txt; torch's CUDA packages stay out
lock:
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/python -m pip install -q uv
	.venv-lock/bin/uv pip compile -q --universal --python-version 3.10 --generate-hashes --no-header --no-annotate \
		-c constraints.txt --extra train --extra bench --extra dev pyproject.toml -o .venv-lock/all.txt > /dev/null
	awk '/^[a-z]/ {keep = !/^(torch==|nvidia-|cuda-)/} keep' .venv-lock/all.txt > requirements.lock
	rm -r .venv-lock

extension:
	$(PY) setup.py -q build_ext --inplace

# `make train NPROC=4` divides each batch among four processes: on GPUs, each has one; on CPUs, each has its share of them.
# Without --, torchrun would take --log for a flag of its own.
NPROC ?=
TORCHRUN = torch.distributed.run --standalone --nproc-per-node $(NPROC) -m --
train: $(READY)
	$(PY) -m $(strip $(if $(filter-out 1,$(NPROC)),$(TORCHRUN)) moe_aiter.cli) train $(ARGS)

# 5: ARGS has chosen no test that the interpreter runs
LESS = $(if $(FULL),, and not full)
test: $(READY)
	@status=0; \
	echo "The kernels under Triton's interpreter:"; TRITON_INTERPRET=1 $(PYTEST) -m "interpret$(LESS)" $(ARGS) || $(if $(ARGS),[ $$? -eq 5 ] ||) status=1; \
	echo "Everything, with C++ and torch:"; $(PYTEST) -m "not gpu$(LESS)" $(ARGS) || status=1; \
	exit $$status

# one case of each test, but for the example's and those that start many processes, compile kernels or run the docs' blocks
NOT_QUICK = $(wildcard examples/language_model/tests/test_*.py) $(addprefix tests/,test_compile.py test_compile_ones.py \
	test_loads.py test_readme.py test_torch_ops.py upstream fuzz distributed benchmarks/test_parallel.py layers/test_fsdp.py \
	$(addprefix integrations/test_,examples.py transformers_parallel.py torchtitan_parallel.py))
test-quick: $(READY)
	$(PYTEST) --cases one -m "not full and not ranks" $(addprefix --ignore=,$(NOT_QUICK)) $(ARGS)

# every combination of parameters, where `make test` takes each pair of values, every case that is only compiled, and the tests
# that are marked `full`
test-full:
	$(MAKE) test FULL=1 ARGS="--cases all $(ARGS)"

# what needs a GPU; `make test` runs the rest
test-gpu: $(READY)
	@$(PY) -c 'import torch; raise SystemExit(None if torch.cuda.is_available() else "make test-gpu: torch finds no GPU")'
	$(PYTEST) -m gpu $(ARGS)

# what depends on the versions of torch and Triton: `make test-versions VENV= PYTHON=/path/python`
CORE = $(addprefix tests/test_,private_api.py backend.py metadata.py ops.py overlap.py derived.py switches.py threads.py export.py) \
	tests/kernels/base/test_launches.py tests/kernels/base/test_bind.py tests/distributed tests/test_optim.py \
	$(addprefix tests/layers/test_,moe.py moe_in_training.py moe_losses.py moe_latent.py moe_zero_compute.py \
	capacity.py experts.py replay.py loss_scale.py pass_on.py fuse.py linear.py quantized.py)
test-versions: $(READY)
	$(PYTEST) $(CORE) $(ARGS)

# random cases against plain loops, without end unless SECONDS or ARGS="--cases 1000" says so; CASE=gmm:17 repeats one
fuzz: $(READY)
	OMP_NUM_THREADS=1 MOE_AITER_DEBUG=1 $(PY) -m tests.fuzz.run $(if $(CASE),--case $(CASE)) $(if $(SECONDS),--seconds $(SECONDS)) $(ARGS)

# 20,000 random small shapes on a GPU, in many processes; ARGS="--first N" runs the same shapes again, or goes on at one
scan-gpu: $(READY)
	OMP_NUM_THREADS=1 $(PY) -m tests.fuzz.scan $(ARGS)

# random tokens in two batches, with the same bits in both: 1,000 cases on a GPU, 2,000 on a CPU; ARGS="--first N" as above
scan-invariance: $(READY)
	OMP_NUM_THREADS=1 $(PY) -m tests.fuzz.batches $(ARGS)

# The C++ extension under ASan and UBSan, in a copy of the package, by the tests of the ops that it computes; then the loops
# under ThreadSanitizer. Python does not free all of its memory, so leaks are not looked for.
SANITIZED = $(CURDIR)/build/sanitize
HOST_TESTS = $(addprefix tests/kernels/,base/test_host.py $(addprefix rows/test_,sort.py topk.py permute.py) \
	$(addprefix experts/test_,glu.py expert_loop.py))
sanitize: $(READY) sanitize-threads
	rm -rf $(SANITIZED) && mkdir -p $(SANITIZED) && cp -r moe_aiter $(SANITIZED)/ && rm -f $(SANITIZED)/moe_aiter/_host*
	$(CXX) -std=c++17 -O1 -g1 -fPIC -shared -fvisibility=hidden -fsanitize=address,undefined -fno-sanitize-recover=all \
	$$($(PY) -c "import pybind11, sysconfig; print('-I' + pybind11.get_include(), '-I' + sysconfig.get_path('include'))") \
	csrc/host.cpp -o $(SANITIZED)/moe_aiter/_host$$($(PY) -c "import sysconfig; print(sysconfig.get_config_var('EXT_SUFFIX'))")
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 OMP_NUM_THREADS=2 PYTHONPATH=$(SANITIZED) \
	$(PY) -m pytest -q -o pythonpath="$(SANITIZED) tests" -k "not without_the_extension and not the_build_goes_on" \
	$(HOST_TESTS) $(ARGS)

# the loops of csrc/ under ThreadSanitizer, without Python
sanitize-threads:
	mkdir -p build
	$(CXX) -std=c++17 -O1 -g -fsanitize=thread -rdynamic tests/sanitize/races.cpp -o build/races -pthread -ldl
	build/races

# One case of each kernel's tests under compute-sanitizer, on a GPU, 20 tests a process; SANITIZE chooses other tests and TOOL
# another tool. Without torch's cache an access past the end of a tensor is seen, but nothing can be captured in a graph and no
# memory is counted. racecheck reports barriers of warp-specialised kernels, cuBLAS's too, and initcheck what TMA wrote
# (benchmarks/NOTES-gpu-diary.md).
SANITIZE ?= tests/kernels
TOOL ?= memcheck
SANITIZED_TESTS = $(PY) -m pytest -q -p no:xdist -m gpu --cases one $(ARGS)
sanitize-gpu: export PYTORCH_NO_CUDA_MEMORY_CACHING = 1
sanitize-gpu: export OMP_NUM_THREADS = 1
sanitize-gpu: $(READY)
	$(SANITIZED_TESTS) --collect-only -k "not graph and not captur and not memory_on_a_gpu" $(SANITIZE) | grep :: | \
	xargs -d '\n' -n 20 -P $(subst auto,8,$(WORKERS)) compute-sanitizer --error-exitcode 9 --target-processes all \
	--tool $(TOOL) $(SANITIZED_TESTS)

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

# the documentation in site/, from an environment of its own: mkdocstrings reads the sources and imports nothing; a warning or
# a broken link is an error
docs: build/docs/.installed
	NO_MKDOCS_2_WARNING=1 PATH="build/docs/bin:$$PATH" build/docs/bin/mkdocs build --strict

build/docs/.installed: pyproject.toml
	$(PYTHON) -m venv build/docs
	build/docs/bin/python -m pip install -q $$(sed -n 's/^docs = \[\(.*\)\].*/\1/p' pyproject.toml | tr -d '",')
	touch $@

# an sdist in dist/ and, from it, a wheel for this platform, both checked; then the wheel alone in a new environment, where no
# compiler is found, runs the README's Python block
BARE = build/bare/bin/python
dist: export PYTHONPATH =
dist:
	rm -rf dist build/dist build/bare
	$(PYTHON) -m venv build/dist && build/dist/bin/python -m pip install -q build twine
	build/dist/bin/python -m build -q
	build/dist/bin/python -m twine check --strict dist/*
	$(PYTHON) -m venv build/bare
	$(BARE) -m pip install --no-deps $(TORCH_INDEX) -c constraints.txt torch  # that index lacks versions of other packages
	CC=false CXX=false $(BARE) -m pip install -q -c constraints.txt dist/*.whl
	sed -n '/^```python/,/^```$$/p' README.md | grep -v '^```' > build/readme.py
	cd build && time bare/bin/python readme.py

# the package in the form of Hugging Face's kernel hub: docs/releases.md says how to publish it
hub:
	$(PYTHON) hub.py build/hub

bench: $(READY)
	$(PY) -m moe_aiter.cli bench layer --out benchmarks/results/layer.csv $(ARGS)
	$(PY) -m benchmarks report
