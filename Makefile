# One way to run anything. `make help` lists it; CI calls the same targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PROMETHEUS := $(shell command -v prometheus || echo .local/prometheus/usr/bin/prometheus)

.DEFAULT_GOAL := help
.PHONY: help setup demo up down test test-fast lint type format bench lock protos clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  %-12s %s\n", $$1, $$2}'

setup: $(READY) $(PROMETHEUS) ## make .venv from the locks, and find or fetch Prometheus

$(READY): requirements/dev.txt requirements/uv.txt pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; \
	  sys.exit(None if (3, 11) <= v <= (3, 13) else \
	  "Perennial needs Python 3.11, 3.12 or 3.13; this is %d.%d. Try: make setup PYTHON=python3.12" % v)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --require-hashes -r requirements/uv.txt
	$(BIN)/uv pip sync --quiet --require-hashes --python $(BIN)/python requirements/dev.txt
	$(BIN)/uv pip install --quiet --no-deps --no-build-isolation --python $(BIN)/python --editable .
	@touch $@

$(PROMETHEUS): | $(READY)
	$(BIN)/perennial fetch-prometheus

demo: setup ## close whole episodes on real flights (under ten minutes)
	$(BIN)/perennial demo

up: setup ## start the local stack and leave it running
	$(BIN)/perennial up

down: ## stop the local stack
	$(BIN)/perennial down

test: setup ## all tests, the whole stack included
	$(BIN)/python -m pytest

test-fast: setup ## the tests without the whole stack
	$(BIN)/python -m pytest -m "not stack"

lint: $(READY) ## ruff and the floors between the rooms
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

type: $(READY) ## mypy
	$(BIN)/mypy

format: $(READY) ## rewrite the code in the house's form
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(addprefix bench-,$(basename $(notdir $(wildcard benchmarks/[a-z]*.py)))) ## all benchmarks

bench-%: setup
	$(BIN)/python -m benchmarks.$*

lock: $(READY) ## resolve the locks again, for all supported Pythons at once
	$(BIN)/uv pip compile --universal --generate-hashes --no-emit-index-url --no-header --quiet \
	  --only-binary apache-beam --extra models --extra dev --output-file requirements/dev.txt pyproject.toml
	$(BIN)/uv pip compile --generate-hashes --no-emit-index-url --no-header --quiet \
	  --output-file requirements/uv.txt requirements/uv.in

protos: $(READY) ## generate the protocol buffers
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. serving/protos/*.proto
	$(BIN)/python -m grpc_tools.protoc -I. --grpc_python_out=. serving/protos/labels.proto

clean: ## remove what runs have written; the environment stays
	rm -rf var .pytest_cache .mypy_cache .ruff_cache .hypothesis
