"""Calls that do not fit: one sentence that says what was expected and what came, from every public function."""

import inspect
import pickle

import numpy as np
import pytest

import megamoe
from test_layer import make_layer

X = np.ones((16, 32), np.float32)
Q = megamoe.quantize(X)


def model(path):
    return megamoe.open(path)


@pytest.mark.parametrize("call, error, message", [
    (lambda path: megamoe.quantize(X, tensor_scale="1"), TypeError, "tensor_scale must be float | None, got str"),
    (lambda path: megamoe.quantize(X, tensor_scale=np.ones(2)), TypeError,
     "tensor_scale must be float | None, got ndarray"),
    (lambda path: megamoe.quantize(X, per_row=1), TypeError, "per_row must be bool, got int"),
    (lambda path: megamoe.quantize(X, per_row=np.bool_(True)), TypeError,
     f"per_row must be bool, got {'numpy.bool' if np.bool_.__name__ == 'bool' else 'bool_'}"),
    (lambda path: megamoe.quantize(X, tensor_scale=np.float32(1), four_over_six=None), TypeError,
     "four_over_six must be bool, got NoneType"),
    (lambda path: megamoe.quantize(X, 1.0), TypeError, "quantize(): too many positional arguments"),
    (lambda path: megamoe.quantize(X, rows=3), TypeError, "quantize(): got an unexpected keyword argument 'rows'"),
    (lambda path: megamoe.quantize(), TypeError, "quantize(): missing a required argument: 'x'"),
    (lambda path: megamoe.dequantize(X), TypeError, "x must be megamoe.Nvfp4Tensor, got ndarray"),
    (lambda path: megamoe.unswizzle_scales(Q.scales, 1.5, 2), TypeError, "rows must be int, got float"),
    (lambda path: megamoe.unswizzle_scales(Q.scales, 2, 2**70), ValueError, f"cols must fit in 64 bits, got {2**70}"),
    (lambda path: megamoe.swizzle_scales(), TypeError, "swizzle_scales(): missing a required argument: 'scales'"),
    (lambda path: megamoe.interleave(X), TypeError, "interleave(): missing a required argument: 'up'"),
    (lambda path: megamoe.deinterleave(X, X), TypeError, "deinterleave(): too many positional arguments"),
    (lambda path: megamoe.set_num_threads("1"), TypeError, "count must be int, got str"),
    (lambda path: megamoe.set_num_threads(2**31), ValueError, "count must fit in 32 bits, got 2147483648"),
    (lambda path: megamoe.num_threads(1), TypeError, "num_threads(): too many positional arguments"),
    (lambda path: megamoe.backends(1), TypeError, "backends(): too many positional arguments"),
    (lambda path: megamoe.open(path, fused_layout=None), TypeError, "fused_layout must be str, got NoneType"),
    (lambda path: megamoe.open("a\0b"), TypeError, r"open() cannot take checkpoint='a\x00b'"),
    (lambda path: megamoe.open("no-\udcff"), FileNotFoundError, r"no-\xff does not exist"),
    (lambda path: megamoe.Nvfp4Tensor(Q.codes), TypeError, "scales must be an array of U8 or F8_E4M3, got NoneType"),
    (lambda path: megamoe.Checkpoint.layer(3, 0), TypeError, "layer() cannot take self=3, number=0"),
    (lambda path: model(path).layer("0"), TypeError, "number must be int, got str"),
    (lambda path: model(path).layer(2**31), ValueError, "number must fit in 32 bits, got 2147483648"),
    (lambda path: model(path).layer(0).expert(0.0), TypeError, "number must be int, got float"),
    (lambda path: model(path).findings(values=1), TypeError, "values must be bool, got int"),
    (lambda path: megamoe.verify(path, path), TypeError, "quantized must be Checkpoint, got PosixPath"),
    (lambda path: megamoe.quantize_checkpoint(path, None), TypeError,
     "destination must be str | os.PathLike[str], got NoneType"),
    (lambda path: megamoe.quantize_checkpoint(path, "x", layers="0"), TypeError,
     "layers must be list[int] | None, got str"),
    (lambda path: megamoe.quantize_checkpoint(path, "x", layers=[0, "1"]), TypeError,
     "layers must be list[int] | None, got list of int, str"),
    (lambda path: megamoe.quantize_checkpoint(path, "x", layers=[2**31]), ValueError,
     "layers must fit in 32 bits, got 2147483648"),
    (lambda path: megamoe.convert_checkpoint(path, "x", to=3), TypeError, "to must be str, got int"),
    (lambda path: megamoe.convert_checkpoint(path, "x"), TypeError,
     "convert_checkpoint(): missing a required argument: 'to'"),
    (lambda path: megamoe.MoELayer.from_checkpoint(path, "0"), TypeError, "layer must be int, got str"),
    (lambda path: megamoe.MoELayer.from_checkpoint(3, 0), TypeError, "checkpoint must be str | os.PathLike, got int"),
    (lambda path: megamoe.MoELayer.from_checkpoint(path, 0, device="cuda"), TypeError,
     "device must be int | None, got str"),
    (lambda path: make_layer(top_k=2**31), ValueError, "top_k must fit in 32 bits, got 2147483648"),
    (lambda path: make_layer(top_k="2"), TypeError, "top_k must be int, got str"),
    (lambda path: make_layer(limit=None), TypeError, "limit must be float, got NoneType"),
    (lambda path: make_layer(name=5), TypeError, "name must be str, got int"),
])
def test_one_sentence_says_what_does_not_fit(call, error, message, model_path):
    with pytest.raises(error) as raised:
        call(model_path)
    assert str(raised.value) == message


def test_functions_tell_their_signatures_and_can_be_pickled():
    assert list(inspect.signature(megamoe.quantize).parameters) == ["x", "tensor_scale", "per_row", "four_over_six"]
    assert "Quantises x" in megamoe.quantize.__doc__
    assert pickle.loads(pickle.dumps(megamoe.quantize)) is megamoe.quantize
