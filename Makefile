# Everything here sets itself up: it needs git, make and python3 (>= 3.11, with venv).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

TRACE := benchmarks/traces/conversation_1000.jsonl
DEMO := build/demo
OLDEST := build/redis-oldest
ENGINES ?= .engines
SOURCES := hicache storage_backends connectors proto tests benchmarks
PYTEST := HYPOTHESIS_PROFILE=$${HYPOTHESIS_PROFILE:-ci} $(BIN)/python -m pytest -q
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(min(8, len(os.sched_getaffinity(0)) + 1))')
COVERED := --cov --cov-report= --cov-fail-under=0
# Bytecode is kept, whatever the shell says: tests start hundreds of processes, and each would compile the project anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help .venv demo test lint contract unit wheel bench traces redis-oldest engines cases mutants soak soak-engines chaos clean
.DEFAULT_GOAL := help

help:
	@echo "make demo     replay a real trace through device, host and file tiers, every byte checked"
	@echo "make test     all checks: format, lint, types, import rules, tests, coverage, the built wheel"
	@echo "make lint     the checks that run no code"
	@echo "make bench    measure against references; writes benchmarks/out/bench.json"
	@echo "make traces TRACES=FOLDER  whole public traces against their known values, two minutes"
	@echo "make redis-oldest  the tests of Redis with the oldest redis-py"
	@echo "make engines  the connectors in real engines, built once in $(ENGINES)/ (3.8 GB); ENGINE=sglang runs one"
	@echo "make cases    the field's failure cases and the tests that cover them"
	@echo "make mutants  put known bugs into a copy and see the tests catch each"
	@echo "make soak     long random runs with faults, for SOAK_SECONDS (600), and a service under 2 million verbs"
	@echo "make soak-engines  vllm serve under many turns while its service is killed, for SOAK_SECONDS (1800)"
	@echo "make chaos    long replays on Redis while everything goes wrong with it, some minutes and 4 GiB of memory"
	@echo "make .venv    only the environment"
	@echo "make contract  a release: freeze the protocol that later ones may not break"
	@echo "make clean    remove what the above made, the environment too"

.venv: $(STAMP)

# pip is upgraded first: dependency groups need 25.1. The stamp lies inside, so a removed .venv is made anew.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group lint --group test --editable ".[torch,cli,redis,server]"
	touch $@

# Small enough for any machine, small tiers on purpose: device and host overflow, so all three tiers answer. The second
# run is a new process on the same folder.
demo: $(STAMP)
	rm -rf $(DEMO)
	@for run in first second; do \
		echo "== $$run process"; \
		$(BIN)/hicache replay $(TRACE) --page-size trace --device 800 --host 2400 \
			--storage "file://$(CURDIR)/$(DEMO)?capacity=2GiB" --page-bytes 32768 || exit 1; \
	done
	rm -rf $(DEMO)

# Types and the wheel take one core each for about as long: side by side first. What they print comes in one piece each.
test: $(STAMP)
	$(MAKE) --no-print-directory --jobs 2 --output-sync=target lint wheel
	$(MAKE) --no-print-directory unit

lint: $(STAMP)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/buf lint proto
	$(BIN)/buf breaking proto --against proto/released.json
	$(BIN)/python proto/generate.py --check

# What `buf breaking` compares with; run it with a release, never to silence it.
contract: $(STAMP)
	$(BIN)/buf build proto --exclude-source-info -o -#format=json | $(BIN)/python -m json.tool --indent 1 > proto/released.json

# One process a core and one more, as many tests wait; up to eight. A test that hangs for two minutes fails and takes its
# process with it; another goes on. Those that want the machine for themselves come first: one process compiles all tests,
# the others find that done.
unit: $(STAMP)
	$(PYTEST) $(COVERED) -m alone tests
	$(PYTEST) $(COVERED) --cov-append --numprocesses $(WORKERS) --dist worksteal -m "not alone" tests
	$(BIN)/coverage report

# What users install is the wheel, so it is tried in an environment of its own, without any extra. The generated code is
# tried with the runtimes that engines pin.
wheel: $(STAMP)
	$(BIN)/python tests/packaging/check_wheel.py $(TRACE)
	$(BIN)/python tests/packaging/check_protobuf.py build/runtimes

bench: $(STAMP)
	$(BIN)/python benchmarks/run.py

# FOLDER has conversation_trace.jsonl, synthetic_trace.jsonl and agent-sessions/, as their publishers have them.
traces: $(STAMP)
	$(BIN)/python tests/public_traces.py "$(TRACES)"

# `make test` runs with the newest redis-py; this one with the oldest that the extra allows, in an environment of its own.
redis-oldest: $(STAMP)
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	$(OLDEST)/bin/python -m pip install --quiet --constraint constraints.txt --group test --editable . "redis==5.0.1"
	$(OLDEST)/bin/python -m pytest -q tests/unit/hicache_redis tests/conformance/test_redis_backend.py \
		tests/integration/test_redis_servers.py tests/chaos/test_redis_trouble.py tests/chaos/test_redis_failover.py \
		tests/chaos/test_redis_deadlines.py tests/chaos/test_redis_chaos.py

# Builds the engines' environments once (3.8 GB, from a package index), then runs all that is tried and measured in them,
# with the wheel that users install there. ENGINE=sglang runs one.
engines:
	$(PYTHON) tests/engines/prepare.py --into $(ENGINES)
	$(PYTHON) tests/engines/run.py --from $(ENGINES) $(ENGINE)

cases: $(STAMP)
	@$(BIN)/python tests/cases.py

soak: $(STAMP)
	$(BIN)/python tests/soak.py
	$(BIN)/python tests/soak_sidecar.py

# `vllm serve` for SOAK_SECONDS (1,800) while the service is killed every minute.
soak-engines:
	$(PYTHON) tests/engines/prepare.py --into $(ENGINES)
	$(ENGINES)/vllm/bin/python -m pip install --quiet --no-deps --force-reinstall .
	$(ENGINES)/vllm/bin/python tests/soak_vllm.py

chaos: $(STAMP)
	$(BIN)/python tests/redis_chaos.py

mutants: $(STAMP)
	$(BIN)/python tests/mutants.py

clean:
	rm -rf $(VENV) build dist benchmarks/out .coverage .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find $(SOURCES) -name __pycache__ -prune -exec rm -rf {} +
