"""Layers on a GPU, on torch's streams and in its CUDA graphs; skipped where there is none. tools/gpu_test.sh runs it."""

import pytest

torch = pytest.importorskip("torch")

import megamoe  # noqa: E402
import megamoe.torch  # noqa: E402
from test_layer import EXPERTS, TOP_K, random_weights  # noqa: E402
from test_torch import same_bits, tensors  # noqa: E402

BACKEND = next((row["name"] for row in megamoe.backends() if row["supported"] and row["name"] not in ("cpu", "ref")), "")
pytestmark = pytest.mark.skipif(not BACKEND or not torch.cuda.is_available(), reason="no usable GPU, or no backend for it")

# A sum in another order moves x and h across a BF16 rounding, 2^-8 of them, and y is rounded so too.
OTHER_ORDER = 3 * 2.0**-8
TOKENS = (1, 19, 200)


@pytest.fixture(scope="module", params=["bf16", "nvfp4"])
def layers(request):
    """The same layer on the GPU and on the CPU."""
    gate, up, down = [[megamoe.quantize(w) for w in matrices] for matrices in random_weights()]
    return [megamoe.MoELayer.from_weights(gate, up, down, top_k=TOP_K, backend=backend, activations=request.param)
            for backend in (BACKEND, "cpu")]


def on_gpu(*arrays):
    return [array.cuda() for array in arrays]


def close(a, b):
    return (a.cpu().float() - b.float()).norm() <= OTHER_ORDER * b.float().norm()


@pytest.mark.parametrize("tokens", TOKENS)
def test_agrees_with_the_cpu(layers, tokens):
    gpu, cpu = layers
    operands = tensors(tokens=tokens)
    y = gpu(*on_gpu(*operands))
    assert y.is_cuda and gpu.gpu == y.device.index and close(y, cpu(*operands))
    # From host memory it is the same pass.
    assert same_bits(gpu(*operands), y.cpu())


def test_takes_what_the_cpu_takes(layers):
    gpu, _ = layers
    x, ids, weights = on_gpu(*tensors())
    y = gpu(x, ids, weights)
    assert same_bits(gpu(x, ids.long(), weights.double()), y)
    assert same_bits(gpu(x.float(), ids, weights), y.float())
    wide = torch.full((len(x), x.shape[1] + 1), float("nan"), dtype=x.dtype, device=x.device)
    wide[:, 1:] = x  # rows that start anywhere
    assert same_bits(gpu(wide[:, 1:], ids.T.contiguous().T, weights), y)
    out = torch.full_like(y, float("nan"))
    assert gpu(x, ids, weights, out=out) is out and same_bits(out, y)
    assert gpu(x[:0], ids[:0], weights[:0]).shape == (0, x.shape[1])


def test_runs_on_the_current_stream(layers):
    gpu, _ = layers
    x, ids, weights = on_gpu(*tensors(tokens=200))
    expected = gpu(x, ids, weights)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    late = torch.zeros_like(x)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # some 50 ms: on any other stream the layer would see zeros
        late.copy_(x)
        y = gpu(late, ids, weights)
    stream.synchronize()
    assert same_bits(y, expected)


def test_is_captured_in_a_graph(layers):
    gpu, _ = layers
    operands = on_gpu(*tensors(tokens=19))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = gpu(*operands)
    for seed in (7, 8):
        again = on_gpu(*tensors(seed, 19))
        for operand, value in zip(operands, again):
            operand.copy_(value)
        graph.replay()
        assert same_bits(y, gpu(*again))


def test_compiles_as_one_graph(layers):
    gpu, _ = layers
    experts = megamoe.torch.Experts(gpu)
    operands = on_gpu(*tensors())
    compiled = torch.compile(lambda x, ids, weights: experts(x, ids, weights) * 2, fullgraph=True)
    assert same_bits(compiled(*operands), gpu(*operands) * 2)
    reduced = torch.compile(lambda x, ids, weights: experts(x, ids, weights) * 2, fullgraph=True,
                            mode="reduce-overhead")
    for _ in range(3):
        assert same_bits(reduced(*operands).clone(), gpu(*operands) * 2)


def test_notes_an_id_out_of_range(layers):
    gpu, _ = layers
    x, ids, weights = on_gpu(*tensors())
    before = gpu.stream_status()
    assert before.bad_id is None
    gone = ids.clone()
    gone[4, 1] = -1
    expected = gpu(x, gone, weights)
    ids[4, 1] = EXPERTS
    assert same_bits(gpu(x, ids, weights), expected)
    assert gpu.stream_status().bad_id == 4 * TOP_K + 1
    far = ids.long()
    far[4, 1] = 2**32  # in 32 bits a 0
    assert same_bits(gpu(x, far, weights), expected)


def test_refuses_memory_elsewhere(layers):
    gpu, cpu = layers
    operands = tensors()
    x, ids, weights = on_gpu(*operands)
    with pytest.raises(ValueError, match="x must be on the CPU, where the layer is"):
        cpu(x, ids, weights)
    with pytest.raises(ValueError, match="topk_ids must be on GPU 0, where the layer is, got an array on the CPU"):
        gpu(x, operands[1], weights)
    with pytest.raises(TypeError, match="topk_ids must be an array of I32"):
        gpu(x, weights, weights)
    with pytest.raises(TypeError, match="topk_weights must be an array of F32"):
        gpu(x, ids, ids)


def test_evaluates_a_model(model_path):
    transformers = pytest.importorskip("transformers")
    if int(transformers.__version__.split(".")[0]) < 5:
        pytest.skip("needs transformers 5")
    from megamoe.evaluate import evaluate, read_windows

    model = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).cuda()
    windows = read_windows(model_path, 256, (model_path / "held_out.txt").read_bytes(), 16, 256)
    before, weights, both = evaluate(model, windows, activations=("bf16", "nvfp4"), backend=BACKEND)
    assert before.bits_per_byte < weights.bits_per_byte < both.bits_per_byte < before.bits_per_byte + 0.03
