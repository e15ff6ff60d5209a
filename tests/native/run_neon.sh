#!/usr/bin/env bash
# Compile the native library and the test program for aarch64, and run the program at every level
# under qemu.   usage: run_neon.sh PYTHON     needs g++-aarch64-linux-gnu and qemu-user
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${1:-python3}
build=build/aarch64
root=/usr/aarch64-linux-gnu
for tool in aarch64-linux-gnu-g++ qemu-aarch64; do
  command -v "$tool" > /dev/null || {
    echo "$tool is missing: apt install g++-aarch64-linux-gnu qemu-user" >&2
    exit 2
  }
done
export CXX=aarch64-linux-gnu-g++ JUBAKO_MACHINE=aarch64 JUBAKO_REQUIRE_NATIVE=1
"$python" setup.py --quiet build_ext --build-lib "$build/lib" --build-temp "$build/objects/temp"
"$CXX" -std=c++17 -O2 -Wall -Wno-psabi -o "$build/ops" tests/native/ops.cpp -ldl -lpthread
for level in generic neon neon_bf16; do
  JUBAKO_CPU_ISA=$level qemu-aarch64 -cpu max -L "$root" \
    "$build/ops" "$build/lib/jubako/kernels/cpu/_native.so"
done
