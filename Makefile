# make demo: train SmolLM2-135M on arithmetic, two ranks. make test: the tests. Both set up .venv by themselves.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check
TORCH := $(shell sed -n 's/^torch==\(.*\)/torch==\1+cpu/p' requirements/cpu.txt)
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
export TOKENIZERS_PARALLELISM := false

.PHONY: setup demo test test-slow test-gpu lint format lock bench clean

setup: $(VENV)/.installed

$(VENV)/.installed: requirements/cpu.txt setup.py
	$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if v == (3, 11) else f"Python 3.11 is needed, this is {v[0]}.{v[1]}: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --no-deps $(TORCH) || $(PIP) install --no-deps --index-url $(TORCH_CPU_INDEX) $(TORCH)
	$(PIP) install --no-deps -r requirements/cpu.txt
	$(PIP) install --no-deps --no-build-isolation -e .
	touch $@

demo: setup
	PATH=$(abspath $(BIN)):$$PATH bash examples/grpo_arithmetic.sh

test: setup
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile -m "not slow"

test-slow: setup
	OMP_NUM_THREADS=1 $(BIN)/pytest -m slow

test-gpu: # with the python of this shell, into which requirements.txt and .[dev] are installed
	python -m pytest -v -m gpu tests/test_gpu.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lock: setup
	$(BIN)/python requirements/lock.py

bench: setup
	$(BIN)/python bench/step_time.py

clean:
	rm -rf $(VENV) build *.egg-info
