"""Layers on a GPU, on torch's streams and in its CUDA graphs; skipped where there is none. tools/gpu_test.sh runs it."""

import pytest

torch = pytest.importorskip("torch")

import megamoe  # noqa: E402
import megamoe.torch  # noqa: E402
from test_layer import EXPERTS, HIDDEN, TOP_K, make_layer, needs_tool, output_of_tool, recorded_operands  # noqa: E402
from test_torch import as_tensor, same_bits, tensors  # noqa: E402

BACKEND = next((row["name"] for row in megamoe.backends() if row["supported"] and row["name"] not in ("cpu", "ref")), "")
pytestmark = pytest.mark.skipif(not BACKEND or not torch.cuda.is_available(), reason="no usable GPU, or no backend for it")

# A sum in another order moves x and h across a BF16 rounding, 2^-8 of them, and y is rounded so too.
OTHER_ORDER = 3 * 2.0**-8
TOKENS = (1, 19, 200)
ACTIVATIONS = ("bf16", "fp8", "nvfp4")


@pytest.fixture(scope="module", params=ACTIVATIONS)
def layers(request):
    """The same layer on the GPU and on the CPU."""
    return [make_layer(backend=backend, activations=request.param) for backend in (BACKEND, "cpu")]


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


@needs_tool
@pytest.mark.parametrize("activations", ACTIVATIONS)
def test_gives_the_bits_of_the_tool(tmp_path, model_path, quantized_path, activations):
    layer = megamoe.MoELayer.from_checkpoint(quantized_path, 0, backend=BACKEND, activations=activations)
    x, ids, weights = recorded_operands(model_path, layer)
    expected = as_tensor(output_of_tool(tmp_path, model_path, quantized_path, BACKEND, activations))
    assert same_bits(layer(*on_gpu(as_tensor(x), torch.from_numpy(ids), torch.from_numpy(weights))).cpu(), expected)


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
        torch.cuda._sleep(1_000_000_000)  # some 500 ms: on any other stream the layer would see zeros
        late.copy_(x)
        y = gpu(late, ids, weights)
        assert not stream.query()  # back before the work is done
    stream.synchronize()
    assert same_bits(y, expected)


def test_takes_its_workspace_from_torch(layers):
    gpu, _ = layers
    operands = on_gpu(*tensors(tokens=200))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    gpu(*operands)
    assert torch.cuda.max_memory_allocated() - before >= gpu._core.stream_workspace_bytes(200)


@pytest.mark.parametrize("activations", ACTIVATIONS)
def test_is_captured_in_a_graph_by_its_first_call(activations):
    layer = make_layer(backend=BACKEND, activations=activations)
    experts = megamoe.torch.Experts(layer)
    operands = on_gpu(*tensors(tokens=19))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # on a stream of its own, the current one there
        y = layer(*operands)
        by_operator = torch.ops.megamoe.forward(*operands, experts.name)
        by_module = experts(operands[0].reshape(1, 19, HIDDEN), *operands[1:])
    for seed in (7, 8):
        again = on_gpu(*tensors(seed, 19))
        for operand, value in zip(operands, again):
            operand.copy_(value)
        for result in (y, by_operator, by_module):
            result.fill_(float("nan"))
        graph.replay()
        for result in (y, by_operator, by_module[0]):
            assert same_bits(result, layer(*again))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiles_as_one_graph(layers, mode):
    gpu, _ = layers
    experts = megamoe.torch.Experts(gpu)
    compiled = torch.compile(lambda x, ids, weights: experts(x, ids, weights) * 2, fullgraph=True, mode=mode)
    for seed in (3, 4, 5, 6):  # of which reduce-overhead records one in a CUDA graph
        operands = on_gpu(*tensors(seed))
        assert same_bits(compiled(*operands).clone(), gpu(*operands) * 2)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiles_with_its_own_router(quantized_path, mode):
    if mode != "default" and not hasattr(torch.Tag, "cudagraph_unsafe"):
        pytest.skip("torch cannot be told that the router stays out of CUDA graphs")
    layer = megamoe.MoELayer.from_checkpoint(quantized_path, 0, backend=BACKEND)
    moe = megamoe.torch.MoE(layer)
    compiled = torch.compile(moe, fullgraph=True, mode=mode)
    for _ in range(3):
        x = torch.randn(5, layer.config["hidden"], dtype=torch.bfloat16, device="cuda")
        expected = layer(x, *layer.route(layer.router_logits(x)))
        assert expected.is_cuda and same_bits(moe(x), expected) and same_bits(compiled(x).clone(), expected)


def test_operators_are_registered_as_they_should_be(layers):
    gpu, _ = layers
    name = megamoe.torch.register(gpu)
    x, ids, weights = on_gpu(*tensors())
    torch.library.opcheck(torch.ops.megamoe.forward.default, (x, ids, weights, name))
    torch.library.opcheck(torch.ops.megamoe.route.default, (torch.randn(4, EXPERTS, device="cuda"), name))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="a single GPU")
def test_loads_to_another_gpu(quantized_path):
    first, second = (megamoe.MoELayer.from_checkpoint(quantized_path, 0, backend=BACKEND, device=i) for i in (0, 1))
    x = torch.randn(5, first.config["hidden"], dtype=torch.bfloat16)
    routed = first.route(first.router_logits(x))
    y = second(x.to("cuda:1"), *(tensor.to("cuda:1") for tensor in routed))
    assert y.device.index == second.gpu == 1 and torch.cuda.current_device() == 0
    assert same_bits(y.cpu(), first(*on_gpu(x, *routed)).cpu())


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
    with pytest.raises(ValueError, match=r"out must have shape \[19, 64\] and be on cuda:0, as x, got .* on cpu"):
        gpu(x, ids, weights, out=torch.empty(x.shape))
    with pytest.raises(ValueError, match="out must be on GPU 0, where the layer is, got an array on the CPU"):
        gpu(x, ids, weights, out=torch.empty_like(operands[0]))


def test_refuses_arrays_that_do_not_fit(layers):
    gpu, _ = layers
    x, ids, weights = on_gpu(*tensors())
    with pytest.raises(TypeError, match="topk_ids must be an array of I32"):
        gpu(x, weights, weights)
    with pytest.raises(TypeError, match="topk_weights must be an array of F32"):
        gpu(x, ids, ids)
    with pytest.raises(TypeError, match="x must be an array of BF16"):
        gpu(x.double(), ids, weights)
    with pytest.raises(ValueError, match="x must have 2 dimensions, got 1"):
        gpu(x[0], ids, weights)
    with pytest.raises(ValueError, match=r"out must have shape \[19, 64\]"):
        gpu(x, ids, weights, out=torch.empty(3, *x.shape, device=x.device))
    for other, kind in ((lambda tensor: tensor.cpu().numpy(), "ndarray"), (torch.Tensor.tolist, "list")):
        with pytest.raises(TypeError, match=f"topk_ids must be a torch tensor, as x is, got {kind}"):
            gpu(x, other(ids), weights)
        with pytest.raises(TypeError, match=f"topk_weights must be a torch tensor, as x is, got {kind}"):
            gpu(x, ids, other(weights))
        with pytest.raises(TypeError, match=f"out must be a torch tensor, as x is, got {kind}"):
            gpu(x, ids, weights, out=other(x.float()))


def test_evaluates_a_model(model_path):
    transformers = pytest.importorskip("transformers")
    if int(transformers.__version__.split(".")[0]) < 5:
        pytest.skip("needs transformers 5")
    from megamoe.evaluate import evaluate, read_windows

    model = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).cuda()
    windows = read_windows(model_path, 256, (model_path / "held_out.txt").read_bytes(), 16, 256)
    gpu = [result.bits_per_byte for result in evaluate(model, windows, backend=BACKEND)]
    cpu = [result.bits_per_byte for result in evaluate(model.cpu(), windows)]
    assert gpu == pytest.approx(cpu, abs=0.001)
