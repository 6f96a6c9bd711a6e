#!/usr/bin/env bash
# A short decode under NVIDIA's compute-sanitizer: memcheck, and racecheck for shared memory. XLA
# allocates every buffer by itself (platform allocator), so that an access beyond one shows; in the
# arena, which is one buffer, intermediates keep their distance.
#
#     scripts/compute_sanitizer.sh [PYTHON]
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3}
command -v compute-sanitizer >/dev/null || {
  echo "error: no compute-sanitizer in PATH (it comes with the CUDA toolkit)" >&2
  exit 2
}
export XLA_PYTHON_CLIENT_ALLOCATOR=platform XLA_PYTHON_CLIENT_PREALLOCATE=false
export JAXGRAPH_GUARD_BYTES=256

# Our kernels alone: XLA's are not ours to check. COMPUTE_SANITIZER_FLAGS: other options.
read -ra more <<<"${COMPUTE_SANITIZER_FLAGS:---kernel-name kernel_substring=jaxgraph}"
# racecheck follows every access to shared memory: it takes minutes, and gets the small model alone.
for tool in memcheck racecheck; do
  echo "== $tool"
  size=()
  [ "$tool" = racecheck ] && size=(--small)
  compute-sanitizer --tool "$tool" --error-exitcode 1 "${more[@]}" \
    "$python" -P tests/gpu/short_decode.py "${size[@]}"
done
