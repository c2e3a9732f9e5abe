#!/usr/bin/env bash
# Runs each fuzz target over its corpus for SECONDS (default 60). New inputs stay in build/fuzz; a finding ends the run.
#   fuzz/run.sh [SECONDS]     after `cmake --preset fuzz && cmake --build --preset fuzz`
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${1:-60}
for name in safetensors config; do
  echo "== fuzz_$name, $seconds s"
  mkdir -p "build/fuzz/corpus/$name" build/fuzz/findings
  # A limit on memory and on the time of one input: hostile files may cost neither.
  "build/fuzz/fuzz/fuzz_$name" -max_total_time="$seconds" -max_len=8192 -rss_limit_mb=1024 -timeout=5 \
    -dict="fuzz/$name.dict" -artifact_prefix="build/fuzz/findings/$name-" -print_final_stats=1 -print_funcs=0 -verbosity=0 \
    "build/fuzz/corpus/$name" "fuzz/corpus/$name"
done
