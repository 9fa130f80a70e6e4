# Every target sets up what it needs: a virtual environment in .venv with the versions of constraints.txt.

PYTHON ?= $(shell for p in python3 python3.12 python3.11 python3.13; do \
	$$p -c 'import sys; raise SystemExit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
INSTALLED_MODELS := $(VENV)/.installed-models
INSTALLED_BENCH := $(VENV)/.installed-bench
INSTALLED_FUZZ := $(VENV)/.installed-fuzz
WORKERS ?= 2
PYTEST_ARGS ?=
N ?= 2000
MINUTES ?= 30
BENCH_CELLS ?= --dtypes float32,bfloat16 --shapes static,dynamic
PAGE ?= docs/benchmarks.md

# One thread per test process: WORKERS of them run at once. Tests about threads ask for theirs themselves.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

# Part of the suite for CI in which every compiled graph is encoded, decoded and loaded again before it runs.
ROUND_TRIP := tests/models/test_zoo.py tests/test_backend.py tests/higher_order/test_control_flow.py

# A machine with a card may have this source tree and no network: its own Python runs the tests and the benchmarks there.
GPU_PYTHON ?= $(shell test -x $(BIN)/python && echo $(BIN)/python || echo python3)
GPU_ENV := PYTHONPATH=src:.

.PHONY: gpu-visit test-gpu bench-gpu bench-gpu-launch bench-gpu-kernels help demo test lint unit browser round-trip programs huge soak models conformance bench bench-compile \
	bench-kernels bench-operators bench-freeze bench-partition bench-memory bench-passes bench-recording bench-aot bench-quantized \
	bench-fusions planted-bugs accuracy cache-faults fuzz fuzz-packages report-assets clean
.DEFAULT_GOAL := help

help:
	@echo "make demo           compile two small networks, check them against eager, print a table of times"
	@echo "make test           ruff, mypy and the test suite"
	@echo "make unit           the test suite alone (PYTEST_ARGS='tests/schedule -k softmax')"
	@echo "make lint           ruff and mypy alone"
	@echo "make programs       random programs compiled and in eager, N=2000 of them; goes on where it stopped"
	@echo "make huge           tests that walk over more than 2^31 elements"
	@echo "make soak           threads, compilations, errors, forks and interrupts for MINUTES=30, memory watched"
	@echo "make models         transformers models against eager, docs/models.md; goes on where it stopped (ARGS='--only bert')"
	@echo "make planted-bugs   shadow, bisect and minify on a transformer for each planted bug, minutes (ARGS='nan segfault')"
	@echo "make conformance    every operator of torch's database against eager, resumable (ARGS='--ops add --dtypes int64')"
	@echo "make bench          compilers side by side: tables, plot, docs/benchmarks.md (hours; goes on where it stopped;"
	@echo "                    ARGS='--models small --quick' PAGE=small.md writes a part of it elsewhere)"
	@echo "make bench-compile  first call of BERT-base for four backends; our stages beside Dynamo and AOTAutograd on"
	@echo "                    BERT, Swin and Llamas of 12 and 48 layers (ARGS='--models llama-48 --backends kiln');"
	@echo "                    warm starts of BERT and Swin (ARGS='--warm bert --models= --backends=' for these alone)"
	@echo "make bench-kernels  kernel times against inductor and eager (ARGS='--quick --only softmax')"
	@echo "make bench-operators  torch's operator database in several layouts against eager, docs/operators.md; hours, goes"
	@echo "                    on where it stopped (ARGS='--only programs --threads 1 --page programs.md')"
	@echo "make bench-partition  seconds to partition graphs of up to 20,000 nodes (ARGS='--most 5000')"
	@echo "make bench-memory   memory for backward and step time at budgets, against inductor (ARGS='--quick --models mlp')"
	@echo "make bench-freeze   six models as they are served, one and eight inputs at a time, beside frozen peers"
	@echo "make bench-aot      packages of BERT-base and ResNet-50 against the peer's: compile, size, load, calls"
	@echo "make bench-quantized  int8 models and int8 weights against inductor with frozen weights (ARGS='--threads 2')"
	@echo "make bench-fusions  activations and sums inside oneDNN's calls and after them (ARGS='--write' for the table)"
	@echo "make bench-passes   what registering, matching and every graph pass cost on 5,000 nodes"
	@echo "make bench-recording  what recording a compilation costs, and what it costs when it is off"
	@echo "make accuracy       how far float32 functions are from the exact value, here and in eager (ARGS='--exhaustive')"
	@echo "make cache-faults   a hundred processes killed while they write to one cache (N=100), then 16 that compile"
	@echo "                    the same 20 graphs, some killed while they do (ARGS='--rounds 1 --kills 20')"
	@echo "make fuzz           the parsers of cache entries and archives on random bytes for MINUTES=10"
	@echo "make fuzz-packages  the parsers of packages on random bytes for MINUTES=10"
	@echo "make report-assets  fetch the graph layout library of the report from npm, for a change of its version (DAGRE=3.1.3)"
	@echo "make test-gpu       tests that need an NVIDIA card, by GPU_PYTHON=python3; goes on where it stopped (ARGS=--again)"
	@echo "make gpu-visit      all of these on a card, what matters most first, in nine minutes; goes on where it stopped"
	@echo "make bench-gpu      transformers models on a card against eager and inductor; goes on where it stopped"
	@echo "make bench-gpu-launch   small models on a card, where launches dominate"
	@echo "make bench-gpu-kernels  memory-bound kernels on a card, as shares of the bandwidth of a copy"
	@echo "make clean          remove the environment and build outputs"

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or later found; set PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/pip install --quiet -c constraints.txt -e '.[test]'
	@touch $@

$(INSTALLED_MODELS): $(INSTALLED)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[test,models]'
	@touch $@

$(INSTALLED_BENCH): $(INSTALLED)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[test,bench]'
	@touch $@

$(INSTALLED_FUZZ): $(INSTALLED)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[test,fuzz]'
	@touch $@

demo: $(INSTALLED)
	$(BIN)/kiln demo

test: lint unit round-trip

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/mypy

# Tests of the report need a browser. Debian's is installed where it is missing and this user may; else they are skipped.
browser:
	@command -v chromium >/dev/null || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null \
		&& apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium fonts-dejavu-core >/dev/null; } \
		|| echo "no chromium: tests of the report are skipped (apt-get install chromium)"

unit: $(INSTALLED_MODELS) browser
	$(TEST_ENV) $(BIN)/pytest -n $(WORKERS) $(PYTEST_ARGS)

round-trip: $(INSTALLED_MODELS)
	$(TEST_ENV) $(BIN)/pytest -n $(WORKERS) --round-trip $(ROUND_TRIP)

programs: $(INSTALLED)
	$(TEST_ENV) $(BIN)/python -m tests.programs.campaign --count $(N) --workers $(WORKERS) $(ARGS)

huge: $(INSTALLED)
	$(BIN)/pytest -m huge tests/memory $(PYTEST_ARGS)

planted-bugs: $(INSTALLED)
	$(TEST_ENV) $(BIN)/python -m tests.debug.transformer $(ARGS)

soak: $(INSTALLED)
	$(BIN)/python -m tests.soak --minutes $(MINUTES) $(ARGS)

models: $(INSTALLED_MODELS)
	$(BIN)/python -m tests.models.transformers_models --workers $(WORKERS) --resume --page $(ARGS)

conformance: $(INSTALLED)
	$(TEST_ENV) $(BIN)/python -m conformance --table $(ARGS)

bench: $(INSTALLED_BENCH)
	$(BIN)/kiln bench $(BENCH_CELLS) --resume --page $(PAGE) $(ARGS)

bench-freeze: $(INSTALLED_BENCH)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[test,bench,peers]'
	$(BIN)/kiln bench --models serving --jobs inference --dtypes float32,bfloat16,int8 --resume --page docs/serving.md \
		--backends eager,kiln,kiln-frozen,inductor-freezing,openvino,openvino-api,onnxruntime-api $(ARGS)

bench-compile: $(INSTALLED_MODELS)
	$(BIN)/python -m benchmarks.compile_time $(ARGS)

bench-aot: $(INSTALLED_MODELS)
	$(BIN)/python -m benchmarks.aot $(ARGS)

bench-quantized: $(INSTALLED)
	$(BIN)/python -m benchmarks.quantized $(ARGS)

bench-fusions: $(INSTALLED)
	$(TEST_ENV) $(BIN)/python -m benchmarks.fusions $(ARGS)

bench-recording: $(INSTALLED)
	$(BIN)/python benchmarks/recording.py $(ARGS)

bench-passes: $(INSTALLED)
	$(BIN)/python benchmarks/passes.py $(ARGS)

bench-kernels: $(INSTALLED)
	$(BIN)/python benchmarks/kernels.py $(ARGS)

bench-operators: $(INSTALLED)
	$(BIN)/python -m benchmarks.operators --page docs/operators.md $(ARGS)

bench-partition: $(INSTALLED)
	$(TEST_ENV) $(BIN)/python benchmarks/partition.py $(ARGS)

accuracy: $(INSTALLED)
	$(TEST_ENV) $(BIN)/python benchmarks/accuracy.py $(ARGS)

bench-memory: $(INSTALLED)
	$(BIN)/python -m benchmarks.memory $(ARGS)

cache-faults: N = 100
cache-faults: $(INSTALLED)
	$(BIN)/python -m tests.cache.faults --rounds $(N)
	$(BIN)/python -m tests.cache.compiling $(ARGS)

gpu-visit:
	$(GPU_ENV) $(GPU_PYTHON) -m tests.gpu.visit $(ARGS)

test-gpu:
	$(GPU_ENV) $(GPU_PYTHON) -m tests.gpu $(ARGS)

bench-gpu:
	$(GPU_ENV) $(GPU_PYTHON) -m benchmarks.gpu models $(ARGS)

bench-gpu-launch:
	$(GPU_ENV) $(GPU_PYTHON) -m benchmarks.gpu launches $(ARGS)

bench-gpu-kernels:
	$(GPU_ENV) $(GPU_PYTHON) -m benchmarks.gpu kernels $(ARGS)

fuzz: MINUTES = 10
fuzz: $(INSTALLED_FUZZ)
	$(BIN)/python -m tests.fuzz.fuzz_entry -max_total_time=$$((60 * $(MINUTES))) $(ARGS)

fuzz-packages: MINUTES = 10
fuzz-packages: $(INSTALLED_FUZZ)
	$(BIN)/python -m tests.fuzz.fuzz_package -max_total_time=$$((60 * $(MINUTES))) -max_len=20000 $(ARGS)

# The minified library with its licence above it, and the checksum that a test compares. Needs npm, once per version.
DAGRE ?= 3.1.3
VENDOR := src/torchkiln/debug/report/vendor
report-assets:
	rm -rf build/dagre && mkdir -p build/dagre $(VENDOR)
	npm pack --silent --pack-destination build/dagre @dagrejs/dagre@$(DAGRE)
	tar -xzf build/dagre/dagrejs-dagre-$(DAGRE).tgz -C build/dagre
	{ echo "/*! @dagrejs/dagre $(DAGRE), https://github.com/dagrejs/dagre"; echo; cat build/dagre/package/LICENSE; echo "*/"; \
		grep -v -e '^//# sourceMappingURL' -e '^/[*]! For license' build/dagre/package/dist/dagre.min.js; } \
		> $(VENDOR)/dagre.min.js
	cd $(VENDOR) && sha256sum dagre.min.js > dagre.min.js.sha256

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis results
	find src tests benchmarks conformance -name __pycache__ -prune -exec rm -rf {} +
