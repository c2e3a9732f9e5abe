#!/usr/bin/env bash
# Compiles, and takes for an error what ptxas only remarks on: wgmma made to wait for each product (C7510 and the like),
# setmaxnreg ignored (C7508).
#   tools/compile_gemm.sh OBJECT COMPILER ARGUMENT...
set -euo pipefail
object=$1
status=0
said=$("${@:2}" 2>&1) || status=$?
[ -z "$said" ] || printf '%s\n' "$said"
if grep -q "Potential Performance Loss" <<<"$said"; then
  echo "error: the compiler slows a GEMM down, see above" >&2
  rm -f "$object"
  status=1
fi
exit $status
