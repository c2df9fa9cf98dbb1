#!/usr/bin/env bash
# compute-sanitizer over a handful of small calls: memcheck (addresses) and racecheck (shared memory), for each backend.
#
#   benchmarks/sanitize.sh [BACKEND ...]        (default: hopper triton)
#
# PYTHON is the Python to use (default: python). PyTorch's allocator is told to give every tensor memory of its own, since memcheck
# cannot see a read past the end of a tensor into memory that the allocator holds. Exit status 0: all clean.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ "${1:-}" = "-h" ] || [ "${1:-}" = "--help" ]; then
  sed -n '2,8s/^# \{0,1\}//p' "$0"
  exit 0
fi
command -v compute-sanitizer >/dev/null || { echo "sanitize: error: compute-sanitizer is not on PATH; the CUDA toolkit brings it." >&2; exit 2; }
[ $# -gt 0 ] || set -- hopper triton
python="${PYTHON:-python}"
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
status=0
for backend in "$@"; do
  "$python" benchmarks/sanitize.py "$backend"  # compiles, outside the tool
  for tool in memcheck racecheck; do
    echo "== $backend: $tool"
    compute-sanitizer --tool "$tool" --error-exitcode 3 --target-processes all --print-limit 20 \
      "$python" benchmarks/sanitize.py "$backend" || { echo "== $backend: $tool FAILED"; status=1; }
  done
done
exit $status
