"""Layers called with torch tensors, as operators, as modules and under torch.compile."""

import copy
import gc

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import megamoe  # noqa: E402
import megamoe.torch  # noqa: E402
from test_layer import EXPERTS, HIDDEN, TOKENS, make_layer, random_input  # noqa: E402


def as_tensor(x):
    """An array of ml_dtypes' bfloat16 as a tensor."""
    return torch.from_numpy(x.view(np.uint16)).view(torch.bfloat16)


def tensors(seed=2, tokens=TOKENS):
    x, ids, weights = random_input(seed, tokens)
    return as_tensor(x), torch.from_numpy(ids), torch.from_numpy(weights)


def same_bits(a, b):
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.fixture(scope="module")
def layer():
    return make_layer()


def test_gives_the_bits_of_numpy(layer):
    expected = as_tensor(layer(*random_input()))
    x, ids, weights = tensors()
    y = layer(x, ids, weights)
    assert same_bits(y, expected) and not y.requires_grad
    assert same_bits(layer(x.float(), ids.long(), weights.double()), expected.float())
    assert same_bits(layer(x.half(), ids, weights), expected.half())
    assert same_bits(layer(x.repeat_interleave(2, 1)[:, ::2], ids.T.contiguous().T, weights), expected)
    assert same_bits(layer(x.float().requires_grad_(), ids, weights), expected.float())
    out = torch.full_like(x, float("nan"))
    assert layer(x, ids, weights, out=out) is out and same_bits(out, expected)


def test_sees_negatives_that_were_not_carried_out(layer):
    x, ids, weights = tensors()
    negative = torch.complex(x.float(), -x.float()).conj().imag
    assert negative.is_neg() and torch.equal(negative, x.float())
    assert same_bits(layer(negative, ids, weights), layer(x.float(), ids, weights))
    assert np.array_equal(megamoe.quantize(negative).codes, megamoe.quantize(x.float()).codes)


# Compiled graphs stay on disk, and are found again by the operators' arguments.
def test_names_say_what_shapes_depend_on(layer):
    assert megamoe.torch.register(layer).endswith(f"-{EXPERTS}-top{layer.config['top_k']}")


def test_tensors_come_and_go_by_dlpack():
    x = torch.randn(32, 64, dtype=torch.bfloat16)
    q = megamoe.quantize(x.requires_grad_())
    codes = torch.from_dlpack(q.codes)
    assert codes.data_ptr() == q.codes.ctypes.data
    again = megamoe.Nvfp4Tensor(codes, torch.from_dlpack(q.scales).view(torch.float8_e4m3fn), torch.tensor(q.tensor_scales))
    assert torch.equal(torch.from_dlpack(again.dequantize()), torch.from_dlpack(q.dequantize()))


def test_operators_are_registered_as_they_should_be(layer):
    x, ids, weights = tensors()
    name = megamoe.torch.register(layer)
    ops = torch.ops.megamoe
    torch.library.opcheck(ops.forward.default, (x, ids, weights, name))
    torch.library.opcheck(ops.route.default, (torch.randn(TOKENS, EXPERTS), name))
    q = megamoe.quantize(torch.randn(32, 64))
    torch.library.opcheck(ops.quantize.default, (torch.randn(32, 64),))
    torch.library.opcheck(ops.quantize.default, (torch.randn(32, 64, dtype=torch.float16), None, True))
    codes, scales, tensor_scales = (torch.tensor(array) for array in (q.codes, q.scales, q.tensor_scales))
    torch.library.opcheck(ops.dequantize.default, (codes, scales, tensor_scales))
    np.testing.assert_array_equal(ops.dequantize(codes, scales, tensor_scales).numpy(), q.dequantize())


def test_a_name_lasts_as_long_as_its_layer():
    x, ids, weights = tensors()
    layer = make_layer()
    name = megamoe.torch.register(layer)
    expected = layer(x, ids, weights)
    assert same_bits(torch.ops.megamoe.forward(x, ids, weights, name), expected)
    del layer
    gc.collect()
    with pytest.raises(LookupError, match="still lives"):
        torch.ops.megamoe.forward(x, ids, weights, name)


def test_module_takes_batches_and_copies(layer):
    x, ids, weights = tensors(tokens=12)
    experts = megamoe.torch.Experts(layer)
    expected = layer(x, ids, weights)
    assert same_bits(experts(x.reshape(3, 4, HIDDEN), ids, weights), expected.reshape(3, 4, HIDDEN))
    assert same_bits(copy.deepcopy(experts)(x, ids, weights), expected)
    assert not list(experts.parameters()) and "6 experts" in repr(experts)


def test_whole_layer_is_router_and_experts(quantized_path):
    layer = megamoe.MoELayer.from_checkpoint(quantized_path, 0)
    x = torch.randn(5, 256, dtype=torch.bfloat16)
    expected = layer(x, *layer.route(layer.router_logits(x)))
    assert same_bits(megamoe.torch.MoE(layer)(x), expected)


class Block(torch.nn.Module):
    """A model that holds the layer: a router of torch's, the experts, and something behind them."""

    def __init__(self, layer):
        super().__init__()
        self.router = torch.nn.Linear(HIDDEN, EXPERTS)
        self.experts = megamoe.torch.Experts(layer)
        self.last = torch.nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        weights, ids = torch.softmax(self.router(x), -1).topk(self.experts.layer.config["top_k"])
        return self.last(x + self.experts(x, ids, weights))


@pytest.mark.parametrize("backend, layers", [("aot_eager", [make_layer(), make_layer(activations="nvfp4")]),
                                             ("inductor", [make_layer()])])
def test_compiles_as_one_graph(backend, layers):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Block(layer) for layer in layers)).eval()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with torch.inference_mode():
        for tokens in (TOKENS, 7):  # the second makes the shape a dynamic one
            x = torch.randn(tokens, HIDDEN)
            # A rounding to BF16 of x or h may fall the other way where FP32 sums are in another order.
            torch.testing.assert_close(compiled(x), model(x), rtol=2**-7, atol=2**-7)


def test_refuses_tensors_that_do_not_fit(layer):
    x, ids, weights = tensors()
    with pytest.raises(TypeError, match="topk_ids must be an array of I32 or I64, got .*float32"):
        layer(x, weights, weights)
    with pytest.raises(ValueError, match=r"x must have shape \[19, 64\], got \[19, 60\]"):
        layer(x[:, :60], ids, weights)
    with pytest.raises(TypeError, match="x must be an array of BF16, F32 or F16, got .*bfloat16 on meta"):
        layer(x.to("meta"), ids, weights)
    for call, name in ((layer.route, "logits"), (layer.router_logits, "x"), (megamoe.quantize, "x")):
        with pytest.raises(TypeError, match=f"^{name} must be an array of .*, got torch.Tensor of torch.float32 on meta$"):
            call(torch.zeros(TOKENS, EXPERTS, device="meta"))
    with pytest.raises(TypeError, match="x must be an array of BF16, F32 or F16, got .*bfloat16, torch.sparse_coo"):
        layer(x.to_sparse(), ids, weights)
    with pytest.raises(TypeError, match="layer must be a MoELayer, got NoneType"):
        megamoe.torch.Experts(None)
