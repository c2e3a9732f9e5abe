"""Files that other people's packages write are read here, and the other way round."""

import json
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

import megamoe
from tensor_files import DTYPES, read_tensors
from test_layer import NVFP4_ERROR

EXPERTS, PROJECTIONS = range(16), ("gate", "up", "down")


def matrices(checkpoint):
    for layer in megamoe.open(checkpoint).layers:
        for expert in layer.experts:
            for projection in PROJECTIONS:
                yield getattr(expert, projection)


def unpack(codes):
    return np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(codes), -1)


def steps(codes):
    """E2M1 codes as places on the line of values, both zeros being one."""
    return np.where(codes & 8, -(codes & 7).astype(int), codes & 7)


def layer_output(checkpoint, recorded, **options):
    layer = megamoe.MoELayer.from_checkpoint(checkpoint, 0, **options)
    tensors = read_tensors(recorded)
    return layer(tensors["layers.0.mlp.input"], *layer.route(tensors["layers.0.mlp.router_logits"]))


def test_reads_what_safetensors_and_ml_dtypes_write(tmp_path):
    numpy_files = pytest.importorskip("safetensors.numpy")
    rng = np.random.default_rng(1)
    types = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32}
    for name, dtype in types.items():
        tensors = {f"model.layers.0.mlp.experts.{e}.{p}_proj.weight":
                   rng.standard_normal((64, 32) if p == "down" else (32, 64)).astype(dtype)
                   for e in range(3) for p in PROJECTIONS}
        numpy_files.save_file(tensors, tmp_path / f"{name}.safetensors", metadata={"format": "np"})
        for matrix in matrices(tmp_path / f"{name}.safetensors"):
            stored = tensors[matrix.name + "_proj.weight"]
            assert matrix.dtype == name
            np.testing.assert_array_equal(matrix.dequantize(), stored.astype(np.float32))


@pytest.mark.parametrize("family", ["modelopt", "compressed-tensors"])
def test_safetensors_and_ml_dtypes_read_what_is_written(tmp_path, model_path, family):
    safetensors = pytest.importorskip("safetensors")
    megamoe.quantize_checkpoint(model_path, tmp_path / "out", format=family)
    stored = safetensors.deserialize((tmp_path / "out" / "model.safetensors").read_bytes())
    tensors = {name: np.frombuffer(tensor["data"], DTYPES[tensor["dtype"]]).reshape(tensor["shape"])
               for name, tensor in stored}
    weight, scale = {"modelopt": ("weight", "weight_scale_2"),
                     "compressed-tensors": ("weight_packed", "weight_global_scale")}[family]
    for matrix in matrices(tmp_path / "out"):
        codes = unpack(tensors[f"{matrix.name}_proj.{weight}"])
        scales = tensors[f"{matrix.name}_proj.weight_scale"]
        tensor_scale = tensors[f"{matrix.name}_proj.{scale}"]
        assert scales.dtype == ml_dtypes.float8_e4m3fn and tensor_scale.shape == (() if family == "modelopt" else (1,))
        g = tensor_scale if family == "modelopt" else np.float32(1) / tensor_scale
        values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32) * np.repeat(scales.astype(np.float32), 16, axis=1)
        np.testing.assert_array_equal(matrix.dequantize(), values * g)


@pytest.fixture(scope="module")
def compressed_path(tmp_path_factory, model_path):
    """The shipped model as compressed-tensors quantises, packs and describes it."""
    pytest.importorskip("compressed_tensors")
    import torch
    from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus, preset_name_to_scheme
    from compressed_tensors.quantization.utils.helpers import calculate_qparams, generate_gparam
    from safetensors.torch import load_file, save_file

    scheme = preset_name_to_scheme("NVFP4A16", ["Linear"])
    tensors = {}
    for name, weight in load_file(model_path / "model.safetensors").items():
        if ".experts." not in name:
            tensors[name] = weight
            continue
        weight = weight.float()
        global_scale = generate_gparam(weight.min(), weight.max())
        blocks = weight.unflatten(1, (-1, 16))
        scales, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights, global_scale=global_scale)
        packed = NVFP4PackedCompressor.compress(
            {"weight": weight, "weight_scale": scales, "weight_global_scale": global_scale}, scheme)
        tensors |= {f"{name.removesuffix('weight')}{part}": tensor for part, tensor in packed.items()}
    assert all(tensor.dtype != torch.float64 for tensor in tensors.values())
    path = tmp_path_factory.mktemp("compressed")
    save_file(tensors, path / "model.safetensors")
    config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["re:.*self_attn.*", "re:.*mlp.gate$", "lm_head"],
                                quant_method="compressed-tensors", format="nvfp4-pack-quantized",
                                quantization_status=QuantizationStatus.COMPRESSED)
    model_config = json.loads((model_path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(model_config | {"quantization_config": config.model_dump(mode="json")}))
    return path


# compressed-tensors multiplies by 2688 / amax where the definition divides by amax / 2688: a few roundings of FP32 apart.
OTHER_ROUNDINGS = 2.0**-21


def check_ties(a, b, exact):
    """Where the numbers a and b differ they are the neighbours that `exact` lies in the middle of."""
    moved = a != b
    middle = (a[moved] + b[moved]) / 2
    np.testing.assert_allclose(exact[moved], middle, rtol=OTHER_ROUNDINGS)
    return moved


def test_compressed_tensors_checkpoints_agree(tmp_path, model_path, compressed_path):
    megamoe.quantize_checkpoint(model_path, tmp_path / "ours", format="compressed-tensors", gate_up_scale="separate")
    paths = (compressed_path, tmp_path / "ours", model_path)
    for theirs, ours, source in zip(*(matrices(path) for path in paths), strict=True):
        a, b, values = theirs.nvfp4(), ours.nvfp4(), source.dequantize().astype(np.float64)
        assert theirs.name == ours.name and theirs.encoding == "nvfp4"
        assert theirs.tensor_scale == pytest.approx(ours.tensor_scale, rel=OTHER_ROUNDINGS)
        scales = [q.scales.view(ml_dtypes.float8_e4m3fn).astype(np.float64) for q in (a, b)]
        amax = np.abs(values).reshape(len(values), -1, 16).max(axis=-1)
        moved = check_ties(*scales, amax / (6 * ours.tensor_scale))
        codes = [unpack(q.codes).view(ml_dtypes.float4_e2m1fn).astype(np.float64) for q in (a, b)]
        same = np.repeat(~moved, 16, axis=1)  # of the others, no more can be said than this
        assert np.abs(steps(unpack(a.codes)) - steps(unpack(b.codes))).max() <= 1
        check_ties(*(c[same] for c in codes), (values / (np.repeat(scales[1], 16, axis=1) * ours.tensor_scale))[same])
    recorded = model_path / "activations.safetensors"
    a, b = (layer_output(path, recorded).astype(np.float64) for path in paths[:2])
    assert np.linalg.norm(a - b) < 0.1 * NVFP4_ERROR * np.linalg.norm(b)  # what both lost, they lost alike


def test_compressed_tensors_decompresses_ours(tmp_path, model_path):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from safetensors.torch import load_file

    megamoe.quantize_checkpoint(model_path, tmp_path / "ours", format="compressed-tensors", activations="dynamic")
    described = json.loads((tmp_path / "ours" / "config.json").read_text())["quantization_config"]
    (scheme,) = QuantizationConfig.model_validate(described).config_groups.values()
    tensors = load_file(tmp_path / "ours" / "model.safetensors")
    for matrix in matrices(tmp_path / "ours"):
        prefix = f"{matrix.name}_proj."
        module = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        assert set(module) == set(NVFP4PackedCompressor.compression_param_names(scheme)) - {"input_global_scale"}
        # As FP32: by itself it would multiply in BF16.
        module["weight_scale"] = module["weight_scale"].float()
        weight = NVFP4PackedCompressor.decompress(module, scheme)["weight"].float().numpy()
        # It divides codes and scale by the reciprocal in its own order and rounds the result to BF16.
        np.testing.assert_allclose(weight, matrix.dequantize(), rtol=2**-8)


def test_compressed_tensors_converts_ours(quantized_path):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.entrypoints.convert.converters import ModelOptNvfp4Converter
    from safetensors.torch import load_file, save_file

    converter = ModelOptNvfp4Converter(targets=["re:.*experts.*"])
    converted = converter.process(load_file(quantized_path / "model.safetensors"))
    path = quantized_path.parent / "converted.safetensors"
    save_file(converted, path)
    for theirs, ours in zip(matrices(path), matrices(quantized_path), strict=True):
        a, b = theirs.nvfp4(), ours.nvfp4()
        np.testing.assert_array_equal(a.codes, b.codes)
        np.testing.assert_array_equal(a.scales, b.scales)
        assert theirs.tensor_scale == pytest.approx(ours.tensor_scale, rel=2**-22)


# Exports the shipped model, and decodes an NVFP4 checkpoint of ours.
MODELOPT = """
import pathlib, sys, torch
import modelopt.torch.quantization as mtq
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.quantization.qtensor import NVFP4QTensor
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

source, ours, exported, decoded = map(pathlib.Path, sys.argv[1:])
model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).eval()
text = torch.tensor(list((source / "held_out.txt").read_bytes()[:1024])).reshape(4, 256)
export_hf_checkpoint(mtq.quantize(model, mtq.NVFP4_DEFAULT_CFG, lambda m: m(input_ids=text)), export_dir=exported)

tensors, values = load_file(ours / "model.safetensors"), {}
for name, weight in tensors.items():
    if name.endswith(".weight") and weight.dtype == torch.uint8:
        module = name.removesuffix(".weight")
        packed = NVFP4QTensor((weight.shape[0], weight.shape[1] * 2), torch.float32, weight)
        values[module] = packed.dequantize(scale=tensors[module + ".weight_scale"], block_sizes={-1: 16},
                                           double_scale=tensors[module + ".weight_scale_2"])
save_file(values, decoded)
"""


@pytest.fixture(scope="module")
def modelopt_paths(tmp_path_factory, model_path, quantized_path):
    """What ModelOpt exports of the shipped model, and what it decodes of ours."""
    pytest.importorskip("modelopt")
    path = tmp_path_factory.mktemp("modelopt")
    paths = path / "exported", path / "decoded.safetensors"
    # In a process of its own: it changes transformers' classes.
    subprocess.run([sys.executable, "-c", MODELOPT, model_path, quantized_path, *paths], check=True)
    return paths


def test_modelopt_checkpoints_are_the_same(model_path, quantized_path, modelopt_paths):
    theirs, _ = modelopt_paths
    for a, b in zip(matrices(theirs), matrices(quantized_path), strict=True):
        assert a.name == b.name and a.tensor_scale == b.tensor_scale and a.input_scale > 0
        np.testing.assert_array_equal(a.nvfp4().scales, b.nvfp4().scales)
        np.testing.assert_array_equal(steps(unpack(a.nvfp4().codes)), steps(unpack(b.nvfp4().codes)))
    recorded = model_path / "activations.safetensors"
    dynamic = {"activations": "nvfp4", "x_scale": "token", "h_scale": "token"}
    ours = layer_output(quantized_path, recorded, **dynamic)
    np.testing.assert_array_equal(layer_output(theirs, recorded, **dynamic).view(np.uint16), ours.view(np.uint16))
    static = megamoe.MoELayer.from_checkpoint(theirs, 0, activations="nvfp4")
    assert (static.x_scale, static.h_scale) == ("static", "static")


def test_modelopt_decodes_ours(quantized_path, modelopt_paths):
    decoded = read_tensors(modelopt_paths[1])
    for matrix in matrices(quantized_path):
        np.testing.assert_allclose(decoded[matrix.name + "_proj"], matrix.dequantize(), rtol=2**-22)
