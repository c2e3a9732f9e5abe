#!/usr/bin/env bash
# Installs the Python package, and pinned versions of what its tests need, into build/venv, and runs the tests.
#   tools/test_python.sh [arguments for pytest]
# The command-line tool that MEGAMOE_CLI names, or the one in build/cpu, is compared with, bit for bit.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$PWD/build/venv

include=$(python3 -c "import sysconfig; print(sysconfig.get_path('include'))")
if [ ! -e "$include/Python.h" ]; then
  echo "$(command -v python3) has no headers at $include: install them, or put another python3 on the PATH" >&2
  exit 1
fi
# The environment belongs to one Python and one set of pins: with others it is made anew.
pins=$(python3 -c "import sys; print(sys.executable, sys.version)"; cat python/tests/{requirements,overrides}.txt)
if [ "$pins" != "$(cat "$venv/pins" 2>/dev/null)" ]; then
  rm -rf "$venv"
  python3 -m venv "$venv"
fi
rm -rf build/wheels
set -m  # a process group of its own, which ends with the script
"$venv/bin/pip" wheel --quiet --no-deps --wheel-dir build/wheels \
  --config-settings=cmake.define.MEGAMOE_WERROR=ON --config-settings=cmake.define.CMAKE_UNITY_BUILD=ON \
  --config-settings=cmake.define.CMAKE_UNITY_BUILD_BATCH_SIZE=0 . &
wheel=$!
set +m
trap 'kill -- -$wheel 2>/dev/null && wait $wheel' EXIT
# Meanwhile torch, which brings gigabytes; uv fetches side by side and links what it has fetched before.
"$venv/bin/pip" install --quiet uv==0.13.9
install() { "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" "$@"; }
install --requirements python/tests/requirements.txt --overrides python/tests/overrides.txt
wait $wheel
trap - EXIT
install --reinstall-package megamoe build/wheels/megamoe-*.whl
printf '%s\n' "$pins" >"$venv/pins"

tool=$PWD/build/cpu/cli/megamoe
[ -n "${MEGAMOE_CLI:-}" ] || [ ! -x "$tool" ] || export MEGAMOE_CLI=$tool
# Two workers share the cores: each computes on its own, and threads that wait do not spin.
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive
"$venv/bin/python" -m pytest -q --numprocesses 2 "$@"
