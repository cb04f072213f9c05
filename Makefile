# `make help` lists what there is to make.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip -q --disable-pip-version-check
CLANG_FORMAT_FILES = $(shell find ops examples -name '*.h' -o -name '*.cc' -o -name '*.cu')
# Needs no package, so it runs before there is a .venv too.
CPPTEST = $(firstword $(wildcard $(BIN)/python) $(PYTHON)) tools/cpptest.py
GPU = $(firstword $(wildcard $(BIN)/python) $(PYTHON)) tools/gpu.py
BENCHMARKS = benchmarks/local_step.py benchmarks/table_memory.py benchmarks/cluster_bytes.py \
  benchmarks/cache_memory.py benchmarks/cache_traces.py benchmarks/pooled_step.py \
  benchmarks/feature_step.py benchmarks/gpu_pipeline.py

.PHONY: help
help:
	@sed -n 's/^##  //p' Makefile

##  make venv      .venv with everything pinned and het_tf in it, editable
# The ops are built before pip builds them, because pip would show nothing of it.
BUILD_OPS = $(BIN)/python setup.py -q build_ext --inplace

.PHONY: venv
venv: ops

.venv/pinned: requirements.lock.txt
	@command -v $(PYTHON) >/dev/null || { echo 'No $(PYTHON) here: sudo apt-get install python3 python3-venv'; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' || \
	  { echo "het_tf needs Python 3.10 to 3.13, $(PYTHON) is $$($(PYTHON) -V 2>&1): make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo 'No venv module in $(PYTHON): sudo apt-get install python3-venv'; exit 1; }
	@command -v $(CXX) >/dev/null || { echo 'No C++ compiler $(CXX): sudo apt-get install g++'; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo 'Installing the pinned packages: with TensorFlow 2 GB, so the first time takes minutes.'
	$(PIP) install -r requirements.lock.txt
	touch $@

.venv/installed: .venv/pinned pyproject.toml setup.py
	$(BUILD_OPS)
	$(PIP) install --no-deps --no-build-isolation -e .
	touch $@

##  make ops       het_tf/_het_ops.so, only what changed
.PHONY: ops
ops: .venv/installed
	@$(BUILD_OPS)

SPREAD = -n 3 --dist loadfile --no-loadscope-reorder
PYTEST = $(BIN)/python -m pytest $(SPREAD)

##  make test      C++ tests of ops/core, then the tests in tests/ that show each property once
.PHONY: test
test: ops
	$(CPPTEST) core
	$(PYTEST) -m 'not exhaustive' tests

##  make test-all  make test, cpptest, then longer schedules, more kills and more combinations
.PHONY: test-all
test-all: test cpptest
	$(PYTEST) -m exhaustive tests

##  make test-costs  where the time of make test goes, by file and fixture; ARGS='-m exhaustive'
.PHONY: test-costs
test-costs: ops
	$(BIN)/python tools/test_costs.py -q $(SPREAD) $(or $(ARGS),-m 'not exhaustive') tests

##  make cpptest   C++ tests of ops/core and of the host build of ops/cuda
.PHONY: cpptest
cpptest:
	$(CPPTEST) release

##  make coverage  the lines that make test runs: of het_tf/ and of ops/
.PHONY: coverage
coverage: ops
	$(CPPTEST) coverage
	$(BIN)/python tools/cpp_coverage.py
	$(BIN)/python -m coverage erase
	$(BIN)/python -m coverage run -m pytest $(SPREAD) -m 'not exhaustive' tests
	$(BIN)/python -m coverage combine -q
	$(BIN)/python -m coverage report --skip-covered --sort=cover

##  make sanitize  C++ tests under Address-, UndefinedBehavior- and ThreadSanitizer
.PHONY: sanitize
sanitize:
	$(CPPTEST) asan
	$(CPPTEST) tsan

##  make gpu-kernels  every kernel compiled for sm_80 and sm_90, without a spilled register
.PHONY: gpu-kernels
gpu-kernels:
	$(GPU) kernels

##  make gpu-test  C++ tests of ops/cuda on a GPU, and under compute-sanitizer; ARGS=--tool=memcheck
.PHONY: gpu-test
gpu-test:
	$(GPU) test $(ARGS)

##  make gpu-load  the ops built with CUDA load and train, here, with a GPU or without
.PHONY: gpu-load
gpu-load: ops
	$(GPU) load

##  make gpu-bench  a step on a GPU beside its copy bandwidth and PyTorch
.PHONY: gpu-bench
gpu-bench:
	$(GPU) bench $(ARGS)

##  make fuzz      random schedules and mutated messages on the ops, for ARGS=--minutes=30
.PHONY: fuzz
fuzz: ops
	$(BIN)/python tests/protocol/fuzz.py $(ARGS)

##  make fuzz-sanitized  the same with the core under Address- and UndefinedBehaviorSanitizer
# On a copy of the package, whose ops only Python with the sanitizers' runtimes can load.
SANITIZED = build/sanitized-package
RUNTIMES = $(shell $(CXX) -print-file-name=libasan.so) $(shell $(CXX) -print-file-name=libubsan.so)
.PHONY: fuzz-sanitized
fuzz-sanitized: ops
	rm -rf $(SANITIZED) && mkdir -p $(SANITIZED) && cp -r het_tf $(SANITIZED)
	HET_TF_SANITIZE=1 $(BIN)/python setup.py -q build_ext --build-lib $(SANITIZED)
	PYTHONPATH=$(SANITIZED) LD_PRELOAD='$(RUNTIMES)' ASAN_OPTIONS=detect_leaks=0 \
	  UBSAN_OPTIONS=print_stacktrace=1 $(BIN)/python tests/protocol/fuzz.py $(ARGS)

##  make demo      examples/ctr/demo.py with ARGS
.PHONY: demo
demo: ops
	$(BIN)/python examples/ctr/demo.py $(ARGS)

##  make bench     every program of benchmarks/, or BENCHMARKS=, with ARGS
.PHONY: bench
bench: ops
	for b in $(BENCHMARKS); do $(BIN)/python $$b $(ARGS) || exit 1; done

##  make lint      ruff, clang-format, mypy, lock annotations, shellcheck and hadolint, changing nothing
.PHONY: lint
lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(CLANG_FORMAT_FILES)
	$(BIN)/python tools/thread_safety.py
	$(BIN)/shellcheck .ci/run examples/clusters/*.sh
	$(BIN)/hadolint examples/clusters/Dockerfile

##  make format    what make lint asks for, as far as it can be done by itself
.PHONY: format
format: .venv/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CLANG_FORMAT_FILES)

##  make docs      the documentation in build/site
.PHONY: docs
docs: .venv/installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build
	@echo 'To read it with its search: python3 -m http.server -d build/site'

##  make wheel     a wheel in dist/ that runs on other machines too, under every Python
.PHONY: wheel
wheel: .venv/installed
	rm -rf build/lib* build/bdist*
	HET_TF_PORTABLE=1 $(PIP) wheel --no-deps --no-build-isolation -w dist .

##  make bazel     the same ops with Bazel: bazel-bin/ops/_het_ops.so
.PHONY: bazel
bazel: .venv/installed
	@command -v bazel >/dev/null || { echo 'No bazel: sudo apt-get install bazel-bootstrap' \
	  'bazel-platforms bazel-rules-java bazel-rules-proto bazel-skylib'; exit 1; }
	PYTHON_BIN_PATH=$(abspath $(BIN)/python) bazel build //ops:_het_ops.so //ops:_het_ops.json

##  make clean     remove all of that but .venv
.PHONY: clean
clean:
	rm -rf build dist *.egg-info het_tf/_het_ops.so het_tf/_het_ops.json
