# launch.sh torchrun|mpirun|by_hand PYTHON PROGRAM: starts two ranks of PROGRAM, which checks what it finds, and then one that must fail.
set -eu
launcher=$1 python=$2 program=$3

missing() {
  echo "$launcher is missing: $1"
  exit 77
}

case $launcher in
  torchrun)
    "$python" -c 'import torch.distributed.run' 2>/dev/null || missing "$python has no torch"
    start() { "$python" -m torch.distributed.run --no-python --standalone --nproc-per-node 2 "$@"; }
    ;;
  mpirun)
    command -v mpirun >/dev/null || missing "no mpirun on the path; Debian's is in the package openmpi-bin"
    # Open MPI refuses to run as root, and more ranks than cores, unless told otherwise.
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
    start() { mpirun -np 2 "$@"; }
    ;;
  by_hand)
    start() { "$python" "$(dirname "$0")/by_hand.py" "$@"; }
    ;;
esac

output=$(mktemp)
trap 'rm -f "$output"' EXIT

start "$program" 2 >"$output" 2>&1 || { cat "$output"; exit 1; }
cat "$output"
for rank in 0 1; do
  grep -q "rank $rank of 2: one step as the whole model" "$output" || { echo "rank $rank has not said that it is done"; exit 1; }
done

# A failing rank fails the launch.
if start "$program" 3 >"$output" 2>&1; then
  echo "two ranks passed for three"
  exit 1
fi
grep -q "rank [01] failed: expected 3 ranks, found 2" "$output" || { cat "$output"; echo "no rank has said why it failed"; exit 1; }

# Where torchrun's agent serves the store, a rank says there that it has ended.
[ "$launcher" = torchrun ] || exit 0
[ "$(grep -c "failed: expected 3 ranks, found 2" "$output")" -eq 1 ] || { cat "$output"; echo "both ranks have said the same"; exit 1; }
if start "$program" 2 uneven >"$output" 2>&1; then
  echo "ranks with different numbers of batches passed"
  exit 1
fi
grep -q "rank 1 failed: .*rank 0 had ended its training: the ranks take different numbers of steps" "$output" || {
  cat "$output"
  echo "nobody has said that rank 0 had ended"
  exit 1
}
