#!/usr/bin/env bash
# Everything that needs a GPU, in one go: the tests, a small part of them under compute-sanitizer, the benchmarks;
# a short table last. Usage: tools/gpu_test.sh [folder with gpu_test and the benchmarks] [folder for logs]
#
# The folder may be a build folder or a copy of its programs (with libfmt.so.* and libgomp.so.* beside them, where the
# machine lacks those). Where a wheel of the Python package lies there too, python3 (with torch and pytest) tests it. A
# compute-sanitizer that lies there is used before the machine's own.
set -uo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
programs=${1:-$here/build/hopper}
logs=${2:-$(mktemp -d)}
mkdir -p "$logs"
export LD_LIBRARY_PATH=$programs${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
find_program() { find "$programs" -maxdepth 3 -type f -name "$1" -perm -u+x | head -n 1; }

failed=0
table=()
step() {  # step NAME command...: runs it, keeps its output, notes how it went
  local name=$1 log started=$SECONDS
  shift
  log=$logs/${name// /_}.log
  if "$@" >"$log" 2>&1; then
    table+=("$(printf '%-24s ok      %4d s' "$name" $((SECONDS - started)))")
  else
    failed=1
    table+=("$(printf '%-24s FAILED  %4d s  %s' "$name" $((SECONDS - started)) "$log")")
    grep -E "FAILED|Failure|differ|Error|ERROR|=========" "$log" | head -n 30
    tail -n 5 "$log"
  fi
}

gpu_test=$(find_program gpu_test)
tool=$(find_program megamoe)
if [ -z "$gpu_test" ]; then
  echo "no gpu_test under $programs: build with cmake --preset hopper" >&2
  exit 2
fi
step "gpu_test" "$gpu_test" --gtest_brief=1
engine_test=$(find_program engine_test)
[ -z "$engine_test" ] || step "engine_test" "$engine_test" --gtest_brief=1 '--gtest_filter=LayerBenchTest*:BenchTargets*:Tune*'
step "first call captured" "$gpu_test" --gtest_brief=1 --gtest_filter='PassTest.IsCapturedByItsVeryFirstCall'
conformance_test=$(find_program conformance_test)
[ -z "$conformance_test" ] || step "conformance" "$conformance_test" --gtest_brief=1 --gtest_filter='*/hopper'

wheel=$(find "$programs" -maxdepth 1 -name 'megamoe-*.whl' | head -n 1)
if [ -n "$wheel" ]; then
  python3 -m pip install --quiet --no-index --no-deps --target "$logs/site" "$wheel"
  export PYTHONPATH=$logs/site${PYTHONPATH:+:$PYTHONPATH}
  [ -z "$tool" ] || export MEGAMOE_CLI=$tool
  step "python" python3 -m pytest -q -rs -p no:cacheprovider "$here/python/tests/test_gpu.py"
fi

# FP4 is made in the epilogue, and nothing else is written (narrow tiles; codes): interleaved BF16 takes 4 bytes for an
# element of h, compact BF16 2, NVFP4 9/16.
written_bytes() {
  ncu --csv --metrics smsp__sass_data_bytes_mem_global_op_st.sum --kernel-name regex:grouped_gemm_kernel "$gpu_test" \
    --gtest_brief=1 --gtest_filter=FusedTest.OneCallOfEachMode |
    awk -F '","' '/grouped_gemm_kernel/ { gsub(/[",]/, "", $NF); bytes[n++] = $NF }
      END {
        printf "bytes written: compact %d, interleaved %d, nvfp4 %d\n", bytes[0], bytes[1], bytes[2]
        exit !(n == 3 && bytes[1] == 2 * bytes[0] && 64 * bytes[2] == 9 * bytes[1])
      }'
}
if command -v ncu >/dev/null; then
  step "written bytes" written_bytes
else
  table+=("written bytes            not counted: ncu is not installed")
fi

# The checkers slow kernels down a hundred times and more: the small written cases only. racecheck has a program of its
# own, whose GEMMs have each lane arrive at barriers where else one does for its warp.
small='*WrittenCase*:*WrittenBytes*:*StridedRows*:*GathersRows*:*NoTokensAndNoRows*:*FaultsSpoil*:*Dequantizes*'
small+=':*DecodesWhatItMade*'
small+=':*SortTest.IdsOutOfRange*:*Ties*:*DeinterleavedIsAsCompact*:*EqualsTheHost*:*Small*'
small+=':*OnlyTheRowsThatThereAre*:*AConstantScale*:*OneTensorScale*'
sanitizer=$(find_program compute-sanitizer)
[ -n "$sanitizer" ] || sanitizer=$(command -v compute-sanitizer)
if [ -n "$sanitizer" ]; then
  table+=("$("$sanitizer" --version | grep -i version | head -n 1)")
  racecheck_test=$(find_program gpu_racecheck)
  for checker in memcheck racecheck initcheck; do
    program=$gpu_test
    [ "$checker" != racecheck ] || program=$racecheck_test
    if [ -n "$program" ]; then
      step "$checker" "$sanitizer" --tool "$checker" --error-exitcode 9 "$program" --gtest_brief=1 "--gtest_filter=$small"
    else
      table+=("$checker                not run: no gpu_racecheck, build that target")
    fi
  done
else
  table+=("compute-sanitizer        not installed")
fi

benchmark() {  # benchmark NAME program [arguments]: a step whose output is shown
  [ -n "$2" ] || return 0
  step "$@"
  cat "$logs/${1// /_}.log"
}
benchmark bench_gpu_ops "$(find_program bench_gpu_ops)"
benchmark "megamoe bench" "$tool" bench --model deepseek-v4-flash --activations bf16,nvfp4,fp8 \
  --svg "$logs/deepseek-v4-flash.svg"
[ -z "$wheel" ] || [ -z "$tool" ] || benchmark "python overhead" python3 "$here/bench/python_overhead.py" "$tool"

printf '\n'
printf '%s\n' "${table[@]}"
exit $failed
