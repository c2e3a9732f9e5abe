"""Puts NVFP4 experts into Hugging Face models."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor, nn

import megamoe
from megamoe import MoELayer, Nvfp4Tensor
from megamoe.torch import Experts


@dataclass(frozen=True)
class Recipe:
    """How replace_experts makes a model's own experts NVFP4."""

    four_over_six: bool = False  # as megamoe.quantize
    gate_up_scale: str = "shared"  # "shared": one tensor scale for an expert's gate and up; or "separate"


@dataclass
class Replacement:
    """What replace_experts has put in, and the modules that were there before, which it keeps alive."""

    layers: dict[str, MoELayer]  # by the module's name
    _originals: dict[str, nn.Module]
    _model: nn.Module

    def restore(self) -> None:
        """Puts the modules back that were there before."""
        for name, module in self._originals.items():
            _set_module(self._model, name, module)


def replace_experts(model: nn.Module, source: str | os.PathLike[str] | Recipe = Recipe(),
                    **options: Any) -> Replacement:
    """Replaces the routed experts of every mixture-of-experts block of a model by NVFP4 ones.

    model    a model of transformers 5 or newer whose experts are one module with gate_up_proj and down_proj: Qwen3-MoE,
             Mixtral, DeepSeek-V3, gpt-oss and others alike. Its routers and shared experts stay as they are.
    source   a quantised checkpoint, whose layers are matched by number; or a Recipe: the model's own experts, quantised
    options  backend, activations, x_scale, h_scale and device, as MoELayer.from_checkpoint

    The model then computes no gradients through its experts, and does not save them: restore() them first. Raises
    ValueError where the model has no such block or is one itself, or the checkpoint's layer has another shape, LookupError
    where it lacks the layer, NotImplementedError for an activation the library does not have.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch module, got {type(model).__name__}")
    blocks = {name: module for name, module in model.named_modules() if _is_experts(module)}
    if not blocks:
        raise ValueError(f"model must have modules with 3-dimensional gate_up_proj and down_proj, {type(model).__name__} "
                         "has none")
    if "" in blocks:
        raise ValueError(f"model must hold the experts' modules, got such a module itself, {type(model).__name__}")
    checkpoint = None if isinstance(source, Recipe) else megamoe.open(source)
    layers = {name: _make_layer(name, module, source, checkpoint, options) for name, module in blocks.items()}
    for name, layer in layers.items():
        _set_module(model, name, Experts(layer))
    return Replacement(layers, blocks, model)


def _is_experts(module: nn.Module) -> bool:
    weights = [getattr(module, name, None) for name in ("gate_up_proj", "down_proj")]
    return all(isinstance(weight, Tensor) and weight.dim() == 3 for weight in weights)


def _set_module(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, module)


# Modules are Any from here on: their parameters are theirs to name.
def _make_layer(name: str, module: Any, source: str | os.PathLike[str] | Recipe,
                checkpoint: megamoe.Checkpoint | None, options: dict[str, Any]) -> MoELayer:
    if module.down_proj.is_cuda:
        options = {"device": module.down_proj.device.index} | options
    transposed = getattr(module, "is_transposed", False)
    experts, hidden, intermediate = module.down_proj.shape
    if transposed:
        hidden, intermediate = intermediate, hidden
    if isinstance(source, Recipe):
        return _quantize_experts(name, module, transposed, intermediate, source, options)
    number = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
    if number is None:
        raise ValueError(f"the module's name must say its layer (layers.N), got {name}")
    encoding = checkpoint.layer(int(number[1])).expert(0).down.encoding
    if encoding not in ("nvfp4", "mxfp4"):
        raise ValueError(f"{source} must hold experts in NVFP4 or MXFP4, got {encoding} ones; a Recipe quantises the "
                         "model's own")
    layer = MoELayer.from_checkpoint(source, int(number[1]), routed_only=True, **options)
    shape = tuple(layer.config[key] for key in ("num_experts", "hidden", "intermediate"))
    if shape != (experts, hidden, intermediate):
        raise ValueError(f"{name} has {experts} experts of hidden size {hidden} and intermediate size {intermediate}, "
                         f"got a checkpoint with {shape}")
    return layer


def _quantize_experts(name: str, module: Any, transposed: bool, intermediate: int, recipe: Recipe,
                      options: dict[str, Any]) -> MoELayer:
    if recipe.gate_up_scale not in ("shared", "separate"):
        raise ValueError(f"gate_up_scale must be shared or separate, got {recipe.gate_up_scale}")
    if getattr(module, "has_post_expert_norm", False):
        raise NotImplementedError(f"{name} has a norm behind each expert, which is not supported")
    concatenated = getattr(module, "is_concatenated", True)

    def halves(rows: Tensor) -> tuple[Tensor, Tensor]:  # of gate and up, which lie behind or between each other
        return (rows[:intermediate], rows[intermediate:]) if concatenated else (rows[::2], rows[1::2])

    gate: list[Nvfp4Tensor] = []
    up: list[Nvfp4Tensor] = []
    down: list[Nvfp4Tensor] = []
    for gate_up_proj, down_proj in zip(module.gate_up_proj, module.down_proj):
        gate_up, second = ((weight.T if transposed else weight).detach().cpu() for weight in (gate_up_proj, down_proj))
        first = halves(gate_up)
        scale = None
        if recipe.gate_up_scale == "shared":
            largest = numpy.float32(gate_up.abs().max().item())
            scale = float(largest / numpy.float32(1536 if recipe.four_over_six else 2688)) or 1.0
        for matrices, weight in ((gate, first[0]), (up, first[1])):
            matrices.append(megamoe.quantize(weight, tensor_scale=scale, four_over_six=recipe.four_over_six))
        down.append(megamoe.quantize(second, four_over_six=recipe.four_over_six))
    biases: dict[str, Any] = {}
    if getattr(module, "has_bias", False):
        gate_bias, up_bias = halves(module.gate_up_proj_bias.detach().cpu().T)
        biases = {"gate_bias": gate_bias.T, "up_bias": up_bias.T, "down_bias": module.down_proj_bias.detach().cpu()}
    return MoELayer.from_weights(gate, up, down, top_k=_top_k(name, module), name=name, **_activation(name, module),
                                 **biases, **options)


def _top_k(name: str, module: Any) -> int:
    top_k = getattr(getattr(module, "config", None), "num_experts_per_tok", None)
    if not isinstance(top_k, int):
        raise ValueError(f"{name} must have a config with num_experts_per_tok")
    return top_k


def _activation(name: str, module: Any) -> dict[str, Any]:
    """The activation by what it does to some numbers: classes tell it in many ways."""
    def silu(gate: Tensor, up: Tensor) -> Tensor:
        return gate / (1 + torch.exp(-gate)) * up

    limit, alpha = (float(getattr(module, key, None) or 0) for key in ("limit", "alpha"))
    known: list[tuple[dict[str, Any], Callable[[Tensor, Tensor], Tensor]]] = [({"activation": "swiglu"}, silu)]
    if limit > 0:
        known.append(({"activation": "swiglu-clamped", "limit": limit},
                      lambda gate, up: silu(gate.clamp(max=limit), up.clamp(-limit, limit))))
        known.append(({"activation": "gpt-oss", "limit": limit, "alpha": alpha},
                      lambda gate, up: gate.clamp(max=limit) * torch.sigmoid(alpha * gate.clamp(max=limit)) *
                      (up.clamp(-limit, limit) + 1)))
    line = torch.linspace(-20, 20, 41, dtype=torch.float64)
    gate, up = torch.cartesian_prod(line, line).T
    if hasattr(module, "_apply_gate"):
        pairs = torch.cat((gate, up)) if getattr(module, "is_concatenated", True) else torch.stack((gate, up), 1).ravel()
        result = module._apply_gate(pairs[None])[0]
    else:
        result = module.act_fn(gate) * up
    for config, function in known:
        if torch.allclose(result, function(gate, up), rtol=1e-6, atol=1e-9):
            return config
    raise NotImplementedError(f"{name} must have SwiGLU, clamped SwiGLU or gpt-oss's activation, got another function")
