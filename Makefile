# Every target is one plain command, also written in CONTRIBUTING.md. `make help` lists them.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
EXPERIMENT ?= recipes/digits.yaml
BIN := .venv/bin
.DEFAULT_GOAL := help

.PHONY: help setup train test check fix lock bench schemas clean

help: ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## create .venv from the locks (a second call returns at once)
	@$(PYTHON) tools/setup.py

train: setup ## train on this machine: EXPERIMENT=path SET="a.b=c ..."
	@$(BIN)/gkr launch $(EXPERIMENT) $(foreach pair,$(SET),--set $(pair))

test: setup ## every test that needs neither root nor a cluster nor a GPU
	@$(BIN)/python -m pytest -n 2 --dist worksteal -m "not gpu and not cluster and not engine"

check: setup ## format, lint, types, import rules, generated files
	@$(BIN)/python tools/check.py

fix: setup ## format and mend what the linter can mend
	@$(BIN)/ruff format . && $(BIN)/ruff check --fix .

lock: ## compile requirements/*.txt again (UPGRADE=--upgrade for newest versions)
	@$(BIN)/python tools/lock.py $(UPGRADE)

schemas: setup ## write the JSON Schemas of spec/schemas again
	@$(BIN)/python -m spec.schemas

bench: setup ## measured claims: prints ratios, writes benchmarks/results/
	@$(BIN)/python -m benchmarks

clean: ## remove runs and local buckets (asks nothing; keeps .venv)
	@rm -rf runs .gkr
