# Every target is one plain command, also written in CONTRIBUTING.md. `make help` lists them.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
EXPERIMENT ?= recipes/digits.yaml
BIN := .venv/bin
.DEFAULT_GOAL := help

.PHONY: help setup train test check fix lock bench bench-quick schemas clean tools cluster cluster-down e2e image preview up down chaos

help: ## list the targets
	@awk -F':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## create .venv from the locks (a second call returns at once)
	@$(PYTHON) tools/setup.py

train: setup ## train on this machine, or on STACK=region[,region]: EXPERIMENT=path SET="a.b=c ..."
	@$(if $(STACK),clusters=$$($(BIN)/python -m infra.run clusters $(STACK)) && )$(BIN)/gkr launch $(EXPERIMENT) $(if $(STACK),--cluster $$clusters) $(foreach pair,$(SET),--set $(pair))

test: setup ## every test that needs neither root nor a cluster nor a GPU
	@$(BIN)/python -m pytest -n 2 --dist worksteal -m "not gpu and not cluster and not engine and not images and not loopback"

check: setup ## format, lint, types, import rules, generated files
	@$(BIN)/python tools/check.py

tools: setup ## build the tools that come only as Go source: TOOLS="kueue pulumi" (default: what a cluster needs)
	@$(BIN)/python tools/binaries.py $(TOOLS)

cluster: setup ## a real Kubernetes on this machine (root, Linux): FAKE="a3-ultra=64,a3-mega=32" REGIONS=2 FOR=stacks
	@$(BIN)/python -m tools.bed up $(if $(FAKE),--fake "$(FAKE)") $(if $(REGIONS),--regions $(REGIONS)) $(if $(FOR),--for $(FOR))

cluster-down: setup ## end that cluster and everything it made
	@$(BIN)/python -m tools.bed down

e2e: setup ## tests that need a cluster or the Pulumi engine, on that cluster or on KUBECONFIG
	@$(BIN)/python -m tools.e2e $(ARGS)

image: setup ## build an image: NAME=trainer [PUSH=registry/path] [BASE=image]
	@$(BIN)/python -m tools.image $(NAME) $(if $(PUSH),--push $(PUSH)) $(if $(BASE),--base $(BASE))

preview: setup ## what a stack would change: STACK=name [CLOUD=double] [ONLY=platform|region] [LABEL=allow-loss]
	@$(BIN)/python -m infra.run preview $(STACK) $(if $(CLOUD),--cloud $(CLOUD)) $(if $(ONLY),--only $(ONLY)) $(foreach one,$(LABEL),--label $(one))

up: setup ## bring a stack up, a region with its platform: STACK=name [CLOUD=double] [ONLY=...] [LABEL=...]
	@$(BIN)/python -m infra.run up $(STACK) $(if $(CLOUD),--cloud $(CLOUD)) $(if $(ONLY),--only $(ONLY)) $(foreach one,$(LABEL),--label $(one))

down: setup ## take a stack down: STACK=name [CLOUD=double] [ONLY=...] [LABEL=...]
	@$(BIN)/python -m infra.run down $(STACK) $(if $(CLOUD),--cloud $(CLOUD)) $(if $(ONLY),--only $(ONLY)) $(foreach one,$(LABEL),--label $(one))

fix: setup ## format and mend what the linter can mend
	@$(BIN)/ruff format . && $(BIN)/ruff check --fix .

lock: ## compile requirements/*.txt again (UPGRADE=--upgrade for newest versions)
	@$(BIN)/python tools/lock.py $(UPGRADE)

schemas: setup ## write the JSON Schemas of spec/schemas again
	@$(BIN)/python -m spec.schemas

bench: setup ## measured claims: prints ratios, writes benchmarks/results/
	@$(BIN)/python -m benchmarks

bench-quick: setup ## a minute of them with loose bounds, which only a regression breaks
	@$(BIN)/python -m benchmarks --quick

chaos: setup ## the fault campaign: SCENARIO=sync (processes and links), models (a million random steps of the protocols), frames (a million hostile inputs); SEEDS="0 1"
	@$(if $(filter models,$(SCENARIO)),GKR_CHAOS_STEPS=1000000 $(BIN)/python -m pytest -q --timeout 3600 tests/property,$(BIN)/python -m tools.chaos $(or $(SCENARIO),sync) $(if $(SEEDS),--seeds $(SEEDS)))

clean: ## remove runs and local buckets (asks nothing; keeps .venv)
	@rm -rf runs .gkr
