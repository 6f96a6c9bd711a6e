#!/usr/bin/env bash
# The C++ tests of the core and the host device as one binary, under ThreadSanitizer, and under
# AddressSanitizer with UBSan:
#
#     scripts/sanitize.sh [thread] [address,undefined]
#
# It compiles what they need and no kernels but the executor's copies: kernels would take most of the
# time and have tests of their own; -DJAXGRAPH_SANITIZE=... builds everything with a sanitizer.
set -euo pipefail
cd "$(dirname "$0")/.."

sanitizers=("$@")
[ ${#sanitizers[@]} -gt 0 ] || sanitizers=(thread address,undefined)
export CXX=${CXX:-c++} UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1

for sanitizer in "${sanitizers[@]}"; do
  export build=build-sanitize/${sanitizer%%,*}
  export flags="-std=c++17 -O1 -g1 -fno-omit-frame-pointer -ffp-contract=off -I. -fsanitize=$sanitizer"
  mkdir -p "$build"
  rm -f "$build"/*.o
  printf '%s\n' ffi/core/*.cpp ffi/device/*.cpp ffi/device/host/*.cpp ffi/kernels/host/slot_copy.cpp \
    tests/ffi/core/*_test.cpp tests/ffi/device/*_test.cpp |
    xargs -P "$(nproc)" -I{} bash -c '$CXX $flags -c {} -o "$build/$(tr / _ <<<{}).o"'
  # shellcheck disable=SC2086
  $CXX $flags "$build"/*.o -o "$build/core_tests" -lgtest -lgtest_main -pthread
  echo "== $sanitizer"
  "$build/core_tests" --gtest_brief=1
done
