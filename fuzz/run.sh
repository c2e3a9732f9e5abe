#!/usr/bin/env bash
# Runs all fuzz targets at the same time, each over its corpus for SECONDS (default 60). New inputs and what each target
# said stay in build/fuzz; a finding is shown and makes this fail.
#   fuzz/run.sh [SECONDS]     after `cmake --preset fuzz && cmake --build --preset fuzz`
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${1:-60}
names=(safetensors config)
declare -A running
mkdir -p build/fuzz/findings
for name in "${names[@]}"; do
  mkdir -p "build/fuzz/corpus/$name"
  # A limit on memory and on the time of one input: hostile files may cost neither.
  "build/fuzz/fuzz/fuzz_$name" -max_total_time="$seconds" -max_len=8192 -rss_limit_mb=1024 -timeout=5 \
    -dict="fuzz/$name.dict" -artifact_prefix="build/fuzz/findings/$name-" -print_final_stats=1 -print_funcs=0 -verbosity=0 \
    "build/fuzz/corpus/$name" "fuzz/corpus/$name" >"build/fuzz/$name.log" 2>&1 &
  running[$name]=$!
done

status=0
for name in "${names[@]}"; do
  echo "== fuzz_$name, $seconds s"
  if wait "${running[$name]}"; then
    grep '^stat::' "build/fuzz/$name.log"
  else
    cat "build/fuzz/$name.log"
    status=1
  fi
done
exit $status
