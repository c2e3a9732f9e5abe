"""Running layers from NumPy arrays: against FP64, against the reference backend, against the command-line tool."""

import gc
import os
import subprocess
import weakref

import ml_dtypes
import numpy as np
import pytest

import megamoe
from tensor_files import read_tensors

BF16 = ml_dtypes.bfloat16
TOKENS, HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 19, 64, 48, 6, 3


def random_weights(seed=1, scale=0.2):
    rng = np.random.default_rng(seed)
    shapes = ((INTERMEDIATE, HIDDEN), (INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE))
    return [[(rng.standard_normal(shape) * scale).astype(np.float32) for _ in range(EXPERTS)] for shape in shapes]


def random_input(seed=2, tokens=TOKENS):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, HIDDEN)).astype(BF16)
    ids = rng.permuted(np.tile(np.arange(EXPERTS, dtype=np.int32), (tokens, 1)), axis=1)[:, :TOP_K]
    return x, np.ascontiguousarray(ids), rng.random((tokens, TOP_K), np.float32)


def make_layer(weights=None, **options):
    gate, up, down = weights or [[megamoe.quantize(w) for w in matrices] for matrices in random_weights()]
    return megamoe.MoELayer.from_weights(gate, up, down, **{"top_k": TOP_K, **options})


def in_fp64(weights, x, ids, topk_weights):
    x = x.astype(np.float64)
    y = np.zeros_like(x)
    for t, slot in np.ndindex(ids.shape):
        if ids[t, slot] >= 0:
            gate, up, down = (matrices[ids[t, slot]].astype(np.float64) for matrices in weights)
            g, u = gate @ x[t], up @ x[t]
            h = (g / (1 + np.exp(-g)) * u).astype(np.float32).astype(BF16).astype(np.float64)
            y[t] += topk_weights[t, slot] * (down @ h)
    return y


def relative_error(y, expected):
    return np.linalg.norm(y.astype(np.float64) - expected) / np.linalg.norm(expected)


# h and y are rounded to BF16: half a unit in the last place of 8 bits, 2^-9, each, so their sum bounds it.
BF16_ROUNDING = 2 * 2.0**-9


def test_takes_what_only_exports_its_memory():
    class Exported:
        def __init__(self, array):
            self.array = array

        def __dlpack__(self, **kwargs):
            return self.array.__dlpack__(**kwargs)

        def __dlpack_device__(self):
            return self.array.__dlpack_device__()

    layer = make_layer()
    x, ids, weights = random_input()
    expected = layer(x.astype(np.float32), ids, weights)
    got = layer(*(Exported(array) for array in (x.astype(np.float32), ids, weights)))
    assert np.array_equal(got, expected)


def test_agrees_with_fp64():
    x, ids, weights = random_input()
    ids[3, 1] = -1
    tensors = [[megamoe.quantize(w) for w in matrices] for matrices in random_weights()]
    values = [[q.dequantize() for q in matrices] for matrices in tensors]
    assert relative_error(make_layer(tensors)(x, ids, weights), in_fp64(values, x, ids, weights)) < BF16_ROUNDING
    for dtype in (np.float32, BF16):
        dense = [[w.astype(dtype) for w in matrices] for matrices in random_weights()]
        y = make_layer(dense)(x, ids, weights)
        assert relative_error(y, in_fp64(dense, x, ids, weights)) < BF16_ROUNDING
        stacked = make_layer([np.stack(matrices) for matrices in dense])
        np.testing.assert_array_equal(stacked(x, ids, weights).view(np.uint16), y.view(np.uint16))


@pytest.mark.parametrize("options", [{"activations": "nvfp4", "x_scale": "tensor", "h_scale": "tensor"},
                                     {"activations": "nvfp4"}, {"activations": "nvfp4", "l1": "interleaved"}])
def test_backends_give_the_same_bits(options):
    x, ids, weights = random_input()
    expected = make_layer(backend="ref", **options)(x, ids, weights)
    got = make_layer(backend="cpu", **options)(x, ids, weights)
    np.testing.assert_array_equal(got.view(np.uint16), expected.view(np.uint16))


def test_takes_any_arrays():
    x, ids, weights = random_input()
    layer = make_layer()
    expected = layer(x, ids, weights)
    assert expected.dtype == BF16 and expected.shape == x.shape
    for dtype in (np.float32, np.float16):
        wide = layer(x.astype(dtype), ids.astype(np.int64), weights.astype(np.float64))
        assert wide.dtype == dtype
        if dtype == np.float32:
            np.testing.assert_array_equal(wide, expected.astype(np.float32))
    strided = np.zeros((TOKENS, 2 * HIDDEN), BF16)[:, ::2]
    strided[:] = x
    columns = np.asfortranarray(x)
    for view in (strided, columns, np.ascontiguousarray(x[::-1])[::-1]):
        got = layer(view, np.asfortranarray(ids), np.repeat(weights, 2, axis=1)[:, ::2])
        np.testing.assert_array_equal(got.view(np.uint16), expected.view(np.uint16))


@pytest.mark.parametrize("poison", [0x7f, 0xff, 0x00])
def test_writes_all_of_out_and_nothing_else(poison):
    x, ids, weights = random_input()
    layer = make_layer()
    expected = layer(x, ids, weights)
    memory = np.full((TOKENS, HIDDEN + 8, 2), poison, np.uint8).view(BF16)[..., 0]
    out = memory[:, :HIDDEN]
    assert layer(x, ids, weights, out=out) is out
    np.testing.assert_array_equal(out.view(np.uint16), expected.view(np.uint16))
    assert (memory[:, HIDDEN:].copy().view(np.uint8) == poison).all()


def test_no_tokens():
    x, ids, weights = random_input(tokens=0)
    assert make_layer()(x, ids, weights).shape == (0, HIDDEN)


def test_keeps_its_weights_alive():
    x, ids, weights = random_input()
    dense = random_weights()
    expected = make_layer([[w.copy() for w in matrices] for matrices in dense], backend="ref")(x, ids, weights)
    copies = [[w.copy() for w in matrices] for matrices in dense]
    references = [weakref.ref(w) for matrices in copies for w in matrices]
    layer = make_layer(copies, backend="ref")
    del copies
    gc.collect()
    [np.full((INTERMEDIATE, HIDDEN), np.nan, np.float32) for _ in range(100)]  # would take the memory
    np.testing.assert_array_equal(layer(x, ids, weights).view(np.uint16), expected.view(np.uint16))
    assert all(reference() is not None for reference in references)
    del layer
    gc.collect()
    assert all(reference() is None for reference in references)


def test_biases_and_gpt_oss():
    rng = np.random.default_rng(5)
    biases = {"gate_bias": INTERMEDIATE, "up_bias": INTERMEDIATE, "down_bias": HIDDEN}
    biases = {name: rng.standard_normal((EXPERTS, n)).astype(np.float32) for name, n in biases.items()}
    x, ids, weights = random_input()
    dense = random_weights()
    got = make_layer(dense, activation="gpt-oss", limit=7.0, **biases)(x, ids, weights)
    expected = np.zeros((TOKENS, HIDDEN))
    for t, slot in np.ndindex(ids.shape):
        e = ids[t, slot]
        gate = np.minimum(dense[0][e].astype(np.float64) @ x[t].astype(np.float64) + biases["gate_bias"][e], 7)
        up = np.clip(dense[1][e].astype(np.float64) @ x[t].astype(np.float64) + biases["up_bias"][e], -7, 7)
        h = (gate / (1 + np.exp(-1.702 * gate)) * (up + 1)).astype(BF16).astype(np.float64)
        expected[t] += weights[t, slot] * (dense[2][e] @ h + biases["down_bias"][e])
    assert relative_error(got, expected) < BF16_ROUNDING


def test_routes_as_softmax(quantized_path):
    layer = megamoe.MoELayer.from_checkpoint(quantized_path, 0)
    logits = np.random.default_rng(3).standard_normal((7, 16)).astype(np.float32)
    ids, weights = layer.route(logits)
    order = np.argsort(-logits, axis=1)[:, :4]
    np.testing.assert_array_equal(ids, order)
    chosen = np.exp(np.take_along_axis(logits, order, axis=1).astype(np.float64))
    np.testing.assert_allclose(weights, chosen / chosen.sum(axis=1, keepdims=True), rtol=1e-6)
    x = np.random.default_rng(4).standard_normal((7, 256)).astype(np.float32)
    router = megamoe.open(quantized_path).layer(0).router_weight
    expected = x.astype(BF16).astype(np.float64) @ router.T.astype(np.float64)
    np.testing.assert_allclose(layer.router_logits(x), expected, rtol=1e-6, atol=1e-6)


def test_describes_itself(quantized_path):
    layer = megamoe.MoELayer.from_checkpoint(quantized_path, 1, backend="cpu", activations="nvfp4")
    assert (layer.backend, layer.activations, layer.x_scale, layer.h_scale) == ("cpu", "nvfp4", "token", "token")
    assert layer.gpu is None and layer.config["num_experts"] == 16 and "16 experts" in repr(layer)
    assert layer.stream_status() == (0, None)
    assert {backend["name"] for backend in megamoe.backends()} >= {"ref", "cpu"}


def fields_of_structures(x):
    structures = np.zeros(x.shape, [("value", x.dtype), ("other", np.uint8)])
    structures["value"] = x
    return structures["value"]


@pytest.mark.parametrize("change, error, message", [
    (lambda x, i, w: (x[:, :32], i, w), ValueError, r"\[19, 64\], got \[19, 32\]"),
    (lambda x, i, w: (x, i[:4], w), ValueError, r"ids must have shape \[19, 3\], got \[4, 3\]"),
    (lambda x, i, w: (x[0], i, w), ValueError, "x must have 2 dimensions, got 1"),
    (lambda x, i, w: (x.astype(np.float64), i, w), TypeError, "BF16, F32 or F16, got ndarray of float64"),
    (lambda x, i, w: (x, i.astype(np.float32), w), TypeError, "topk_ids must be an array of I32 or I64"),
    (lambda x, i, w: (x, i, w.astype(int)), TypeError, "topk_weights must be an array of BF16"),
    (lambda x, i, w: (x.tolist(), i, w), TypeError, "x must be an array"),
    (lambda x, i, w: (fields_of_structures(x), i, w), TypeError, r"ndarray of bfloat16 with strides of \(192, 3\) bytes"),
    (lambda x, i, w: (x, None, w), TypeError, "topk_ids must be an array of I32 or I64, got NoneType"),
    (lambda x, i, w: (x, i + 6, w), ValueError, "token 0, slot 0 is out of range; expected -1 or 0 to 5"),
    (lambda x, i, w: (x, i + 2**32, w), ValueError, "topk_ids holds 4294967"),
])
def test_refuses_arrays_that_do_not_fit(change, error, message):
    with pytest.raises(error, match=message):
        x, ids, weights = random_input()
        make_layer()(*change(x, ids.astype(np.int64), weights))


def test_refuses_an_out_that_does_not_fit():
    x, ids, weights = random_input()
    layer = make_layer()
    for out, error, message in ((np.empty((3, HIDDEN), np.float32), ValueError, "out must have shape"),
                                (np.empty((TOKENS, HIDDEN), np.int16), TypeError, "out must be a writable array"),
                                (np.empty((HIDDEN, TOKENS), np.float32).T, ValueError, "adjacent elements")):
        with pytest.raises(error, match=message):
            layer(x, ids, weights, out=out)
    out = np.empty((TOKENS, HIDDEN), np.float32)
    out.flags.writeable = False
    with pytest.raises(TypeError, match="writable"):
        layer(x, ids, weights, out=out)


@pytest.mark.parametrize("options, error, message", [
    ({"activations": "fp4"}, ValueError, "bf16.*fp8.*nvfp4|fp4"),
    ({"activations": "nvfp4", "x_scale": "static"}, ValueError, "no static scales"),
    ({"backend": "tpu"}, LookupError, "tpu"),
    ({"x_scale": "token"}, ValueError, "goes with nvfp4 activations, got bf16 activations"),
    ({"activations": "fp8", "h_scale": "static"}, ValueError, "goes with nvfp4 activations, got fp8 activations"),
    ({"l1": "loose"}, ValueError, "fused, compact or interleaved, got loose"),
    ({"activation": "gelu"}, ValueError, "swiglu-clamped, gpt-oss or relu2, got gelu"),
    ({"gate_bias": np.zeros((EXPERTS, 3), np.float32)}, ValueError, r"gate_bias must have shape \[6, 48\]"),
    ({"input_scales": np.ones(5, np.float32)}, ValueError, "input_scales must hold 6 numbers, got 5"),
])
def test_refuses_options_that_do_not_fit(options, error, message):
    with pytest.raises(error, match=message):
        make_layer(**options)


def test_refuses_weights_that_do_not_fit(quantized_path):
    gate, up, down = random_weights()
    with pytest.raises(ValueError, match="gate must hold 6 experts, as down does, got 5"):
        make_layer((gate[:5], up, down))
    with pytest.raises(ValueError, match="one tensor scale"):
        make_layer(([megamoe.quantize(w, per_row=True) for w in gate], up, down))
    with pytest.raises(TypeError, match="down must hold a matrix for each expert, got int"):
        make_layer((gate, up, 3))
    with pytest.raises(TypeError, match="up must be an array of BF16, F32, F16 or F64, got NoneType"):
        make_layer((gate, [None] * EXPERTS, down))
    with pytest.raises(LookupError, match="0, 1"):
        megamoe.MoELayer.from_checkpoint(quantized_path, 7)
    with pytest.raises(FileNotFoundError):
        megamoe.MoELayer.from_checkpoint(quantized_path / "none", 0)


# NVFP4 rounds x, then h, each with a relative error of about 0.095; SwiGLU, a product, doubles the first.
NVFP4_ERROR = 3 * 0.095


def test_static_scales():
    layer = make_layer(activations="nvfp4", input_scales=np.full(EXPERTS, 0.002, np.float32),
                       down_input_scales=np.full(EXPERTS, 0.02, np.float32))
    assert (layer.x_scale, layer.h_scale) == ("static", "static")
    x, ids, weights = random_input()
    values = [[megamoe.quantize(w).dequantize() for w in matrices] for matrices in random_weights()]
    assert relative_error(layer(x, ids, weights), in_fp64(values, x, ids, weights)) < NVFP4_ERROR


needs_tool = pytest.mark.skipif("MEGAMOE_CLI" not in os.environ,
                                reason="MEGAMOE_CLI names no command-line tool to compare with")


def recorded_operands(model_path, layer):
    """What the shipped model's first layer was given, routed by `layer`."""
    recorded = read_tensors(model_path / "activations.safetensors")
    return recorded["layers.0.mlp.input"], *layer.route(recorded["layers.0.mlp.router_logits"])


def output_of_tool(folder, model_path, checkpoint, backend, activations):
    """Layer 0 on the same, by the C++ library alone."""
    subprocess.run([os.environ["MEGAMOE_CLI"], "run", checkpoint, "--activations", model_path / "activations.safetensors",
                    "--layer", "0", "--backend", backend, "--format", activations, "--repeat", "1", "--save",
                    folder / "y.safetensors"], check=True, capture_output=True)
    return read_tensors(folder / "y.safetensors")["layers.0.mlp.output"]


@needs_tool
@pytest.mark.parametrize("activations", ["bf16", "fp8", "nvfp4"])
def test_gives_the_bits_of_the_tool(tmp_path, model_path, quantized_path, activations):
    layer = megamoe.MoELayer.from_checkpoint(quantized_path, 0, activations=activations)
    y = layer(*recorded_operands(model_path, layer))
    expected = output_of_tool(tmp_path, model_path, quantized_path, layer.backend, activations)
    np.testing.assert_array_equal(y.view(np.uint16), expected.view(np.uint16))
