"""Plots the error of every expert of the shipped model, quantised: examples/python/expert_errors.py [PLOT.png]

Needs matplotlib.
"""

# %% Quantise, and hold every matrix against its source
import pathlib
import sys
import tempfile

import matplotlib
import numpy as np

import megamoe

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

model = pathlib.Path(__file__).resolve().parents[1] / "tiny-qwen3-moe"
plot = sys.argv[1] if len(sys.argv) > 1 else "expert_errors.png"
with tempfile.TemporaryDirectory() as folder:
    rows = {}
    for name, four_over_six in (("6 as the largest code", False), ("4 or 6, whichever is better", True)):
        out = pathlib.Path(folder) / str(four_over_six)
        megamoe.quantize_checkpoint(model, out, four_over_six=four_over_six)
        rows[name] = megamoe.verify(megamoe.open(out), megamoe.open(model))

# %% A square for each matrix: layers and projections down, experts across
projections = ("gate", "up", "down")
figure, axes = plt.subplots(len(rows), 1, figsize=(9, 5), sharex=True, layout="constrained")
limits = [op(row["relative_error"] for result in rows.values() for row in result) for op in (min, max)]
for axis, (name, result) in zip(axes, rows.items()):
    layers = sorted({row["layer"] for row in result})
    errors = np.zeros((len(layers) * len(projections), 1 + max(row["expert"] for row in result)))
    for row in result:
        line = layers.index(row["layer"]) * len(projections) + projections.index(row["projection"])
        errors[line, row["expert"]] = row["relative_error"]
    image = axis.imshow(errors, aspect="auto", vmin=limits[0], vmax=limits[1])
    axis.set_yticks(range(len(errors)), [f"layer {layer} {projection}" for layer in layers for projection in projections])
    axis.set_title(f"{name}: mean {errors.mean():.4f}")
axes[-1].set_xlabel("expert")
axes[-1].set_xticks(range(errors.shape[1]))
figure.colorbar(image, ax=axes, label="relative error of the weights")
figure.savefig(plot, dpi=120)
print(f"wrote {plot}")
