# `make demo` trains a network with routing and two without, `make test` runs all checks. Both create .venv with the
# pinned packages if needed, the demo without those for development.
PYTHON ?= python3
BIN := .venv/bin
KERNELS := $(wildcard torchcaps/ops/native/*.h torchcaps/ops/native/*.cpp)

.PHONY: demo test test-notebooks test-slow test-newest test-oldest test-sanitized arm docs results clean

demo: .venv/.train
	$(BIN)/python examples/demo.py

test: .venv/.done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy & types=$$!; $(BIN)/pytest -n 2 --dist worksteal; tests=$$?; wait $$types && exit $$tests

# Runs the notebooks, and compares their outputs with those that are committed.
test-notebooks: .venv/.done
	$(BIN)/pytest -m notebooks -n 2 --dist worksteal

# Tests that take many minutes, such as whole trainings and compilation with the default backend. PART=3/10 runs a tenth
# of them, which takes a tenth of the time; `pytest -m slow --write-seconds` measures it.
test-slow: .venv/.done
	$(BIN)/pytest -m slow -n 2 --dist worksteal $(if $(PART),--part $(PART))

# The core on the newest versions of PyTorch and the libraries, with networks of torchvision, timm and transformers, and
# on the oldest PyTorch that pyproject.toml allows.
CORE := tests/ops tests/routing tests/nn tests/models tests/test_capsules.py
test-newest: .venv-newest/.done
	.venv-newest/bin/pytest -n 2 --dist worksteal $(CORE)

test-oldest: .venv-oldest/.done
	.venv-oldest/bin/pytest -n 2 --dist worksteal $(CORE)

# Tests of the reductions with C++ kernels compiled for the address and undefined-behavior sanitizers. The build succeeds
# without a library too, so the second command stops there and says why.
SANITIZED := build/sanitized
WITH_SANITIZERS = LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
	ASAN_OPTIONS=detect_leaks=0 PYTHONPATH=$(SANITIZED)/lib $(BIN)
test-sanitized: .venv/.done
	TORCHCAPS_NATIVE_FLAGS="-O1 -g1 -fsanitize=address,undefined -fno-sanitize-recover=all" \
		$(BIN)/python setup.py -q build --build-base $(SANITIZED) --build-lib $(SANITIZED)/lib
	$(WITH_SANITIZERS)/python -P -c 'import sys, torchcaps.ops as ops; sys.exit(ops.backends()["native"])'
	$(WITH_SANITIZERS)/pytest -n 2 --dist worksteal tests/ops tests/routing -k "not Triton and not kernels"

# The kernels as in wheels for ARM, in an emulator, against those of this machine. It needs two packages of Debian or
# Ubuntu: g++-aarch64-linux-gnu and qemu-user. If the kernels do not compile, setup.py says so and goes on, and the
# second compiler finds no library.
ARM := build/arm
ARM_LIBRARY := $(ARM)/torchcaps/ops/native/kernels.so
arm: .venv/.done
	rm -f $(ARM_LIBRARY)
	CC=aarch64-linux-gnu-gcc CXX=aarch64-linux-gnu-g++ _PYTHON_HOST_PLATFORM=linux-aarch64 \
		$(BIN)/python setup.py -q build_ext --build-temp $(ARM) --build-lib $(ARM)
	aarch64-linux-gnu-g++ -std=c++17 -O1 -Wall -o $(ARM)/replay tests/helpers/replay.cpp $(ARM_LIBRARY)
	$(BIN)/python tests/helpers/replay.py \
		qemu-aarch64 -L /usr/aarch64-linux-gnu -E LD_LIBRARY_PATH=$(dir $(ARM_LIBRARY)) $(ARM)/replay

# The site, in build/docs. A warning is an error, such as a link within the site that leads nowhere.
docs: .venv/.done
	$(BIN)/sphinx-build -q -W --keep-going docs build/docs

# Adds the results of `torchcaps reproduce` in $TORCHCAPS_RUNS to results.csv, and updates the tables in docs.
results: .venv/.done
	$(BIN)/python -m torchcaps.reproduce.report docs

# pip downloads while the C++ kernels compile, for the demo those of this processor alone. Python compiles the modules
# that it imports, which are few of all.
ALL_KERNELS := build/kernels
.venv/.train: LIBRARY := torchcaps/ops/native/kernels.so
.venv/.done .venv-newest/.done .venv-oldest/.done: LIBRARY := $(ALL_KERNELS)
.venv/.train: WHAT := --constraint constraints.txt --editable ".[train]"
.venv/.done: WHAT := --constraint constraints.txt --editable ".[dev]"
.venv-newest/.done: WHAT := --editable ".[dev]" --upgrade --upgrade-strategy eager torchvision timm
.venv-oldest/.done: WHAT := --editable ".[dev]" "torch==2.6.*"
.venv/.train .venv/.done .venv-newest/.done .venv-oldest/.done: pyproject.toml constraints.txt setup.py $(KERNELS)
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet "setuptools>=77"
	$(MAKE) --no-print-directory $(LIBRARY) BIN=$(@D)/bin & \
		TORCHCAPS_NATIVE=built $(@D)/bin/pip install --quiet --no-compile $(WHAT) && wait $$!
	touch $@

torchcaps/ops/native/kernels.so: setup.py $(KERNELS)
	TORCHCAPS_NATIVE=here $(BIN)/python setup.py --quiet build_ext --inplace

$(ALL_KERNELS): setup.py $(KERNELS)
	$(BIN)/python setup.py --quiet build_ext --inplace
	touch $@

clean:
	rm -rf .venv .venv-newest .venv-oldest build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
