# Everything a developer does here. `make help` lists it; CONTRIBUTING.md explains it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test test-slow test-gpu lint format-check format typecheck docs dist bench scores released commit-checks clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: $(STAMP) ## make .venv with the pinned versions (again only after a change of pyproject.toml or constraints.txt)
	@echo "$(VENV) is ready"

$(STAMP): pyproject.toml constraints.txt
	@command -v "$(PYTHON)" >/dev/null || { \
		echo "error: no interpreter '$(PYTHON)'; name one with: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "error: paceenv needs Python 3.11 or newer, but '$(PYTHON)' is $$("$(PYTHON)" -c 'import platform; print(platform.python_version())'); name another with: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { \
		echo "creating $(VENV) with $$("$(PYTHON)" --version)"; "$(PYTHON)" -m venv --clear $(VENV); }
	@echo "installing the pinned packages into $(VENV): 3 to 8 minutes and 2.7 GB (with CUDA libraries several more) the first time, pip says nothing meanwhile"
	@$(PIP) install -qq --no-compile -c constraints.txt -e '.[dev]'
	@echo "compiling them"
	@PYTHONWARNINGS=ignore $(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true  # as pip would, one file after the other
	@touch $@

demo: $(STAMP) ## the guided tour
	@$(BIN)/paceenv demo

WORKERS ?= $(shell nproc)
PARALLEL := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
test: $(STAMP) ## the tests of every contract, WORKERS (a core each) at a time
	@$(BIN)/python -m pytest -m "not gpu and not slow and not alone" $(PARALLEL)

test-slow: $(STAMP) ## every scenario, statistics, long property tests; then, one at a time, what judges real time
	@$(BIN)/python -m pytest -m "not gpu and not alone and (slow or hypothesis)" --hypothesis-profile=thorough $(PARALLEL)
	@$(BIN)/python -m pytest -m "not gpu and alone"

test-gpu: $(STAMP) ## the tests that need a CUDA device, on NCCL; skipped with their reason where there is none
	@$(BIN)/python -m pytest -m gpu

lint: $(STAMP) ## ruff's checks
	@$(BIN)/python -m ruff check .

format-check: $(STAMP) ## is everything formatted? (changes nothing)
	@$(BIN)/python -m ruff format --check .

format: $(STAMP) ## format, and repair what ruff can repair
	@$(BIN)/python -m ruff check --fix-only .
	@$(BIN)/python -m ruff format .

typecheck: $(STAMP) ## mypy, strict
	@$(BIN)/python -m mypy

docs: $(STAMP) ## the documentation as a site, in build/site: without the network, warnings are errors, links are checked
	@$(BIN)/python -m sphinx -q -W --keep-going -b html docs build/site
	@echo "build/site/index.html"

dist: $(STAMP) ## sdist and wheel into dist/, the wheel tried in empty environments (needs a package index)
	@.ci/dist

bench: $(STAMP) ## timings, as ratios within one run
	@$(BIN)/python -m benchmarks

scores: $(STAMP) ## rebuild SCORES.md from the committed configurations (about 12 minutes)
	@$(BIN)/python -c "from paceenv.trainers.evaluation.score_table import committed_page as page; \
		from paceenv.ui.config_files import write_text; write_text('SCORES.md', page())"

released: $(STAMP) ## train the released policy anew (about 20 minutes; goes on where it was), and put it in place
	@$(BIN)/paceenv train distilled -o runs/released --resume
	@cp runs/released/policy.safetensors policies/learned.safetensors

commit-checks: lint format-check typecheck docs test ## what CI runs first; then it runs test-slow

clean: ## remove caches and build products (keeps .venv and runs)
	@rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find . \( -path ./$(VENV) -o -path ./.git -o -path ./runs \) -prune -o -name __pycache__ -type d -exec rm -rf {} +
