#!/usr/bin/env bash
# The checks beside the tests: include order, formatting, links, linter. Prints what is wrong and exits with 1.
#   tools/check.sh          all of them
#   tools/check.sh --fast   without the linter, which takes minutes
set -euo pipefail
cd "$(dirname "$0")/.."

echo "== Include order"
python3 tools/check_includes.py

echo "== Formatting"
mapfile -t sources < <(git ls-files '*.h' '*.cc' '*.cu' '*.cuh')
clang-format --dry-run --Werror "${sources[@]}"

echo "== Links in documents"
python3 tools/check_links.py

[ "${1:-}" = --fast ] && exit 0

echo "== Linter"
# A tree of its own: the compiler's precompiled headers are not the linter's.
cmake --preset dev -B build/lint -DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON >/dev/null
# The GPU's sources are not part of this tree.
mapfile -t units < <(git ls-files 'src/*.cc' 'cli/*.cc' ':!src/cuda' | grep -v '_test\.cc$')
printf '%s\n' "${units[@]}" | xargs -P "$(nproc)" -n 4 clang-tidy --quiet -p build/lint 2>/dev/null
