#!/usr/bin/env bash
# Installs the Python package, and pinned versions of what its tests need, into build/venv, and runs the tests.
#   tools/test_python.sh [arguments for pytest]
# A command-line tool in build/cpu is compared with, bit for bit.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$PWD/build/venv

[ -e "$venv/bin/pip" ] || python3 -m venv "$venv"
rm -rf build/wheels
"$venv/bin/pip" wheel --quiet --no-deps --wheel-dir build/wheels \
  --config-settings=cmake.define.MEGAMOE_WERROR=ON . &
wheel=$!
# Meanwhile torch, which brings gigabytes; uv fetches side by side and links what it has fetched before.
"$venv/bin/pip" install --quiet uv==0.13.9
install() { "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" "$@"; }
install --requirements python/tests/requirements.txt --overrides python/tests/overrides.txt
wait $wheel
install --reinstall-package megamoe build/wheels/megamoe-*.whl

tool=$PWD/build/cpu/cli/megamoe
[ ! -x "$tool" ] || export MEGAMOE_CLI=$tool
# Two workers share the cores: each computes on its own, and threads that wait do not spin.
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive
"$venv/bin/python" -m pytest -q --numprocesses 2 "$@"
