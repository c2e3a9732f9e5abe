"""A mixture-of-experts layer that is loaded once and called many times."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy

from megamoe import _core
from megamoe._array import Array, torch_of


class StreamStatus(NamedTuple):
    """What calls on a GPU have counted since the layer was made."""

    saturated_blocks: int  # blocks of x and h that were cut at their tensor scale
    bad_id: int | None  # the least token * top_k + slot whose id was out of range; such a slot adds 0


class MoELayer:
    """The routed experts of a layer (and its shared expert, where it has one), ready to run.

    Call it with x [tokens, hidden], topk_ids and topk_weights [tokens, top_k].
    """

    config: dict[str, Any]
    """hidden, intermediate, num_experts, top_k, activation, scoring, ... by name."""

    def __init__(self, core: _core.Layer) -> None:
        self._core = core
        self.config = core.config

    @classmethod
    def from_checkpoint(cls, checkpoint: str | os.PathLike[str], layer: int, *, backend: str = "",
                        activations: str = "bf16", x_scale: str = "", h_scale: str = "", l1: str = "fused",
                        routed_only: bool = False, fused_layout: str = "", device: int | None = None) -> MoELayer:
        """Loads layer number `layer` of a model's directory or safetensors file.

        backend       a name of megamoe.backends(), or "" for the best one here that runs the layer
        activations   "bf16" (W4A16), "fp8" (W4A8) or "nvfp4" (W4A4)
        x_scale, h_scale   with "nvfp4": "static", "layer-max", "token" or "tensor"; "" takes static scales where the
                      checkpoint has them, else "token"
        l1            how the first GEMM leaves h: "fused", "compact" or "interleaved"; all give the same bits
        routed_only   leaves a shared expert out
        fused_layout  "rows-first" or "cols-first", where shapes leave the order of fused experts open
        device        the GPU to load to; None: CUDA's current one

        Raises FileNotFoundError; LookupError for a layer or backend there is not; NotImplementedError for what the
        backend does not run; ValueError for a broken file or an option that does not fit.
        """
        options = _core.layer_options(backend, activations, x_scale, h_scale, l1, device)
        return cls(_core.Layer.from_checkpoint(checkpoint, layer, routed_only, fused_layout, options))

    @classmethod
    def from_weights(cls, gate: Iterable[Any] | None, up: Iterable[Any], down: Iterable[Any], *, top_k: int,
                     activation: str = "swiglu", limit: float = 0.0, alpha: float = 1.702,
                     gate_bias: Array | None = None, up_bias: Array | None = None, down_bias: Array | None = None,
                     input_scales: Array | None = None, down_input_scales: Array | None = None,
                     name: str = "layer", backend: str = "", activations: str = "bf16", x_scale: str = "",
                     h_scale: str = "", l1: str = "fused", device: int | None = None) -> MoELayer:
        """Makes a layer of matrices in memory, which it keeps alive: do not write to them.

        gate, up      for each of E experts an Nvfp4Tensor or floats [I, H], or all as floats [E, I, H]; gate is None
                      for "relu2"
        down          for each an Nvfp4Tensor or floats [H, I], or [E, H, I]
        activation    "swiglu", "swiglu-clamped" (with limit), "gpt-oss" (with limit and alpha) or "relu2"
        gate_bias, up_bias, down_bias   floats [E, I], [E, I], [E, H] or None
        input_scales, down_input_scales   static NVFP4 tensor scales of x and h, floats [E], or None
        name          for messages

        The other options are those of from_checkpoint. route() is softmax over all experts, renormalised. Raises
        TypeError or ValueError where sizes or types do not fit.
        """
        options = _core.layer_options(backend, activations, x_scale, h_scale, l1, device)
        kind = _core.activation(activation, limit, alpha)
        if gate is not None:
            gate = _each_expert("gate", gate)
        up, down = _each_expert("up", up), _each_expert("down", down)
        return cls(_core.Layer.from_weights(gate, up, down, top_k, kind, gate_bias, up_bias, down_bias, input_scales,
                                            down_input_scales, name, options))

    def __call__(self, x: Any, topk_ids: Array, topk_weights: Array, *, out: Any = None) -> Any:
        """The weighted sum of each token's experts, [tokens, hidden], in x's type and kind of array.

        x             bfloat16 [tokens, hidden]; float32 and float16 are rounded to bfloat16 first, and the result
                      is widened from it
        topk_ids      int32 or int64 [tokens, top_k]; -1 adds nothing
        topk_weights  floats [tokens, top_k]
        out           where to write the result; None: a new array

        Tensors on the layer's GPU run on torch's current stream, and the call returns at once; an id out of range
        adds nothing there and shows in stream_status(). Raises TypeError or ValueError for arrays that do not fit,
        ValueError that names token and slot for an id out of range.
        """
        torch = torch_of(x)
        if torch is not None and x.is_cuda:
            return self._call_on_stream(torch, x, topk_ids, topk_weights, out)
        if out is None:
            out = _empty_like(torch, x)
        self._core.forward(x, topk_ids, topk_weights, out)
        return out

    def _call_on_stream(self, torch: Any, x: Any, topk_ids: Any, topk_weights: Any, out: Any) -> Any:
        core = self._core
        if core.gpu < 0:
            raise ValueError(f"x must be on the CPU, where the layer is (backend '{core.backend}'), got {x.device}")
        for name, array in (("topk_ids", topk_ids), ("topk_weights", topk_weights), ("out", x if out is None else out)):
            if not isinstance(array, torch.Tensor):
                raise TypeError(f"{name} must be a torch tensor, as x is, got {type(array).__name__}")
        if x.dim() != 2:
            raise ValueError(f"x must have 2 dimensions, got {x.dim()}")
        # What follows asks before it acts, and takes the stream's number by a short way: one token takes microseconds.
        tokens = x.detach() if x.requires_grad else x
        if x.dtype in (torch.float32, torch.float16):
            tokens = tokens.to(torch.bfloat16)
        if tokens.data_ptr() % 16 or tokens.stride(0) % 8 or tokens.stride(0) < tokens.shape[1] or tokens.stride(1) != 1:
            tokens = tokens.clone(memory_format=torch.contiguous_format)
        if topk_ids.dtype == torch.int64:  # what does not fit in 32 bits must not become an id that does
            topk_ids = topk_ids.clamp(-2, 2**31 - 1).to(torch.int32)
        if topk_weights.dtype in (torch.bfloat16, torch.float16, torch.float64):
            topk_weights = topk_weights.to(torch.float32)
        if topk_weights.requires_grad:
            topk_weights = topk_weights.detach()
        y = out
        if out is None:
            y = torch.empty_like(tokens, memory_format=torch.contiguous_format)
        elif out.dtype in (torch.float32, torch.float16):
            if out.shape != x.shape or out.device != x.device:
                raise ValueError(f"out must have shape {list(x.shape)} and be on {x.device}, as x, got "
                                 f"{list(out.shape)} on {out.device}")
            y = torch.empty_like(tokens, memory_format=torch.contiguous_format)
        workspace = torch.empty((1, core.stream_workspace_bytes(len(tokens))), dtype=torch.uint8, device=x.device)
        core.forward_on_stream(tokens, topk_ids.contiguous(), topk_weights.contiguous(), y, workspace,
                               _stream_number(torch, x.device))
        if out is None:
            return y if y.dtype == x.dtype else y.to(x.dtype)
        return out if out is y else out.copy_(y)

    def route(self, logits: Any, token_ids: Any = None) -> tuple[Any, Any]:
        """(topk_ids int32, topk_weights float32), [tokens, top_k] each, by the layer's router.

        logits     floats [tokens, num_experts]
        token_ids  int [tokens], for layers that are routed by token id

        Runs on the CPU, wherever logits are. Raises TypeError or ValueError for what does not fit.
        """
        ids, weights = self._core.route(_on_cpu(logits), _on_cpu(token_ids))
        torch = torch_of(logits)
        if torch is None:
            return ids, weights
        return torch.from_numpy(ids).to(logits.device), torch.from_numpy(weights).to(logits.device)

    def router_logits(self, x: Any) -> Any:
        """Logits float32 [tokens, num_experts] of x [tokens, hidden] by the checkpoint's router.

        Runs on the CPU, wherever x is. Raises ValueError where the layer has no router.
        """
        logits = self._core.router_logits(_on_cpu(x))
        torch = torch_of(x)
        return logits if torch is None else torch.from_numpy(logits).to(x.device)

    def stream_status(self) -> StreamStatus:
        """What calls on a GPU have counted; waits for them."""
        return StreamStatus(*self._core.stream_status())

    @property
    def backend(self) -> str:
        """The name of the backend that runs it."""
        return self._core.backend

    @property
    def gpu(self) -> int | None:
        """The number of the GPU that it is on, or None."""
        return self._core.gpu if self._core.gpu >= 0 else None

    @property
    def activations(self) -> str:
        """"bf16", "fp8" or "nvfp4"."""
        return self._core.activations

    @property
    def x_scale(self) -> str:
        """Where the tensor scale of x comes from, with "nvfp4" activations; else ""."""
        return self._core.x_scale

    @property
    def h_scale(self) -> str:
        """Where the tensor scale of h comes from, with "nvfp4" activations; else ""."""
        return self._core.h_scale

    @property
    def notes(self) -> list[str]:
        """What a user should know about the weights."""
        return self._core.notes

    def __repr__(self) -> str:
        c = self.config
        return (f"MoELayer({c['num_experts']} experts, top {c['top_k']}, hidden {c['hidden']}, intermediate "
                f"{c['intermediate']}, {self.activations} activations, backend '{self.backend}')")


def _each_expert(name: str, matrices: Any) -> list[Any]:
    try:
        return list(matrices)
    except TypeError:
        raise TypeError(f"{name} must hold a matrix for each expert, got {type(matrices).__name__}") from None


def _on_cpu(array: Any) -> Any:
    return array.cpu() if torch_of(array) is not None and array.is_cuda else array


def _empty_like(torch: Any, x: Any) -> Any:
    if torch is not None:
        if x.layout == torch.strided and x.is_contiguous():
            return torch.empty_like(x)  # the quicker way
        return torch.empty(x.shape, dtype=x.dtype)
    shape = getattr(x, "shape", None)
    if shape is None and hasattr(x, "__dlpack__"):
        return numpy.empty_like(numpy.from_dlpack(x))
    if shape is None:
        raise TypeError(f"x must be an array, got {type(x).__name__}")
    return numpy.empty(shape, x.dtype)


def _stream_number(torch: Any, device: Any) -> int:
    """torch's current stream on the device, without an object made for it where this torch offers that."""
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if raw is not None and device.index is not None:
        return raw(device.index)
    return torch.cuda.current_stream(device).cuda_stream
