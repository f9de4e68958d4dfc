# memkv: `make demo` and `make test` do everything on a fresh machine. Re-running is quick: each step leaves a
# stamp in .venv and runs again only when what it was made from has changed.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
TORCH := 2.13.0
MODELS := smollm2-135m-instruct all-minilm-l6-v2

# The first Python that is new enough. Another one: make demo PYTHON=/path/to/python3
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	command -v $$p >/dev/null 2>&1 && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& { echo $$p; break; }; done)

# Which torch and which faiss: gpu where an NVIDIA GPU answers, cpu otherwise. Force one: make demo HARDWARE=cpu
HARDWARE ?= $(shell nvidia-smi -L 2>/dev/null | grep -q GPU && echo gpu || echo cpu)

# The extension is rebuilt when one of these changes; the editable install is renewed when a module comes or goes.
CSRC := $(shell find csrc -type f 2>/dev/null)
MODULES := build/modules.txt

.PHONY: help
help: ## what can be made
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 18

.PHONY: demo
demo: install models ## install, ingest the bundled handbook, ask three questions with and without reuse
	$(BIN)/memkv demo

.PHONY: test
test: install models lint ## install, lint, then every test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses=2 --dist=loadfile

.PHONY: faults
faults: install ## install, then the fault campaign (hours); figures that have a result are skipped
	OMP_NUM_THREADS=1 $(BIN)/python tests/faults/campaign.py

.PHONY: coverage
coverage: install ## install, then the store's tests: every branch of the store and of the fingerprint is to be taken
	OMP_NUM_THREADS=1 $(BIN)/python -m coverage run --branch --data-file=build/coverage \
		--include='memkv/store/*,memkv/kv/fingerprint.py' -m pytest tests/store tests/kv
	$(BIN)/python -m coverage report --data-file=build/coverage --show-missing --skip-covered --fail-under=100

.PHONY: bench
bench: install models ## install, then TTFT with and without reuse, bandwidths and tokens per second
	$(BIN)/memkv bench compare

.PHONY: install
install: $(VENV)/.installed ## virtual environment, the right torch, dependencies, compiled kernels

.PHONY: models
models: $(VENV)/.installed ## the default language model and embedder (180 MB, once per machine)
	@$(BIN)/memkv --quiet models install $(MODELS)

# mypy and import-linter see api/ at memkv/api and migrations/ at memkv/migrations, where they are installed.
TREE := build/tree

.PHONY: lint
lint: $(VENV)/.installed ## ruff, mypy --strict and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf $(TREE)
	mkdir -p $(TREE)
	cp -R memkv $(TREE)/memkv
	cp -R api $(TREE)/memkv/api
	cp -R migrations $(TREE)/memkv/migrations
	cd $(TREE) && MYPYPATH=. $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml \
		--cache-dir $(CURDIR)/.mypy_cache --python-executable $(CURDIR)/$(BIN)/python
	$(BIN)/python tests/docs/lint_imports.py $(TREE)

.PHONY: clean
clean: ## remove what was built and installed here (models and data stay)
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: check-machine
check-machine:
	@if [ -z "$(PYTHON)" ]; then \
		echo "error: no Python 3.11 or newer was found" >&2; \
		echo "hint: install one (Debian: apt install python3), or name it: make demo PYTHON=/path/to/python3" >&2; \
		exit 1; fi
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "error: $(PYTHON) is older than Python 3.11" >&2; \
		echo "hint: name a newer one: make demo PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "error: $(PYTHON) cannot make virtual environments" >&2; \
		echo "hint: install its venv module (Debian: apt install python3-venv)" >&2; exit 1; }
	@command -v c++ >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null || { \
		echo "error: no C++ compiler was found; memkv's kernels are compiled once" >&2; \
		echo "hint: install one (Debian: apt install g++)" >&2; exit 1; }
	@$(PYTHON) -c 'import os, sys, sysconfig; \
		sys.exit(not os.path.isfile(os.path.join(sysconfig.get_path("include"), "Python.h")))' || { \
		echo "error: $(PYTHON) has no headers (Python.h)" >&2; \
		echo "hint: install them (Debian: apt install python3-dev)" >&2; exit 1; }

$(VENV)/.made:
	@$(MAKE) --no-print-directory check-machine
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	@touch $@

# CPU: the "+cpu" wheel from whatever index pip is configured with; where that has none, uv knows where the CPU
# wheels are; where that cannot be reached either, the ordinary wheel, which carries CUDA libraries unused.
$(VENV)/.torch-$(HARDWARE): $(VENV)/.made
	@set -e; pip="$(BIN)/python -m pip --disable-pip-version-check"; \
	if [ "$(HARDWARE)" = gpu ] || [ "$$(uname -s)" = Darwin ]; then \
		echo "installing torch $(TORCH)"; $$pip install "torch==$(TORCH)"; \
	else \
		echo "installing torch $(TORCH) for CPUs"; \
		$$pip install --quiet "torch==$(TORCH)+cpu" 2>/dev/null \
		|| { $$pip install --quiet uv && $(BIN)/uv pip install --python $(BIN)/python \
			--torch-backend=cpu "torch==$(TORCH)"; } \
		|| $$pip install "torch==$(TORCH)"; \
	fi
	@touch $@

$(VENV)/.installed: $(VENV)/.torch-$(HARDWARE) pyproject.toml $(CSRC) $(MODULES)
	@echo "installing memkv and its dependencies"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		"scikit-build-core>=1.1" "nanobind>=3.1" "cmake>=3.26" "ninja>=1.11"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation \
		--editable ".[$(HARDWARE),postgres,dev]"
	@# An editable install also puts the checkout on the path, where api/ and migrations/ would answer to bare names.
	@pth=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/_editable_skbc_memkv.pth; \
		grep '^import ' "$$pth" > "$$pth.new"; mv "$$pth.new" "$$pth"
	@touch $@

$(MODULES): FORCE
	@mkdir -p $(@D)
	@find memkv api migrations -name '*.py' -o -name '*.md' | sort > $@.new
	@if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; fi

.PHONY: FORCE
FORCE:
