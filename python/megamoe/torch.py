"""MegaMoE as torch operators, which torch.compile and CUDA graphs take, and as modules.

    torch.ops.megamoe.forward(x, topk_ids, topk_weights, layer) -> Tensor     [tokens, hidden], as x
    torch.ops.megamoe.route(logits, layer, token_ids=None) -> (Tensor, Tensor)  int32 and float32 [tokens, top_k]
    torch.ops.megamoe.router_logits(x, layer) -> Tensor                       float32 [tokens, num_experts]
    torch.ops.megamoe.quantize(x, tensor_scale=None, per_row=False, four_over_six=False) -> (codes, scales, tensor_scales)
    torch.ops.megamoe.dequantize(codes, scales, tensor_scales) -> Tensor      float32 [rows, cols]

`layer` is the name that register() gave to a MoELayer. The last two run on the CPU. No operator has a gradient.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
from torch import Tensor, nn

import megamoe
from megamoe import MoELayer

_layers: weakref.WeakValueDictionary[str, MoELayer] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def register(layer: MoELayer) -> str:
    """A name for `layer` that the operators take; it holds for as long as the layer lives."""
    if not isinstance(layer, MoELayer):
        raise TypeError(f"layer must be a MoELayer, got {type(layer).__name__}")
    # With what the operators' shapes depend on: torch keeps compiled graphs on disk, by the operators' arguments.
    name = f"layer{next(_numbers)}-{layer.config['num_experts']}-top{layer.config['top_k']}"
    _layers[name] = layer
    return name


def _layer(name: str) -> MoELayer:
    layer = _layers.get(name)
    if layer is None:
        raise LookupError(f"layer must be a name from megamoe.torch.register() whose layer still lives, got {name!r}")
    return layer


def _forward(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, layer: str) -> Tensor:
    return _layer(layer)(x, topk_ids, topk_weights)


def _forward_meta(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, layer: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _route(logits: Tensor, layer: str, token_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return _layer(layer).route(logits, token_ids)


def _route_meta(logits: Tensor, layer: str, token_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], _layer(layer).config["top_k"])
    return logits.new_empty(shape, dtype=torch.int32), logits.new_empty(shape, dtype=torch.float32)


def _router_logits(x: Tensor, layer: str) -> Tensor:
    return _layer(layer).router_logits(x)


def _router_logits_meta(x: Tensor, layer: str) -> Tensor:
    return x.new_empty((x.shape[0], _layer(layer).config["num_experts"]), dtype=torch.float32)


def _quantize(x: Tensor, tensor_scale: float | None = None, per_row: bool = False,
              four_over_six: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    q = megamoe.quantize(x, tensor_scale=tensor_scale, per_row=per_row, four_over_six=four_over_six)
    # Copies: a tensor may be written to.
    return torch.tensor(q.codes), torch.tensor(q.scales), torch.tensor(q.tensor_scales)


def _quantize_meta(x: Tensor, tensor_scale: float | None = None, per_row: bool = False,
                   four_over_six: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    rows, cols = x.shape
    return (x.new_empty((rows, cols // 2), dtype=torch.uint8), x.new_empty((rows, cols // 16), dtype=torch.uint8),
            x.new_empty((rows if per_row else 1,), dtype=torch.float32))


def _dequantize(codes: Tensor, scales: Tensor, tensor_scales: Tensor) -> Tensor:
    return torch.from_numpy(megamoe.Nvfp4Tensor(codes, scales, tensor_scales).dequantize())


def _dequantize_meta(codes: Tensor, scales: Tensor, tensor_scales: Tensor) -> Tensor:
    return codes.new_empty((codes.shape[0], codes.shape[1] * 2), dtype=torch.float32)


# The router goes by way of the CPU, which a CUDA graph cannot record; older versions of torch have no word for that.
_not_in_graphs = (torch.Tag.cudagraph_unsafe,) if hasattr(torch.Tag, "cudagraph_unsafe") else ()

_library = torch.library.Library("megamoe", "DEF")
for _schema, _run, _meta, _devices, _tags in (
        ("forward(Tensor x, Tensor topk_ids, Tensor topk_weights, str layer) -> Tensor", _forward, _forward_meta,
         ("CPU", "CUDA"), ()),
        ("route(Tensor logits, str layer, Tensor? token_ids=None) -> (Tensor, Tensor)", _route, _route_meta,
         ("CPU", "CUDA"), _not_in_graphs),
        ("router_logits(Tensor x, str layer) -> Tensor", _router_logits, _router_logits_meta, ("CPU", "CUDA"),
         _not_in_graphs),
        ("quantize(Tensor x, float? tensor_scale=None, bool per_row=False, bool four_over_six=False) -> "
         "(Tensor, Tensor, Tensor)", _quantize, _quantize_meta, ("CPU",), ()),
        ("dequantize(Tensor codes, Tensor scales, Tensor tensor_scales) -> Tensor", _dequantize, _dequantize_meta,
         ("CPU",), ())):
    _name = _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag, *_tags))
    for _device in _devices:
        _library.impl(_name, _run, _device)
    torch.library.register_fake(f"megamoe::{_name}", _meta, lib=_library)

_forward_operator = torch.ops.megamoe.forward.default


class Experts(nn.Module):
    """The routed experts of a layer as a module: forward(x, topk_ids, topk_weights).

    x is [..., hidden] of bfloat16, float32 or float16, topk_ids and topk_weights [tokens, top_k], tokens being the
    product of x's leading dimensions; the result has x's shape and type. There are no parameters and no gradients.
    """

    def __init__(self, layer: MoELayer) -> None:
        super().__init__()
        self.layer = layer
        self.name = register(layer)

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        if x.dim() == 2:
            return _forward_operator(x, topk_ids, topk_weights, self.name)
        tokens = x.reshape(-1, x.shape[-1])
        return _forward_operator(tokens, topk_ids, topk_weights, self.name).reshape(x.shape)

    def extra_repr(self) -> str:
        return repr(self.layer)

    def __deepcopy__(self, memo: dict[int, Any]) -> Experts:
        return Experts(self.layer)  # weights are never written to


class MoE(nn.Module):
    """A whole layer of a checkpoint as a module: its router, its experts and its shared expert.

    forward(x, token_ids=None) takes x [..., hidden], and token ids where the layer is routed by them.
    """

    def __init__(self, layer: MoELayer) -> None:
        super().__init__()
        self.experts = Experts(layer)

    def forward(self, x: Tensor, token_ids: Tensor | None = None) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        logits = torch.ops.megamoe.router_logits(tokens, self.experts.name)
        topk_ids, topk_weights = torch.ops.megamoe.route(logits, self.experts.name, token_ids)
        return self.experts(x, topk_ids, topk_weights)
