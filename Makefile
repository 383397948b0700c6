# The daily commands. Each works as the first one on a fresh machine that has Python 3.11+ (and Java 17+, where Spark
# is started): it makes the environment in .venv and installs what constraints.txt pins.

SHELL := /bin/bash
PYTHON_ENV := .venv/bin/python
SEEDS ?= 200
STREAM_SEEDS ?= 50
COVERAGE_SEEDS ?= 140
NAME ?=
LOGS ?=
WORKERS ?= 4
SPARK_WORKERS ?= 3
TIMES ?= 20
PYTHON ?= 3.13
TESTS ?=
QUICK ?=
MINUTES ?= 5
CHAIN ?= spark
PATIENCE ?= 3
SAMPLE ?= 200
SEED ?= 1
TESTS ?=
FILE ?=
# compiled tests are used again: each worker would compile all of them
unexport PYTHONDONTWRITEBYTECODE
# a process per core is there already: threads of Polars only get in each other's way
sim check: export POLARS_MAX_THREADS = 1

# what needs neither Spark nor minutes of processor time: no kills, no seeds of the simulator, no planted bugs, no whole
# pipelines, no long random histories
UNIT := not deep and not spark and not crash and not simulator and not mutant and not run and not long

.DEFAULT_GOAL := help
.PHONY: help setup setup-java setup-test docs demo kafka test test-python test-near test-deep test-repeated test-again mutants crash-loops kill-drivers kill-chain lost-machines lint check format sim bench bench-peers clean

help: ## print this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | \
		awk -F '\t' '{ printf "  make %-13s %s\n", $$1, $$2 }'

setup:
	@scripts/setup.sh

setup-java:
	@scripts/setup.sh java

setup-test:
	@scripts/setup.sh java browser servers

docs: ## build the documentation site in build/site, check its links and that it loads nothing from outside
	@scripts/setup.sh docs
	@# a docstring that the reference cannot read is an error, too
	set -o pipefail; NO_COLOR=1 .venv/bin/zensical build --clean --strict 2>&1 | tee /dev/stderr | { ! grep -q '^griffe:'; }
	$(PYTHON_ENV) scripts/check_site.py build/site

demo: setup-java ## kill a worker and the driver of a running pipeline, compare its counts (LOGS="PATH...")
	@$(PYTHON_ENV) scripts/demo $(if $(LOGS),--logs $(LOGS))

kafka: setup-test ## start a Kafka broker to try things with, and say its address
	@$(PYTHON_ENV) -m tests.servers.kafka

test: setup-test ## all tests but those of `make lint`, with Spark and with real kills (20 to 40 minutes on 2 cores)
	@$(PYTHON_ENV) scripts/run_tests.py $(WORKERS) $(SPARK_WORKERS)

test-near: setup ## the tests of one module: FILE=src/headgate/...
	@$(PYTHON_ENV) scripts/test_near.py $(FILE)

test-deep: sim test-repeated test-again crash-loops kill-drivers kill-chain lost-machines ## thousands of seeds, long kills, lost machines (hours)

test-python: ## the quick half of the tests under another Python: make test-python PYTHON=3.13
	VENV=build/python-$(PYTHON) PYTHON=$(PYTHON) scripts/setup.sh
	build/python-$(PYTHON)/bin/python -m pytest -q -n $(WORKERS) -m "$(UNIT)" $(TESTS)

test-repeated: setup-test ## `make test` with all parameters, seeds and random examples
	HEADGATE_TEST_DEEP=1 $(PYTHON_ENV) -m pytest -q -n $(WORKERS) -m "not spark and not crash"
	HEADGATE_TEST_DEEP=1 $(PYTHON_ENV) -m pytest -q -n $(SPARK_WORKERS) -m "spark or crash"

test-again: setup ## the tests of `make check` TIMES times with other seeds, then once on a busy machine
	@scripts/test-again $(TIMES) $(WORKERS) "$(UNIT)"

mutants: setup ## change SAMPLE places of PART (a package or module) one by one, print changes that no test notices
	$(PYTHON_ENV) scripts/mutants $(PART) --sample $(SAMPLE) --seed $(SEED) $(if $(TESTS),--tests $(TESTS)) $(if $(QUICK),--quick)

crash-loops: setup-java ## kill what runs loops TIMES times in each scenario, on Spark
	HEADGATE_TEST_TIMES=$(TIMES) $(PYTHON_ENV) -m pytest -q tests/crash/test_loops.py

kill-drivers: setup-java ## kill drivers under --supervised and --standby for MINUTES minutes, on Spark
	HEADGATE_TEST_MINUTES=$(MINUTES) HEADGATE_TEST_PATIENCE=$(PATIENCE) $(PYTHON_ENV) -m pytest -q -s tests/crash/test_kept_drivers.py \
		tests/crash/test_standbys.py -k "random and spark"

lost-machines: setup-test ## cut machines off and delete their disks TIMES times, on a cluster in network namespaces, too
	for n in $$(seq $(TIMES)); do HEADGATE_TEST_CLUSTERS=1 $(PYTHON_ENV) -m pytest -q tests/crash/test_lost_machines.py || exit 1; done

kill-chain: setup-test ## kill workers and drivers of two pipelines in a row, Kafka's broker, PostgreSQL, each MINUTES minutes: CHAIN="tables and spark"
	HEADGATE_TEST_MINUTES=$(MINUTES) $(PYTHON_ENV) -m pytest -q -s tests/crash/test_chains.py tests/crash/test_kafka_kills.py tests/crash/test_table_chains.py \
		-k "test_a_chain and $(CHAIN)"

lint: setup ## format, lint, import layering, types, names and words, rules of the architecture
	$(PYTHON_ENV) -m ruff format --check .
	$(PYTHON_ENV) -m ruff check .
	.venv/bin/lint-imports
	$(PYTHON_ENV) -m mypy
	$(PYTHON_ENV) -m mypy --config-file examples/mypy.ini examples
	$(PYTHON_ENV) scripts/check_names.py
	$(PYTHON_ENV) -m pytest -q tests/test_architecture.py

check: lint ## the same, and unit tests, a short simulation
	$(PYTHON_ENV) -m pytest -q -n $(WORKERS) -m "$(UNIT)" --ignore=tests/test_architecture.py
	$(PYTHON_ENV) -m headgate.sim --seeds 50 --jobs $(WORKERS)

format: setup ## format the code and mend what the linter can
	$(PYTHON_ENV) -m ruff format .
	$(PYTHON_ENV) -m ruff check --fix .

sim: setup ## run SEEDS random schedules with faults, STREAM_SEEDS of each scenario; print what COVERAGE_SEEDS run
	$(PYTHON_ENV) -m headgate.sim --seeds $(SEEDS) --jobs $(WORKERS)
	$(PYTHON_ENV) -m headgate.sim --every-scenario --seeds $(STREAM_SEEDS) --jobs $(WORKERS)
	$(PYTHON_ENV) -m headgate.sim --coverage --seeds $(COVERAGE_SEEDS) --jobs $(WORKERS)

bench: setup-java ## run the benchmark NAME, or all of them (more than half an hour)
	$(PYTHON_ENV) -m bench.run $(NAME)

bench-peers: setup-java ## install the systems that the benchmarks compare with, into environments of their own
	$(PYTHON_ENV) -m bench.peers.install

clean: ## remove the environment and every cache
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .cache build
