# Every target sets up what it needs on its own; see docs/develop/building.md. What you may set: VENV, BUILD_DIR, WARNINGS_AS_ERRORS, JOBS, TEST_JOBS, UNITY, CXX, ARGS, SECONDS, KILLS, SEED, ONLY, TESTS, MEGATRON, GROUP, FILTER, NIGHTLY, TORCH, GPU_PYTHON, CUDA_VENV.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV ?= .venv
BUILD_DIR ?= build
# When the build directory is made: ON or OFF.
WARNINGS_AS_ERRORS ?= OFF
JOBS ?= $(shell nproc)
# Files that are compiled together, also when the build directory is made; empty: CMakeLists.txt says how many.
UNITY ?=
# Of each fuzz target, and of `make soak`.
SECONDS ?= 60
# Of `make torture`.
KILLS ?= 200
# One more than processors, which a test often leaves idle: its ranks wait for each other.
TEST_JOBS ?= $(shell expr $(JOBS) + 1)
export VENV
# The environment's cmake, ninja and Python tools before any other.
export PATH := $(abspath $(VENV))/bin:$(PATH)

# The stamps lie in the virtual environment, so that they go when it goes.
STAMP := $(VENV)/.setup
CXX_FILES = $(shell find include src examples tools bench tests -name '*.h' -o -name '*.cpp')
peers = PYTHONPATH=tests:$(BUILD_DIR)/python python -m peers.run --tests $(TESTS) --results $(BUILD_DIR)/peers
megatron = PYTHONPATH=tests:$(BUILD_DIR)/python python -m peers.megatron --checkout $(MEGATRON) --results $(BUILD_DIR)/peers/megatron
PYTHON_MODULES = libfsdp libfsdp.megatron libfsdp.megatron.v2 libfsdp.megatron.experimental libfsdp.megatron.uneven_dtensor
configure = cmake -DCMAKE_PREFIX_PATH="$$(python -c 'import torch; print(torch.utils.cmake_prefix_path)')" --log-level=WARNING \
  -DCMAKE_COMPILE_WARNING_AS_ERROR=$(WARNINGS_AS_ERRORS) $(if $(UNITY),-DCMAKE_UNITY_BUILD_BATCH_SIZE=$(UNITY))
# The C++ unit tests of GROUP, or all. A group in two processes: loading an instrumented torch for every test would take longer than the
# tests. The largest first, so that none is left alone in the end.
groups = $(or $(GROUP:%=test_%),unit_tests)
run_groups = for test in $$(ls -S $(or $(GROUP:%=$(1)/tests/cpp/test_%),$$(find $(1)/tests/cpp -maxdepth 1 -type f -perm -u+x -name 'test_*'))); do \
    echo "$$test 0 $$test 1"; \
  done | xargs -n 2 -P $(TEST_JOBS) sh -c 'GTEST_TOTAL_SHARDS=2 GTEST_SHARD_INDEX=$$1 timeout 3600 "$$0" --gtest_brief=1 \
    $(if $(FILTER),--gtest_filter="$(FILTER)") </dev/null || { echo "FAILED: $$0"; exit 1; }'

.PHONY: help setup build train train-python test unit nightly peers large soak torture survive mutants bench docs pictures format check-format lint asan tsan coverage fuzz tidy torch-compat gpu-kit clean

help:  ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-13s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

$(STAMP)-%: scripts/setup.sh
	@scripts/setup.sh $*
	@touch $@

setup: $(STAMP)-build  ## Virtual environment with torch and CMake, header packages

$(BUILD_DIR)/build.ninja: CMakePresets.json | $(STAMP)-build
	$(configure) --preset release -B $(BUILD_DIR)

build: $(BUILD_DIR)/build.ninja  ## Library, tests, examples, the commands fsdp and fsdp-ckpt, and benchmark programs in $BUILD_DIR
	cmake --build $(BUILD_DIR) -j $(JOBS)

train: $(BUILD_DIR)/build.ninja  ## Train a small GPT on two ranks; options in ARGS="--help"
	cmake --build $(BUILD_DIR) -j $(JOBS) --target train_gpt
	$(BUILD_DIR)/examples/train_gpt $(ARGS)

train-python: $(BUILD_DIR)/build.ninja  ## Train a small GPT from Python, on two ranks: examples/train_gpt.py; options in ARGS="--help"
	cmake --build $(BUILD_DIR) -j $(JOBS) --target fsdp_python
	PYTHONPATH=$(abspath $(BUILD_DIR))/python python -m torch.distributed.run --standalone --nproc-per-node 2 examples/train_gpt.py $(ARGS)

test: build $(STAMP)-test  ## All tests; options for ctest in ARGS="-R name"; with TESTS=PyTorch's folder test/, some of these, too
	ctest --test-dir $(BUILD_DIR) -j $(TEST_JOBS) --output-on-failure --no-tests=error $(ARGS)
	$(if $(TESTS),$(peers) --subset tests/peers/subset.txt)

unit: $(BUILD_DIR)/build.ninja  ## One group of the C++ unit tests, and no more of the build: GROUP=engine FILTER='*UseState*'
	@[ -n "$(GROUP)" ] || { echo "make unit: give GROUP=, a folder of tests/cpp/ that has a program test_GROUP" >&2; exit 2; }
	cmake --build $(BUILD_DIR) -j $(JOBS) --target test_$(GROUP)
	$(if $(FILTER),$(BUILD_DIR)/tests/cpp/test_$(GROUP) --gtest_brief=1 --gtest_filter='$(FILTER)', \
	  ctest --test-dir $(BUILD_DIR) -j $(TEST_JOBS) --output-on-failure --no-tests=error -R '^$(GROUP)[.]')

# Parts of `make nightly`. Not by $(MAKE), which runs even under `make -n`.
NIGHTLY ?= options messages soak fuzz torture survive large asan tsan tidy mutants peers cuda oldest newest
nightly_options = export FSDP_NIGHTLY=1 FSDP_TEST_WHEEL=1; ctest --test-dir $(BUILD_DIR) -j $(TEST_JOBS) --output-on-failure --no-tests=error -L "unit|python"
nightly_messages = FSDP_SHARED_MEMORY=0 ctest --test-dir $(BUILD_DIR) -j $(TEST_JOBS) --output-on-failure --no-tests=error
nightly_soak = make soak SECONDS=1800
nightly_fuzz = make fuzz SECONDS=600
nightly_torture = make torture KILLS=1000
nightly_cuda = make gpu-kit && gpu-kit/run.sh --device cpu --patience 10 --python $(CUDA_VENV)/bin/python --work $(BUILD_DIR)-cuda/unpacked --out $(BUILD_DIR)-cuda/results 1 2 3 4 5 6 7
nightly_oldest = make torch-compat TORCH=2.11.0
nightly_newest = make torch-compat TORCH=$$(python -m pip index versions torch 2>/dev/null | sed -n 's/^torch (\(.*\))$$/\1/p')
nightly_peers = $(if $(TESTS),$(peers),echo "no TESTS=, so PyTorch's tests are left out") && $(if $(MEGATRON),$(megatron),echo "no MEGATRON=, so its tests are left out")

nightly: build $(STAMP)-test $(STAMP)-clients $(STAMP)-browser  ## What takes hours, and one page of results: $BUILD_DIR/nightly/README.md; NIGHTLY="soak tsan" chooses parts
	python scripts/nightly.py $(BUILD_DIR)/nightly $(foreach part,$(NIGHTLY),$(part)='$(subst ','\'',$(or $(nightly_$(part)),make $(part)))')

peers: $(BUILD_DIR)/build.ninja $(STAMP)-test  ## A peer's tests against it and libfsdp; TESTS=PyTorch's folder test/, or MEGATRON=a checkout of Megatron-LM; ARGS="FILE"
	@[ -n "$(TESTS)$(MEGATRON)" ] || { echo "make peers: give TESTS=PyTorch's folder test/, or MEGATRON=a checkout of Megatron-LM" >&2; exit 2; }
	cmake --build $(BUILD_DIR) -j $(JOBS) --target fsdp_python
	$(if $(TESTS),$(peers) $(ARGS))
	$(if $(MEGATRON),$(megatron) $(ARGS))

large: build  ## Tests that take minutes and 10 GB of memory
	ctest --test-dir $(BUILD_DIR) -C large -L large --output-on-failure --no-tests=error $(ARGS)

soak: $(BUILD_DIR)/build.ninja $(STAMP)-test  ## Random training runs against plain replicas, in C++ and in Python, for $SECONDS; SEED=n repeats one of each
	cmake --build $(BUILD_DIR) -j $(JOBS) --target soak fsdp_python
	SECONDS=$(SECONDS) SEED=$(SEED) $(BUILD_DIR)/tests/cpp/soak --gtest_brief=1 & cpp=$$!; \
	  PYTHONPATH=$(BUILD_DIR)/python:tests/python python -m differential --seconds $(SECONDS) $(if $(SEED),--seed $(SEED)) $(ARGS); python=$$?; \
	  wait $$cpp && exit $$python

torture: $(BUILD_DIR)/build.ninja  ## Kill training runs at random moments, $KILLS times, and check what they leave; SEED=n repeats
	cmake --build $(BUILD_DIR) -j $(JOBS) --target train_gpt fsdp_ckpt
	python tests/torture/torture.py --train-gpt $(BUILD_DIR)/examples/train_gpt --fsdp-ckpt $(BUILD_DIR)/tools/fsdp-ckpt \
	  --kills $(KILLS) $(if $(SEED),--seed $(SEED)) $(ARGS)

survive: $(BUILD_DIR)/build.ninja  ## Kill ranks and hosts of a run that saves in memory, 200 and 50 times; SEED=n repeats, ARGS="--kills 20 --hosts 5"
	cmake --build $(BUILD_DIR) -j $(JOBS) --target train_gpt fsdp_ckpt
	python tests/torture/survive.py --train-gpt $(BUILD_DIR)/examples/train_gpt --fsdp-ckpt $(BUILD_DIR)/tools/fsdp-ckpt \
	  $(if $(SEED),--seed $(SEED)) $(ARGS)

mutants: | $(STAMP)-build $(STAMP)-clang $(STAMP)-test  ## Break the library, one change at a time: does a test notice? ONLY=src/comm/
	python tests/mutants/mutants.py run . $(BUILD_DIR)-mutants --workshops $(JOBS) $(if $(ONLY),--only $(ONLY))

bench: build $(STAMP)-bench  ## Measure against torch's FSDP2, DDP and the limits; options in ARGS
	python bench/run.py --binary $(BUILD_DIR)/bench/bench_contender --package $(BUILD_DIR)/python $(ARGS)

docs: $(BUILD_DIR)/build.ninja $(STAMP)-docs  ## Reference of the C++ headers and the Python package in $BUILD_DIR/docs; fails on a public name without a comment
	cmake --build $(BUILD_DIR) -j $(JOBS) --target fsdp_python
	mkdir -p $(BUILD_DIR)/docs
	(cat docs/Doxyfile; echo 'OUTPUT_DIRECTORY = "$(BUILD_DIR)/docs"') | doxygen -
	PYTHONPATH=$(BUILD_DIR)/python pdoc --docformat google -o $(BUILD_DIR)/docs/python $(PYTHON_MODULES)

pictures: $(BUILD_DIR)/build.ninja $(STAMP)-bench $(STAMP)-pictures $(STAMP)-browser  ## Draw docs/pictures again
	cmake --build $(BUILD_DIR) -j $(JOBS) --target fsdp_python fsdp_command
	python docs/pictures/parts.py | tred | dot -Tsvg -o docs/pictures/parts.svg
	python docs/pictures/python.py | tred | dot -Tsvg -o docs/pictures/python.svg
	PYTHONPATH=$(abspath $(BUILD_DIR))/python python -m torch.distributed.run --standalone --nproc-per-node 2 docs/pictures/step.py docs/pictures/step.svg
	PYTHONPATH=$(abspath $(BUILD_DIR))/python python docs/pictures/timeline.py $(BUILD_DIR)/tools/fsdp docs/pictures/timeline.png

format: $(STAMP)-format  ## Rewrite all C++ files in the project's format
	clang-format -i $(CXX_FILES)

check-format: $(STAMP)-format  ## Fail if `make format` would change something
	clang-format --dry-run --Werror $(CXX_FILES)

lint: $(STAMP)-build $(STAMP)-bench $(STAMP)-lint  ## Check the Python files and the shell scripts
	ruff check
	mypy
	shellcheck scripts/*.sh tests/gpu/run.sh .ci/run

asan:  ## Unit tests under AddressSanitizer and UndefinedBehaviorSanitizer, in $BUILD_DIR-asan; some: GROUP="engine comm" FILTER='-Launch.*'
tsan:  ## Unit tests under ThreadSanitizer, in $BUILD_DIR-tsan; some: GROUP, FILTER
asan tsan: | $(STAMP)-build $(STAMP)-clang
	$(configure) --preset $@ -B $(BUILD_DIR)-$@
	cmake --build $(BUILD_DIR)-$@ -j $(JOBS) --target $(groups)
	$(call run_groups,$(BUILD_DIR)-$@)

coverage: | $(STAMP)-build $(STAMP)-coverage  ## Lines of the library that the unit tests run: a table, and pages in $BUILD_DIR-coverage/report
	$(configure) --preset $@ -B $(BUILD_DIR)-$@
	cmake --build $(BUILD_DIR)-$@ -j $(JOBS) --target $(groups)
	find $(BUILD_DIR)-$@ -name '*.gcda' -delete
	$(call run_groups,$(BUILD_DIR)-$@)
	mkdir -p $(BUILD_DIR)-$@/report
	gcovr --root . --filter include/ --filter src/ --exclude src/bindings/ \
	  --gcov-ignore-parse-errors=negative_hits.warn_once_per_file --gcov-ignore-parse-errors=suspicious_hits.warn_once_per_file \
	  --print-summary --txt $(BUILD_DIR)-$@/report/table.txt --html-details $(BUILD_DIR)-$@/report/index.html $(BUILD_DIR)-$@

fuzz: | $(STAMP)-build $(STAMP)-clang  ## Random input for the readers of files, $SECONDS for each of them, in $BUILD_DIR-fuzz
	$(configure) --preset fuzz -B $(BUILD_DIR)-fuzz
	cmake --build $(BUILD_DIR)-fuzz -j $(JOBS) --target fuzz
	for target in $(notdir $(wildcard tests/fuzz/corpus/*)); do \
	  mkdir -p $(BUILD_DIR)-fuzz/found/$$target; \
	  $(BUILD_DIR)-fuzz/tests/fuzz/fuzz_$$target -max_total_time=$(SECONDS) -max_len=8192 -malloc_limit_mb=64 -verbosity=0 \
	    -print_final_stats=1 -artifact_prefix=$(BUILD_DIR)-fuzz/$$target- $(BUILD_DIR)-fuzz/found/$$target tests/fuzz/corpus/$$target; \
	done

tidy: $(BUILD_DIR)/build.ninja $(STAMP)-tidy  ## clang-tidy over the library's sources
	find src -name '*.cpp' | xargs -n 1 -P $(JOBS) clang-tidy -p $(BUILD_DIR) --quiet

torch-compat:  ## The unit tests in C++ and the tests in Python with another torch, TORCH=2.15.0, and all that is made for it in $BUILD_DIR-torch-2.15.0
	@[ -n "$(TORCH)" ] || { echo "make torch-compat: give TORCH=, a version of torch" >&2; exit 2; }
	TORCH=$(TORCH) make test VENV=$(BUILD_DIR)-torch-$(TORCH)/venv BUILD_DIR=$(BUILD_DIR)-torch-$(TORCH) ARGS='-L "unit|python" $(ARGS)'

# With a CUDA build of torch, of the version and for the Python of the machine with the GPU; several GB.
CUDA_VENV ?= .venv-cuda
nccl = $(BUILD_DIR)-cuda/nccl-$(NCCL)
gpu-kit: export VENV := $(CUDA_VENV)
gpu-kit: export PATH := $(abspath $(CUDA_VENV))/bin:$(PATH)
gpu-kit:  ## Pack gpu-kit/ for a machine with a GPU and no network (docs/run/gpu.md): TORCH=2.11.0 GPU_PYTHON=python3.12 NCCL=2.32.3
	[ -e $(VENV)/.setup-cuda ] || { TORCH=$(TORCH) GPU_PYTHON=$(GPU_PYTHON) scripts/setup.sh cuda && touch $(VENV)/.setup-cuda; }
	$(configure) -DFSDP_CUDA=ON -DFSDP_BUILD_BENCH=OFF -DFSDP_BUILD_TOOLS=OFF -DFSDP_SENTENCEPIECE_LIBRARY=NO --preset release -B $(BUILD_DIR)-cuda
	cmake --build $(BUILD_DIR)-cuda -j $(JOBS) --target fsdp_python train_gpt finetune_llama check_capture check_kernels
	$(if $(NCCL),python -m pip install -q --upgrade --no-deps --target $(nccl) "nvidia-nccl-cu$$(python -c 'import torch; print(torch.version.cuda.split(".")[0])')==$(NCCL)")
	python tests/gpu/pack.py --build $(BUILD_DIR)-cuda --out gpu-kit $(if $(NCCL),--nccl $(nccl)/nvidia/nccl/lib/libnccl.so.2)

clean:  ## Remove the build directories; the virtual environment stays
	rm -rf $(BUILD_DIR) $(BUILD_DIR)-asan $(BUILD_DIR)-tsan $(BUILD_DIR)-coverage $(BUILD_DIR)-fuzz $(BUILD_DIR)-mutants $(BUILD_DIR)-wheel $(BUILD_DIR)-cuda $(BUILD_DIR)-torch-* gpu-kit
