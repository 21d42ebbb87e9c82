# Every target does its own set-up: a fresh clone needs `make demo` or `make test` and nothing else.
#
## make demo         what the package does, shown on this machine (no GPU needed)
## make test         lint, then every test that is not marked slow
## make lint         ruff, mypy, import contracts
## make format       rewrite the sources in the house style
## make constraints  pin the newest versions anew (writes constraints.txt)
## make clean        remove the environment, caches and build products

.POSIX:
.PHONY: help demo test lint format constraints clean

VENV = .venv
BIN = $(VENV)/bin
READY = $(VENV)/.installed
# For one run: make test PYTEST_ARGS='tests/house -x'
PYTEST_ARGS =
# The release that constraints.txt pins: no build (CPU or CUDA) is named, so that pip may choose.
# The pins are made with the Python that CI uses.
TORCH = 2.13.0

help:
	@sed -n 's/^## //p' Makefile

demo: $(READY)
	@$(BIN)/python -m flash_attn_fp8 demo

# Two workers on two cores: one thread each, or torch's pools fight over them.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal $(PYTEST_ARGS)

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# Made anew only when what it was made from has changed. The probe imports ensurepip because some
# distributions ship a python3 that cannot make an environment. -qq: pip speaks up for errors only.
$(READY): pyproject.toml constraints.txt
	@if ! $(BIN)/python -c 'import pip' 2>/dev/null; then \
	  found=; \
	  for candidate in python3.11 python3.12 python3.10 python3; do \
	    if $$candidate -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; \
	    then found=$$candidate; break; fi; \
	  done; \
	  if [ -z "$$found" ]; then \
	    echo 'No Python 3.10 or newer with venv and ensurepip was found.' >&2; exit 1; \
	  fi; \
	  echo "Making $(VENV) with $$($$found --version)"; \
	  rm -rf $(VENV); $$found -m venv $(VENV); \
	fi
	@echo 'Installing the pinned development environment (the first time: a minute or more)'
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install -qq -c constraints.txt -e '.[dev]'
	@touch $@

constraints:
	rm -rf build/pins && python3.11 -m venv build/pins
	build/pins/bin/python -m pip install --quiet 'torch==$(TORCH)' -e '.[dev]'
	build/pins/bin/python .ci/pins.py > build/pins/constraints.txt
	mv build/pins/constraints.txt constraints.txt && rm -rf build/pins

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
