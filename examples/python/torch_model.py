"""Puts NVFP4 experts into the shipped model and lets it write: examples/python/torch_model.py

Needs torch and transformers.
"""

# %% The model, as transformers loads it; its tokens are bytes
import pathlib

import torch
from transformers import AutoModelForCausalLM

import megamoe.torch
from megamoe.evaluate import evaluate, read_windows
from megamoe.transformers import Recipe, replace_experts

path = pathlib.Path(__file__).resolve().parents[1] / "tiny-qwen3-moe"
model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
text = (path / "held_out.txt").read_bytes()


def write(prompt, count):
    ids = model.generate(torch.tensor([list(prompt)]), max_new_tokens=count, do_sample=False)
    return bytes(ids[0].tolist()).decode(errors="replace")


print("BF16 weights:", write(text[:64], 40))

# %% What quantised experts cost, in bits for a byte of text that it has not seen
for result in evaluate(model, read_windows(path, 256, text, 8, 256)):
    print(f"{result.activations or 'as it is':<9} {result.bits_per_byte:.4f}")

# %% The same model with experts in NVFP4, activations too
replacement = replace_experts(model, Recipe(four_over_six=True), activations="nvfp4")
print(model.model.layers[0].mlp)
print("NVFP4:", write(text[:64], 40))

# %% A layer in a model of one's own, compiled as one graph
layer = next(iter(replacement.layers.values()))


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.RMSNorm(layer.config["hidden"])
        self.router = torch.nn.Linear(layer.config["hidden"], layer.config["num_experts"], bias=False)
        self.experts = megamoe.torch.Experts(layer)

    def forward(self, x):
        y = self.norm(x)
        weights, ids = torch.softmax(self.router(y), dim=-1).topk(layer.config["top_k"])
        return x + self.experts(y, ids, weights)


block = Block().eval()
compiled = torch.compile(block, fullgraph=True)
with torch.inference_mode():
    x = torch.randn(32, layer.config["hidden"])
    eager = block(x)
    print(f"compiled and eager differ by {(compiled(x) - eager).norm() / eager.norm():.2g} of the norm")
