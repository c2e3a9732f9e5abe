#!/usr/bin/env bash
# The demo: the shipped model's expert layers become NVFP4 and run on its recorded activations.
#   examples/demo.sh PATH-TO-MEGAMOE
set -euo pipefail
megamoe=$(realpath "$1")
cd "$(dirname "$0")"
model=tiny-qwen3-moe
recorded=$model/activations.safetensors
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

say() { printf '\n== %s\n' "$*"; }
run() { "$megamoe" run "$@" --activations "$recorded" --repeat 3; }

say "The model as it was trained: $model, BF16"
"$megamoe" inspect "$model"

say "Its experts, quantised to NVFP4"
"$megamoe" quantize "$model" "$out/nvfp4" --activations dynamic

say "What was written"
"$megamoe" inspect "$out/nvfp4"

say "Every expert against its source"
"$megamoe" verify "$out/nvfp4" "$model"

say "Both layers on the recorded activations, against the recorded output"
printf '   (the error of the layer is the column "before rounding": the output itself is BF16)\n'
say "BF16 weights"
run "$model"
say "W4A16: NVFP4 weights, BF16 activations"
run "$out/nvfp4" --format bf16
say "W4A8: NVFP4 weights, FP8 activations"
run "$out/nvfp4" --format fp8
say "W4A4: NVFP4 weights and activations, tensor scales from the data"
run "$out/nvfp4" --format nvfp4 --x-scale tensor --h-scale tensor
say "W4A4 with static scales from calibration: h becomes FP4 inside the first GEMM"
"$megamoe" calibrate "$model" --activations "$recorded" -o "$out/scales.json" >/dev/null
"$megamoe" quantize "$model" "$out/static" --activations static --scales "$out/scales.json" >/dev/null
run "$out/static" --format nvfp4
