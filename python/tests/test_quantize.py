"""Quantising and its layouts, against the definition written in NumPy with ml_dtypes' roundings."""

import gc

import ml_dtypes
import numpy as np
import pytest

import megamoe

RNG = np.random.default_rng(1)
E4M3, E2M1 = ml_dtypes.float8_e4m3fn, ml_dtypes.float4_e2m1fn


def random_matrix(rows=37, cols=80):
    x = RNG.standard_normal((rows, cols)).astype(np.float32) * np.exp(RNG.standard_normal((rows, 1)))
    x[3, 16:32] = 0
    return x.astype(np.float32)


def unpack(codes):
    return np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(codes), -1)


def defined(x, g):
    """Codes and scales of float32 x under the tensor scale g, as docs/numerics.md defines them."""
    blocks = x.reshape(len(x), -1, 16)
    amax = np.abs(blocks).max(axis=-1)
    g = np.broadcast_to(np.float32(g), amax.shape)
    s = np.where(amax == 0, np.float32(1), np.clip(amax / (np.float32(6) * g), 2.0**-9, 448)).astype(E4M3)
    d = s.astype(np.float32) * g
    codes = np.clip(blocks / d[..., None], -6, 6).astype(E2M1).view(np.uint8)
    return codes.reshape(x.shape), s.view(np.uint8)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_equals_the_definition(dtype):
    x = random_matrix().astype(dtype)
    wide = x.astype(np.float32)
    for options, g in (({}, np.abs(wide).max() / np.float32(2688)),
                       ({"per_row": True}, np.abs(wide).max(axis=1, keepdims=True) / np.float32(2688)),
                       ({"tensor_scale": 0.001}, np.float32(0.001))):
        q = megamoe.quantize(x, **options)
        codes, scales = defined(wide, g)
        np.testing.assert_array_equal(unpack(q.codes), codes)
        np.testing.assert_array_equal(q.scales, scales)
        np.testing.assert_array_equal(q.tensor_scales, np.ravel(np.float32(g)))
        values = unpack(q.codes).view(E2M1).astype(np.float32).reshape(len(x), -1, 16)
        values *= q.scales.view(E4M3).astype(np.float32)[..., None]
        expected = values.reshape(x.shape) * np.broadcast_to(np.float32(g), (len(x), 1))
        np.testing.assert_array_equal(q.dequantize(), expected)
        np.testing.assert_array_equal(megamoe.dequantize(q), expected)


def test_takes_any_strides():
    x = random_matrix(64, 64)
    expected = megamoe.quantize(x)
    wide = np.full((64, 100), np.nan, np.float32)
    wide[:, 30:94] = x
    views = {"columns of a wider one": wide[:, 30:94], "transposed": np.ascontiguousarray(x.T).T,
             "reversed": np.ascontiguousarray(x[::-1, ::-1])[::-1, ::-1], "every other": np.repeat(x, 2, axis=1)[:, ::2]}
    for name, view in views.items():
        q = megamoe.quantize(view)
        np.testing.assert_array_equal(q.codes, expected.codes, err_msg=name)
        np.testing.assert_array_equal(q.scales, expected.scales, err_msg=name)
    one_row = np.broadcast_to(x[0], (5, 64))
    np.testing.assert_array_equal(megamoe.quantize(one_row).codes, megamoe.quantize(one_row.copy()).codes)


def test_faults_stay_in_their_block():
    x = random_matrix()
    x[2, 5] = np.nan
    x[4, 70] = -np.inf
    q = megamoe.quantize(x)
    assert q.nonfinite_blocks == 2
    bad = np.isnan(q.dequantize()).reshape(len(x), -1, 16)
    assert bad.all(axis=-1).sum() == bad.any(axis=-1).sum() == 2
    assert bad[2, 0].all() and bad[4, 4].all()
    assert megamoe.quantize(np.ones((1, 16), np.float32), tensor_scale=1e-5).saturated_blocks == 1


def test_four_over_six_is_no_worse():
    x = random_matrix(256, 64)
    def error(q):
        return np.square(q.dequantize() - x).sum()
    assert error(megamoe.quantize(x, four_over_six=True)) < error(megamoe.quantize(x))


@pytest.mark.parametrize("x, error, parts", [
    ([[1.0] * 16], TypeError, ["x", "array", "F32", "list"]),
    (None, TypeError, ["x", "NoneType"]),
    (np.ones((2, 16), np.int32), TypeError, ["x", "BF16, F32, F16 or F64", "int32"]),
    (np.ones((2, 16), np.complex64), TypeError, ["complex64"]),
    (np.ones((2, 16), ">f4"), TypeError, [">f4"]),
    (np.ones(16, np.float32), ValueError, ["x", "2 dimensions", "1"]),
    (np.ones((2, 17), np.float32), ValueError, ["multiple of 16", "17"]),
])
def test_refuses_what_is_no_matrix(x, error, parts):
    with pytest.raises(error) as raised:
        megamoe.quantize(x)
    for part in parts:
        assert part in str(raised.value)


def test_refuses_scales_that_cannot_be():
    x = np.ones((2, 16), np.float32)
    for scale in (0.0, -1.0, float("nan"), float("inf"), 3e38):
        with pytest.raises(ValueError, match="tensor scale|tensor_scale"):
            megamoe.quantize(x, tensor_scale=scale)
    with pytest.raises(ValueError, match="exclude each other"):
        megamoe.quantize(x, tensor_scale=1.0, per_row=True)


def test_is_made_of_arrays_and_checks_them():
    q = megamoe.quantize(random_matrix())
    again = megamoe.Nvfp4Tensor(q.codes, q.scales.view(E4M3), q.tensor_scales)
    np.testing.assert_array_equal(again.dequantize(), q.dequantize())
    assert again.shape == (37, 80) and "37 x 80" in repr(again)
    with pytest.raises(ValueError, match=r"scales must have shape \[37, 5\], got \[37, 4\]"):
        megamoe.Nvfp4Tensor(q.codes, q.scales[:, :4], q.tensor_scales)
    with pytest.raises(ValueError, match="1 or 37 numbers, got 2"):
        megamoe.Nvfp4Tensor(q.codes, q.scales, np.ones(2, np.float32))
    with pytest.raises(TypeError, match="codes must be an array of U8"):
        megamoe.Nvfp4Tensor(q.codes.astype(np.int8), q.scales, q.tensor_scales)


def test_arrays_outlive_the_tensor_and_cannot_be_written():
    x = random_matrix(512, 512)
    q = megamoe.quantize(x)
    codes, kept = q.codes, q.codes.copy()
    with pytest.raises(ValueError):
        codes[0, 0] = 1
    del q
    gc.collect()
    [megamoe.quantize(x * 2) for _ in range(4)]  # would take the memory
    np.testing.assert_array_equal(codes, kept)


def test_swizzles_by_the_formula():
    rows, cols = 130, 6
    scales = RNG.integers(0, 256, (rows, cols), dtype=np.uint8)
    swizzled = megamoe.swizzle_scales(scales)
    assert swizzled.size == 256 * 8
    expected = np.zeros(swizzled.size, np.uint8)
    for m in range(rows):
        for k in range(cols):
            at = m // 128 * (2 * 512) + k // 4 * 512 + m % 32 * 16 + m % 128 // 32 * 4 + k % 4
            expected[at] = scales[m, k]
    np.testing.assert_array_equal(swizzled, expected)
    np.testing.assert_array_equal(megamoe.unswizzle_scales(swizzled, rows, cols), scales)
    with pytest.raises(ValueError, match="2048"):
        megamoe.unswizzle_scales(swizzled[:-1], rows, cols)


def test_interleaves_by_eights():
    gate, up = RNG.integers(0, 256, (2, 24, 5), dtype=np.uint8)
    both = megamoe.interleave(gate, up)
    np.testing.assert_array_equal(both.reshape(3, 2, 8, 5)[:, 0].reshape(24, 5), gate)
    np.testing.assert_array_equal(both.reshape(3, 2, 8, 5)[:, 1].reshape(24, 5), up)
    back = megamoe.deinterleave(both)
    np.testing.assert_array_equal(back[0], gate)
    np.testing.assert_array_equal(back[1], up)
    with pytest.raises(ValueError, match="groups of 8"):
        megamoe.interleave(gate[:4], up[:4])
    with pytest.raises(ValueError, match="up must have shape"):
        megamoe.interleave(gate, up[:16])
