"""Quantises the shipped model and looks at what has come of it: examples/python/quantize_model.py [OUT]"""

# %% Where things are
import pathlib
import sys
import tempfile

import numpy as np

import megamoe

model = pathlib.Path(__file__).resolve().parents[1] / "tiny-qwen3-moe"
out = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()) / "tiny-qwen3-moe-nvfp4"

# %% A matrix: its codes, block scales and tensor scale
weight = megamoe.open(model).layer(0).expert(3).down.dequantize()
q = megamoe.quantize(weight)
print(q)
print("the first block's codes", q.codes[0, :8], "and scale", q.scales[0, 0])
print(f"relative error {np.linalg.norm(q.dequantize() - weight) / np.linalg.norm(weight):.4f}")

# %% The whole model, under the names that ModelOpt uses
report = megamoe.quantize_checkpoint(model, out, activations="dynamic")
print(f"{report['quantized_linears']} matrices, {report['source_bytes']:,} bytes became {report['output_bytes']:,}: {out}")

# %% What is in it
checkpoint = megamoe.open(out)
for layer in checkpoint.layers:
    scales = [expert.up.tensor_scale for expert in layer.experts]
    print(f"{layer}: tensor scales {min(scales):.3g} to {max(scales):.3g}")
for finding in checkpoint.findings():
    print(f"{finding['severity']}: {finding['text']}")

# %% One of its layers on noise, in each format of activations, against BF16 weights
x = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)
reference = megamoe.MoELayer.from_checkpoint(model, 0)
ids, weights = reference.route(reference.router_logits(x))
expected = reference(x, ids, weights)
for activations in ("bf16", "fp8", "nvfp4"):
    y = megamoe.MoELayer.from_checkpoint(out, 0, activations=activations)(x, ids, weights)
    print(f"{activations:<6} relative error {np.linalg.norm(y - expected) / np.linalg.norm(expected):.4f}")
