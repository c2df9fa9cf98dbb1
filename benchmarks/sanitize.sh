#!/usr/bin/env bash
# compute-sanitizer over a handful of small calls: memcheck (addresses) and racecheck (shared memory), for each backend.
#
#   benchmarks/sanitize.sh [BACKEND ...]        (default: hopper triton)
#
# PYTHON is the Python to use (default: python); JOBS, how many processes work side by side (default: 1); TOOLS, which tools
# (default: memcheck racecheck). PyTorch's allocator is told to give every tensor memory of its own, since memcheck cannot see a
# read past the end of a tensor into memory that the allocator holds. Failed calls of the driver are not counted: Triton asks for
# a mode of shared memory that this driver refuses, and then for the older one. `sanitize.py reports` counts what the tools say,
# and sets apart Triton's own hand-over of work to the warps of a specialized kernel. Exit status 0: all clean.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ "${1:-}" = "-h" ] || [ "${1:-}" = "--help" ]; then
  sed -n '2,10s/^# \{0,1\}//p' "$0"
  exit 0
fi
command -v compute-sanitizer >/dev/null || { echo "sanitize: error: compute-sanitizer is not on PATH; the CUDA toolkit brings it." >&2; exit 2; }
[ $# -gt 0 ] || set -- hopper triton
export python="${PYTHON:-python}" jobs="${JOBS:-1}" tools="${TOOLS:-memcheck racecheck}"
export PYTORCH_NO_CUDA_MEMORY_CACHING=1

part() { # BACKEND PART: compiles outside the tools, then runs under each
  local status=0 log
  "$python" benchmarks/sanitize.py "$1" "$2/$jobs" || return 1
  for tool in $tools; do
    options="--tool $tool --target-processes all --print-limit 1000"
    [ "$tool" != memcheck ] || options="$options --report-api-errors no"
    log=$(compute-sanitizer $options "$python" benchmarks/sanitize.py "$1" "$2/$jobs" 2>&1) || status=1
    "$python" benchmarks/sanitize.py reports <<<"== $1, part $2 of $jobs: $tool"$'\n'"$log" || status=1
  done
  return $status
}
export -f part

status=0
for backend in "$@"; do
  seq 0 $((jobs - 1)) | xargs -P "$jobs" -I{} bash -c 'part "$0" {}' "$backend" || { echo "== $backend FAILED"; status=1; }
done
exit $status
