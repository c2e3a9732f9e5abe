"""Looking into checkpoints, and making others of them; tensors are read back by a few lines of NumPy."""

import gc

import numpy as np
import pytest

import megamoe
from tensor_files import read_tensors


def test_lists_the_shipped_model(model_path):
    checkpoint = megamoe.open(model_path)
    assert checkpoint.model_type == "qwen3_moe" and checkpoint.path == model_path
    assert [layer.number for layer in checkpoint.layers] == [0, 1]
    layer = checkpoint.layer(1)
    assert (layer.hidden, layer.intermediate, layer.num_experts, layer.family) == (256, 128, 16, "plain")
    assert layer.config["top_k"] == 4 and layer.config["scoring"] == "softmax" and layer.shared_expert is None
    tensors = read_tensors(model_path / "model.safetensors")
    for number in (0, 15):
        expert = layer.expert(number)
        assert expert.number == number
        for projection in ("gate", "up", "down"):
            matrix = getattr(expert, projection)
            stored = tensors[f"model.layers.1.mlp.experts.{number}.{projection}_proj.weight"]
            np.testing.assert_array_equal(matrix.dequantize(), stored.astype(np.float32))
            assert matrix.shape == stored.shape and matrix.encoding == "dense" and matrix.dtype == "BF16"
            assert matrix.tensor_scale is matrix.input_scale is matrix.bias is None
            with pytest.raises(ValueError, match="dense"):
                matrix.nvfp4()
    np.testing.assert_array_equal(layer.router_weight, tensors["model.layers.1.mlp.gate.weight"].astype(np.float32))
    assert len(layer.experts) == 16


def test_keeps_the_file_alive(model_path):
    matrix = megamoe.open(model_path).layer(0).expert(3).up
    gc.collect()
    assert np.isfinite(matrix.dequantize()).all()


def test_quantises_a_model(model_path, quantized_path):
    source, tensors = megamoe.open(model_path), read_tensors(quantized_path / "model.safetensors")
    layer = megamoe.open(quantized_path).layer(0)
    assert layer.family == "modelopt"
    for number in (0, 7):
        expert = source.layer(0).expert(number)
        gate, up = expert.gate.dequantize(), expert.up.dequantize()
        shared = max(np.abs(gate).max(), np.abs(up).max()) / np.float32(2688)
        expected = megamoe.quantize(up, tensor_scale=shared)
        got = layer.expert(number).up.nvfp4()
        np.testing.assert_array_equal(got.codes, expected.codes)
        np.testing.assert_array_equal(got.scales, expected.scales)
        name = f"model.layers.0.mlp.experts.{number}.up_proj"
        np.testing.assert_array_equal(tensors[name + ".weight"], expected.codes)
        assert layer.expert(number).up.tensor_scale == tensors[name + ".weight_scale_2"] == shared
        np.testing.assert_array_equal(layer.expert(number).up.dequantize(), got.dequantize())


def test_converts_and_verifies(tmp_path, model_path, quantized_path):
    seen = []
    report = megamoe.convert_checkpoint(quantized_path, tmp_path / "ct", to="compressed-tensors",
                                        progress=lambda done, total, item: seen.append((done, total, item)))
    assert report["output_bytes"] > 0 and seen and seen[-1][0] <= seen[-1][1]
    converted = megamoe.open(tmp_path / "ct")
    assert converted.layer(0).family == "compressed-tensors"
    rows = megamoe.verify(converted, megamoe.open(model_path))
    assert len(rows) == 2 * 16 * 3
    for row in rows:
        assert 0.05 < row["relative_error"] < 0.12 and row["projection"] in ("gate", "up", "down")


def test_passes_on_what_progress_raises(tmp_path, model_path):
    def stop(done, total, item):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        megamoe.quantize_checkpoint(model_path, tmp_path / "stopped", progress=stop)
    assert not (tmp_path / "stopped").exists()


def test_says_what_is_suspicious(model_path):
    for finding in megamoe.open(model_path).findings(values=True):
        assert finding["severity"] in ("note", "warning", "error") and finding["text"]


def test_errors_say_what_was_expected(tmp_path, model_path):
    with pytest.raises(FileNotFoundError, match="no-such"):
        megamoe.open(tmp_path / "no-such")
    with pytest.raises(FileNotFoundError, match="found neither"):
        megamoe.open(tmp_path)
    for other in (3, None):
        with pytest.raises(TypeError, match=rf"^checkpoint must be str \| os.PathLike\[str\], got {type(other).__name__}$"):
            megamoe.open(other)
    with pytest.raises(FileNotFoundError, match="no-scales"):
        megamoe.quantize_checkpoint(model_path, tmp_path / "x", activations="static", scales=tmp_path / "no-scales")
    with pytest.raises(TypeError, match="progress must be callable, got int"):
        megamoe.quantize_checkpoint(model_path, tmp_path / "x", progress=3)
    with pytest.raises(ValueError, match="named once, got layer 0 more often"):
        megamoe.quantize_checkpoint(model_path, tmp_path / "x", layers=[0, 0])
    with pytest.raises(LookupError, match="0, 1"):
        megamoe.open(model_path).layer(2)
    with pytest.raises(IndexError, match="0 to 15, got 16"):
        megamoe.open(model_path).layer(0).expert(16)
    (tmp_path / "broken.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ValueError, match="broken.safetensors"):
        megamoe.open(tmp_path / "broken.safetensors")
    with pytest.raises(ValueError, match="format must be one of modelopt, compressed-tensors, got gguf"):
        megamoe.quantize_checkpoint(model_path, tmp_path / "x", format="gguf")
    with pytest.raises(ValueError, match="to must be one of modelopt, compressed-tensors, got gguf"):
        megamoe.convert_checkpoint(model_path, tmp_path / "x", to="gguf")
