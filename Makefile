# Two commands: `make demo` shows what this is, `make test` checks everything.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help venv demo test mutations levels fuzz heap lint types format docs plans clean

# The first interpreter that is new enough and can make environments; or say `make PYTHON=...`.
CANDIDATES := python3 python3.14 python3.13 python3.12 python3.11
USABLE := import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(firstword $(foreach p,$(CANDIDATES),$(shell $(p) -c '$(USABLE)' 2>/dev/null && echo $(p))))

BIN := .venv/bin
# What pip would compile in one process is compiled in as many as there are cores, afterwards.
PIP := $(BIN)/python -m pip install --no-compile --quiet --disable-pip-version-check -c constraints.txt
STAMP := .venv/.installed
# What `make test` leaves out: what runs every night, and tests that need a GPU.
MARKERS ?= not slow and not gpu
CHOSEN := $(if $(MARKERS),($(MARKERS)) and )
JOBS ?= 2
# Tests on the emulated device wait for its delays: one more of them than there are cores.
EMULATED_JOBS ?= 3
# One of so many parts of the tests: 2/4 is the second of four.
SHARD ?= 1/1
# What is installed; the tests of torchao's optimizers need `torchao`, too.
EXTRAS ?= hf,dev
# Threads of PyTorch in each of the jobs.
THREADS ?= 1
FUZZ_SECONDS ?= 300
FUZZ_SEED ?= 0
ZOO := $(addprefix tests/,models/test_hostile_models.py models/test_zoo.py \
	runtime/test_training_adapters.py)

help: ## say what there is
	@grep -E '^[a-z]+:.*## ' Makefile | sed -E 's/^([a-z]+):.*## /  make \1|/' | column -t -s '|'

venv: $(STAMP) ## make .venv with everything pinned in constraints.txt

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer found; say make PYTHON=..." >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing into .venv (the first time takes minutes: PyTorch is large)"
	@$(PIP) torch==2.13.0 hatchling
	@$(PIP) --no-build-isolation -e '.[$(EXTRAS)]'
	@$(BIN)/python -m compileall -qq -j 0 .venv/lib || true
	@touch $@

demo: $(STAMP) ## train under a hard memory limit: a small model, and one larger than the limit
	@$(BIN)/python examples/demo.py
	@$(BIN)/python examples/large_model.py

# Types are checked while tests run: what is wrong with them is said last. Two sessions, so that what
# is asked of a CPU is asked of a process that knows no accelerator, as those of most users. What the
# first one compiles the second one and the commands in between find, also where that is switched off.
test: lint ## lint, check types, run the tests (all of them: make test MARKERS=)
	@mkdir -p .mypy_cache
	@$(BIN)/mypy --no-error-summary > .mypy_cache/said 2>&1 & types=$$!; failed=0; \
	export OMP_NUM_THREADS=$(THREADS) PYTHONDONTWRITEBYTECODE=; \
	$(BIN)/pytest -q -n $(JOBS) --shard $(SHARD) -m "$(CHOSEN)not emulated" || failed=1; \
	$(BIN)/pytest -q -n $(EMULATED_JOBS) --shard $(SHARD) -m "$(CHOSEN)emulated" || test $$? -eq 5 || failed=1; \
	wait $$types || { cat .mypy_cache/said; failed=1; }; exit $$failed

mutations: $(STAMP) ## apply known mutations one by one: is each killed by the test that it names?
	@OMP_NUM_THREADS=$(THREADS) $(BIN)/python -m tests.support.mutations

levels: $(STAMP) ## run the tests of bytes and peaks at each level of the processor's instructions
	@$(BIN)/python -m tests.support.levels

fuzz: $(STAMP) ## judge random modules for FUZZ_SECONDS, from number FUZZ_SEED on
	@$(BIN)/python -m tests.support.fuzzing --seconds $(FUZZ_SECONDS) --seed $(FUZZ_SEED)

heap: $(STAMP) ## run the tests of the zoo under an allocator that finds stray writes
	@gcc -O2 -shared -fPIC -o .venv/heap_guard.so tests/support/heap_guard.c
	@PYTHONMALLOC=malloc LD_PRELOAD=$(abspath .venv/heap_guard.so) $(BIN)/python -m pytest -q -n 0 \
		-o timeout=0 -m "not gpu and not emulated" $(ZOO)

lint: $(STAMP) ## check style, format, and how docstrings begin
	@$(BIN)/ruff check --quiet
	@$(BIN)/ruff format --check --quiet
	@$(BIN)/python -m tests.support.english

types: $(STAMP) ## check types
	@$(BIN)/mypy --no-error-summary

format: $(STAMP) ## mend style and format where that is safe
	@$(BIN)/ruff check --quiet --fix
	@$(BIN)/ruff format --quiet

docs: $(STAMP) ## build the documentation into site/
	@test -x $(BIN)/mkdocs || $(PIP) --no-build-isolation -e '.[docs]'
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

plans: $(STAMP) ## make the committed plans of the catalogue's machines anew
	@$(BIN)/python plans/make.py

clean: ## remove what was made here, .venv too
	@rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis dist build site
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
