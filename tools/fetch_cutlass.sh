#!/usr/bin/env bash
# Puts CUTLASS's headers, which the Hopper kernels need, under build/python and prints the folder to give to CMake:
#   cmake --preset hopper -DCUTLASS_DIR=$(tools/fetch_cutlass.sh)
set -euo pipefail
cd "$(dirname "$0")/.."
python=$PWD/build/python
include=$python/cutlass_library/source/include

if [ ! -e "$python/nvidia_cutlass-4.2.0.0.dist-info" ]; then
  if ! python3 -m pip --version >/dev/null 2>&1; then
    echo "CUTLASS's headers are fetched by pip, which is not there: install python3-pip" >&2
    exit 1
  fi
  rm -rf "$python"
  # The headers alone: what the package's Python code depends on is not needed.
  PIP_ROOT_USER_ACTION=ignore python3 -m pip install --quiet --no-deps --target "$python" nvidia-cutlass==4.2.0.0 >&2
fi
echo "$include"
