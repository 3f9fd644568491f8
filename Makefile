# Two commands: `make demo` and `make test`. Both make .venv with the pinned packages if it is not there.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-slow results clean

demo: .venv/.done
	$(BIN)/torchcaps train quickstart
	$(BIN)/torchcaps explain quickstart --ckpt_path last

test: .venv/.done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -n 2 --dist worksteal

# Minutes more: a whole training run, compilation with the default backend.
test-slow: .venv/.done
	$(BIN)/pytest -m slow

# docs/results.md with what a queue (torchcaps reproduce, in $TORCHCAPS_RUNS) has finished.
results: .venv/.done
	$(BIN)/python -m torchcaps.reproduce.report docs

.venv/.done: pyproject.toml constraints.txt setup.py $(wildcard torchcaps/ops/native/*.h torchcaps/ops/native/*.cpp)
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
