"""Mixture-of-experts layers in NVFP4: quantise matrices and models, look into checkpoints, run layers.

Arrays may be NumPy's, torch's, or anything that speaks DLPack. A layer gives back the kind it was called with; all else
is NumPy's. 16-bit and 8-bit floats in NumPy are those of the package ml_dtypes. Mistakes raise TypeError or ValueError
that say what was expected and what came; what is not there raises FileNotFoundError or LookupError.

`megamoe.torch` has layers and quantising as torch operators, `megamoe.transformers` puts quantised experts into Hugging
Face models, and `python -m megamoe.evaluate` measures what that costs.
"""

from importlib.metadata import version as _version

from megamoe import _calls  # first: it changes what comes from _core
from megamoe._array import Array
from megamoe._core import (Checkpoint, Expert, LayerInfo, Matrix, Nvfp4Tensor, backends, convert_checkpoint,
                           deinterleave, dequantize, interleave, num_threads, open, quantize, quantize_checkpoint,
                           set_num_threads, swizzle_scales, unswizzle_scales, verify)
from megamoe._layer import MoELayer

__version__ = _version("megamoe")
__all__ = ["Array", "Checkpoint", "Expert", "LayerInfo", "Matrix", "MoELayer", "Nvfp4Tensor", "backends",
           "convert_checkpoint", "deinterleave", "dequantize", "interleave", "num_threads", "open", "quantize",
           "quantize_checkpoint", "set_num_threads", "swizzle_scales", "unswizzle_scales", "verify"]
