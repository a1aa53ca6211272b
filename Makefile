# The commands of this project; `make help` lists them. All a fresh machine needs is make and a Python 3.10 or later
# with venv. Everything is installed into .venv; a file in .venv/.done says what is already there, so nothing is done twice,
# and a change of pyproject.toml or constraints.txt installs again.

# The interpreter that .venv is made from; by default the first of these that will do.
PYTHON ?= python3 python3.14 python3.13 python3.12 python3.11 python3.10 python
# Passed on to the demo, pytest or the benchmark: make demo ARGS="--steps 20", make test ARGS="-k scaler".
ARGS ?=
# Test processes; a two-process gloo test counts as one of them.
WORKERS ?= 2

VENV := .venv
BIN := $(VENV)/bin
DONE := $(VENV)/.done
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-input --constraint constraints.txt
# No build isolation: the few packages that are built here (this one, DeepSpeed) use the pinned setuptools and the torch
# that are already in .venv, instead of fetching their own.
INSTALL := $(PIP) --no-build-isolation --editable
# DeepSpeed compiles small extensions on first use. Kept with the environment they belong to.
EXTENSIONS := $(CURDIR)/$(VENV)/torch_extensions
# The second environment, of test-oldest.
OLDEST := .venv-oldest
OLDEST_PIP := $(OLDEST)/bin/python -m pip install -qq --disable-pip-version-check --no-input \
    --constraint constraints-oldest.txt
# The third environment, of test-newest. Without constraints (NEWEST_CONSTRAINTS=) it has the newest releases there are.
NEWEST := .venv-newest
NEWEST_CONSTRAINTS ?= --constraint constraints-newest.txt
NEWEST_PIP := $(NEWEST)/bin/python -m pip install -qq --disable-pip-version-check --no-input $(NEWEST_CONSTRAINTS)
NEWEST_EXTENSIONS := $(CURDIR)/$(NEWEST)/torch_extensions
# The fourth environment, of works-with: the last packages exclude releases that are here, and run with them.
WORKS := .venv-works-with
WORKS_PIP := $(WORKS)/bin/python -m pip install -qq --disable-pip-version-check --no-input \
    --constraint constraints.txt
WORKS_WITH := bitsandbytes chemprop darts gluonts lightly lightly-train monai neuralforecast pytorch-forecasting \
    'scvi-tools>=1.4' timm torchgeo FrEIA imagecodecs platformdirs scikit-base scikit-image tifffile \
    ase pymatgen-core torch-geometric torchdata
OLDEST_EXTENSIONS := $(CURDIR)/$(OLDEST)/torch_extensions
# A build that was killed leaves a lock on which every later one would wait.
PYTEST = mkdir -p "$(EXTENSIONS)" && find "$(EXTENSIONS)" -name lock -delete && \
    OMP_NUM_THREADS=1 TORCH_EXTENSIONS_DIR="$(EXTENSIONS)" \
    $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal
LINTED := $(wildcard lightning_mp tests benchmarks examples docs/_build)

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test test-slow test-whole test-oldest test-newest works-with conformance docs lint format bench clean

help: ## list the commands
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1@\2/p' $(MAKEFILE_LIST) | while IFS=@ read -r command text; do \
	    printf '%-18s %s\n' "$$command" "$$text"; done

demo: $(DONE)/demo ## train a small GPT-2 on real text under every plan this machine has, and compare them
	@$(BIN)/lightning-mp demo $(ARGS)

test: $(DONE)/test ## run the tests (those that need a GPU skip themselves where there is none)
	@$(PYTEST) -m 'not slow' $(ARGS)

test-slow: $(DONE)/test ## run the rest: launches, checkpoints across strategies, monitors on every distributed host
	@$(PYTEST) -m 'slow and not whole' $(ARGS)

test-whole: $(DONE)/test ## run what those leave to the night: every cell of the tables, and the longest runs (two hours)
	@$(PYTEST) -m whole $(ARGS)

test-oldest: $(OLDEST)/.done ## train, skip, save and resume under every strategy, on the oldest releases that pyproject.toml allows
	@mkdir -p "$(OLDEST_EXTENSIONS)" && find "$(OLDEST_EXTENSIONS)" -name lock -delete
	@OMP_NUM_THREADS=1 TORCH_EXTENSIONS_DIR="$(OLDEST_EXTENSIONS)" \
	    $(OLDEST)/bin/python -m pytest --numprocesses $(WORKERS) --dist worksteal \
	    tests/conformance/test_conformance_gloo.py tests/compat $(ARGS)

test-newest: $(NEWEST)/.done ## train under every strategy, on a CUDA device of nothing and compiled, on the newest releases of torch and transformers
	@mkdir -p "$(NEWEST_EXTENSIONS)" && find "$(NEWEST_EXTENSIONS)" -name lock -delete
	@OMP_NUM_THREADS=1 TORCH_EXTENSIONS_DIR="$(NEWEST_EXTENSIONS)" \
	    $(NEWEST)/bin/python -m pytest --numprocesses $(WORKERS) --dist worksteal -m 'not whole' \
	    tests/compat tests/conformance tests/cuda_path/test_capabilities.py tests/cuda_path/test_launches.py \
	    tests/numerics/test_loss_scale.py $(ARGS)

works-with: $(WORKS)/.done ## train with the packages built on Lightning, and write docs/reference/works-with.md (20 minutes)
	@OMP_NUM_THREADS=1 $(WORKS)/bin/python -m benchmarks.works_with $(ARGS)

conformance: $(DONE)/test ## run every mode under every strategy and write docs/conformance.txt and its summary (about two hours)
	@mkdir -p "$(EXTENSIONS)" && find "$(EXTENSIONS)" -name lock -delete
	@PYTHONPATH=.:tests OMP_NUM_THREADS=1 TORCH_EXTENSIONS_DIR="$(EXTENSIONS)" $(BIN)/python -m conformance $(ARGS)

docs: $(DONE)/dev ## build the documentation into site/, every warning an error (then open site/index.html)
	@NO_MKDOCS_2_WARNING=true $(BIN)/mkdocs build --strict $(ARGS)

lint: $(DONE)/dev ## check style (ruff), types (pyright, strict on the package) and floors (import-linter)
	@$(BIN)/ruff check $(LINTED)
	@$(BIN)/ruff format --check $(LINTED)
	@$(BIN)/pyright --project pyproject.toml
	@$(BIN)/lint-imports --no-cache

format: $(DONE)/dev ## write the style that `make lint` asks for
	@$(BIN)/ruff check --fix $(LINTED)
	@$(BIN)/ruff format $(LINTED)

bench: $(DONE)/test ## measure step times and device syncs: of a plan, of the monitors, and of every strategy
	@TORCH_EXTENSIONS_DIR="$(EXTENSIONS)" $(BIN)/python -m benchmarks.run $(ARGS)
	@TORCH_EXTENSIONS_DIR="$(EXTENSIONS)" $(BIN)/python -m benchmarks.counts

clean: ## remove .venv, caches and build output
	rm -rf $(VENV) $(OLDEST) $(NEWEST) $(WORKS) build dist site *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find $(LINTED) -name __pycache__ -type d -prune -exec rm -rf {} +

# --- installing ------------------------------------------------------------------------------------------------------

$(DONE)/venv:
	@found=; for candidate in $(PYTHON); do \
	    if $$candidate -c 'import sys; sys.exit(sys.version_info[:2] < (3, 10))' 2>/dev/null; \
	    then found=$$candidate; break; fi; done; \
	if [ -z "$$found" ]; then \
	    echo 'lightning_mp needs Python 3.10 or later; tried, and none will do:' >&2; \
	    for candidate in $(PYTHON); do echo "  $$candidate: $$($$candidate --version 2>&1 | head -n 1)" >&2; done; \
	    echo 'Install one, or name it: make demo PYTHON=/path/to/python3.12' >&2; exit 1; fi; \
	echo "making $(VENV) with $$($$found --version)"; \
	$$found -m venv $(VENV)
	@mkdir -p $(@D) && touch $@

# torch first and alone: the rest then finds it in place, and DeepSpeed needs it to be built.
$(DONE)/torch: constraints.txt $(DONE)/venv
	@echo 'installing torch (first time only, about 1 minute, longer where its download is large)'
	@$(PIP) pip setuptools wheel
	@$(PIP) torch
	@touch $@

$(DONE)/demo: pyproject.toml $(DONE)/torch
	@echo 'installing lightning_mp and what the demo needs (first time only, about 1 minute)'
	@$(INSTALL) '.[hf]'
	@touch $@

# DS_ACCELERATOR=cpu: DeepSpeed's setup would otherwise refuse a machine that has a GPU but no CUDA compiler. It builds
# nothing at this point, and at run time it looks for the device again.
$(DONE)/test: pyproject.toml $(DONE)/torch
	@echo 'installing what the tests need (first time only, about 2 minutes)'
	@DS_ACCELERATOR=cpu $(INSTALL) '.[test]'
	@touch $(DONE)/demo $@

$(DONE)/dev: pyproject.toml $(DONE)/torch
	@echo 'installing the development tools (first time only, about 2 minutes)'
	@DS_ACCELERATOR=cpu $(INSTALL) '.[dev]'
	@touch $(DONE)/demo $(DONE)/test $@

# The interpreter of .venv. No build isolation, as above: DeepSpeed is built from source with the torch that is there.
$(OLDEST)/.done: pyproject.toml constraints-oldest.txt $(DONE)/venv
	@echo 'making $(OLDEST) (first time only, about 2 minutes)'
	@$(BIN)/python -m venv --clear $(OLDEST)
	@$(OLDEST_PIP) pip setuptools wheel
	@$(OLDEST_PIP) torch numpy
	@DS_ACCELERATOR=cpu $(OLDEST_PIP) --no-build-isolation --editable '.[hf,deepspeed,hydra,cli]' \
	    packaging pytest pytest-timeout pytest-xdist
	@touch $@

# The newest torch is a CUDA build, which runs on a CPU too.
$(NEWEST)/.done: pyproject.toml constraints-newest.txt $(DONE)/venv
	@echo 'making $(NEWEST) (first time only, about 3 minutes, 6 GB)'
	@$(BIN)/python -m venv --clear $(NEWEST)
	@$(NEWEST_PIP) pip setuptools wheel
	@$(NEWEST_PIP) torch numpy
	@DS_ACCELERATOR=cpu $(NEWEST_PIP) --no-build-isolation --editable '.[hf,deepspeed,hydra,cli,fp8]' \
	    hypothesis packaging pytest pytest-timeout pytest-xdist
	@touch $@

$(WORKS)/.done: pyproject.toml constraints.txt $(DONE)/venv
	@echo 'making $(WORKS) (first time only, about 10 minutes, 4 GB)'
	@$(BIN)/python -m venv --clear $(WORKS)
	@$(WORKS_PIP) pip setuptools wheel
	@$(WORKS_PIP) torch
	@$(WORKS_PIP) --no-build-isolation --editable '.[hf]' $(WORKS_WITH)
	@$(WORKS_PIP) --no-deps anomalib matgl pytorch-tabular
	@touch $@
