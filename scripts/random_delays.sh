#!/usr/bin/env bash
# A short decode with kernels whose warps are held up at random gives the same bits as without:
#
#     scripts/random_delays.sh [PYTHON]
#
# Builds the package a second time, into a temporary folder (-DJAXGRAPH_RANDOM_DELAYS=ON).
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3}
times=${TIMES:-3}

delayed=$(mktemp -d)
trap 'rm -rf "$delayed"' EXIT
"$python" -m pip install --quiet --no-build-isolation --no-deps --target "$delayed" \
  -C cmake.define.JAXGRAPH_RANDOM_DELAYS=ON .

digest() { "$python" -P tests/gpu/short_decode.py | sed -n 's/^digest //p'; }
wanted=$(digest)
echo "without delays: $wanted"
for ((i = 0; i < times; ++i)); do
  got=$(PYTHONPATH=$delayed digest)
  echo "with delays:    $got"
  [ -n "$got" ] && [ "$got" = "$wanted" ] || {
    echo "error: other bits with delays: a kernel depends on luck of timing" >&2
    exit 1
  }
done
