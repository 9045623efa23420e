#!/usr/bin/env bash
# Runs stages of the kit (docs/run/gpu.md) on a machine with a GPU. Nothing is fetched: it needs python3 with torch, and a compiler only if
# this machine's Python or torch are not those that the kit was built for.
#
#   gpu-kit/run.sh [--out FOLDER] [--work FOLDER] [--python PYTHON] [--device cpu] [--patience N] [--compile] [--mps] [--only TEXT] STAGE...
#
# FOLDER of --out (default: gpu-kit-results) gets tables.md, results.json, log.txt and traces.zip; that of --work what is unpacked.
# --device cpu rehearses with small sizes. --patience multiplies the stages' time limits. --compile leaves the kit's libraries alone.
# --mps lets processes use the GPU at the same time (CUDA's MPS), where else they take turns: of ranks that share it, this makes a lot.
# --only runs of each stage the programs in whose command TEXT is.
set -euo pipefail

kit=$(cd "$(dirname "$0")" && pwd)
out=gpu-kit-results
work=${TMPDIR:-/tmp}/libfsdp-gpu-kit-$(id -u)
python=python3
device=${FSDP_TEST_DEVICE:-cuda}
compile=
mps=
only=
patience=1
stages=()
while [ $# -gt 0 ]; do
  case $1 in
    --out) out=$2 && shift 2 ;;
    --work) work=$2 && shift 2 ;;
    --python) python=$2 && shift 2 ;;
    --device) device=$2 && shift 2 ;;
    --patience) patience=$2 && shift 2 ;;
    --compile) compile=yes && shift ;;
    --only) only=$2 && shift 2 ;;
    --mps) mps=yes && shift ;;
    [1-9]) stages+=("$1") && shift ;;
    *) sed -n '2,11s/^# \{0,1\}//p' "$0" >&2 && exit 2 ;;
  esac
done
[ ${#stages[@]} -gt 0 ] || { sed -n '2,11s/^# \{0,1\}//p' "$0" >&2 && exit 2; }
begun=$SECONDS
mkdir -p "$work"
work=$(cd "$work" && pwd) # Programs of a stage run in other folders.

if ! cmp -s "$kit/kit.json" "$work/kit.json"; then
  rm -rf "$work"
  mkdir -p "$work"
  for part in "$kit"/*.tar.*; do
    "$python" -W ignore -m tarfile -e "$part" "$work/$(basename "${part%.tar.*}")"
  done
  cp "$kit/kit.json" "$work/kit.json"
fi

torch=$("$python" -c 'import torch; print(torch.__path__[0])')
export FSDP_TEST_DEVICE=$device OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
GPU_KIT_COMMIT=$("$python" -c 'import json, sys; print(json.load(open(sys.argv[1]))["commit"])' "$work/kit.json")
export GPU_KIT_COMMIT
[ ! -e "$work/nccl" ] || export GPU_KIT_NCCL=$work/nccl/libnccl.so.2

libraries=$torch/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
use() {
  export FSDP_EXAMPLES=$1/examples LD_LIBRARY_PATH=$1/lib:$libraries
  export PYTHONPATH=$1/python:$work/tree/tests/python:$work/tree/tests/gpu:$work/peers
}
use "$work/prebuilt"
if [ -n "$compile" ] || ! "$python" -c 'import libfsdp'; then
  echo "gpu-kit: compiling the library for this machine's Python and torch"
  cuda=$("$python" -c 'import torch; print("ON" if torch.version.cuda else "OFF")')
  cmake -G Ninja -S "$work/tree" -B "$work/build" --log-level=WARNING -DCMAKE_BUILD_TYPE=Release -DFSDP_CUDA="$cuda" \
    -DCMAKE_CXX_FLAGS="-isystem $work/headers/include" -DPython3_EXECUTABLE="$(command -v "$python")" \
    -DCMAKE_PREFIX_PATH="$torch/share/cmake;$work/headers" -DFSDP_BUILD_TESTS=OFF -DFSDP_BUILD_BENCH=OFF -DFSDP_BUILD_TOOLS=OFF
  cmake --build "$work/build" --target fsdp_python train_gpt finetune_llama check_capture check_kernels
  use "$work/build"
  "$python" -c 'import libfsdp'
fi
if [ -n "$mps" ]; then
  export CUDA_MPS_PIPE_DIRECTORY=$work/mps CUDA_MPS_LOG_DIRECTORY=$work/mps
  mkdir -p "$work/mps"
  nvidia-cuda-mps-control -d
  trap 'echo quit | nvidia-cuda-mps-control' EXIT
  timeout 20 "$python" -c 'import torch; torch.ones(1, device="cuda").item()'
fi
echo "gpu-kit: ready after $((SECONDS - begun)) s"
"$python" "$work/tree/tests/gpu/stages.py" --out "$out" --patience "$patience" --only "$only" "${stages[@]}"
