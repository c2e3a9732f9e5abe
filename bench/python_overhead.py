#!/usr/bin/env python3
"""What calling a layer from Python costs over the C++ call: one token on the shipped model's first layer.

    bench/python_overhead.py TOOL     TOOL being the command `megamoe` of the same build

The C++ call is the one that `megamoe run` times. Both run on one thread, in turns; the median of each turn counts, and of
these the least. A call with no tokens returns before it computes anything: that is the cost of the call itself. Where the
package and the machine have a GPU, the same for a call that puts one token's pass on a stream, against the same pass
without Python's checks and allocations.
"""

import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import ml_dtypes
import numpy as np

import megamoe

TURNS, CALLS = 7, 2000
model = pathlib.Path(__file__).resolve().parents[1] / "examples" / "tiny-qwen3-moe"


def microseconds(call):
    times = []
    for _ in range(CALLS):
        started = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - started)
    return statistics.median(times) / 1000


def of_tool(tool, checkpoint):
    command = [tool, "run", checkpoint, "--activations", model / "activations.safetensors", "--layer", "0", "--tokens",
               "1", "--repeat", str(CALLS), "--threads", "1", "--backend", "cpu", "--json"]
    return json.loads(subprocess.run(command, check=True, capture_output=True).stdout)["layers"][0]["seconds"] * 1e6


def numpy_operands():
    x = np.random.default_rng(0).standard_normal((1, 256)).astype(ml_dtypes.bfloat16)
    return x, np.array([[0, 3, 7, 9]], np.int32), np.full((1, 4), 0.25, np.float32)


def main(tool):
    megamoe.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = pathlib.Path(folder) / "nvfp4"
        megamoe.quantize_checkpoint(model, checkpoint)
        layer = megamoe.MoELayer.from_checkpoint(checkpoint, 0, backend="cpu")
        reference = megamoe.MoELayer.from_checkpoint(checkpoint, 0, backend="ref")
        operands = numpy_operands()
        calls = {"NumPy": lambda: layer(*operands)}
        empty = {"NumPy": lambda: layer(*none)}
        none = [operand[:0] for operand in operands]
        error = np.abs(layer(*operands).astype(np.float32) - reference(*operands).astype(np.float32)).max()
        assert error < 2**-7 * np.abs(reference(*operands).astype(np.float32)).max(), error
        try:
            import torch
            from megamoe.torch import Experts
        except ImportError:
            torch = None
        if torch is not None:
            tensors = [torch.from_numpy(operands[0].view(np.uint16)).view(torch.bfloat16),
                       *map(torch.from_numpy, operands[1:])]
            nothing = [tensor[:0] for tensor in tensors]
            experts = Experts(layer)
            calls |= {"torch": lambda: layer(*tensors), "torch module": lambda: experts(*tensors)}
            empty |= {"torch": lambda: layer(*nothing), "torch module": lambda: experts(*nothing)}
            torch.set_grad_enabled(False)
        tool_times, times = [], {name: [] for name in calls}
        for _ in range(TURNS):
            tool_times.append(of_tool(tool, checkpoint))
            for name, call in calls.items():
                times[name].append(microseconds(call))
        print(f"{'one token, us':<16}{'time':>8}{'over C++':>10}{'no tokens':>11}\n{'C++':<16}{min(tool_times):>8.1f}")
        for name in calls:
            print(f"{name:<16}{min(times[name]):>8.1f}{min(times[name]) - min(tool_times):>+10.1f}"
                  f"{microseconds(empty[name]):>11.1f}")
        if torch is not None and torch.cuda.is_available():
            on_gpu(torch, checkpoint, tensors)


def on_gpu(torch, checkpoint, tensors):
    layer = megamoe.MoELayer.from_checkpoint(checkpoint, 0)
    if layer.gpu is None:
        return
    x, ids, weights = (tensor.cuda() for tensor in tensors)
    core, y = layer._core, torch.empty_like(x)
    workspace = torch.empty((1, core.stream_workspace_bytes(1)), dtype=torch.uint8, device="cuda")
    stream = torch.cuda.current_stream().cuda_stream
    capsule = torch.utils.dlpack.to_dlpack

    def enqueue(call):  # the host's part alone: the stream never fills up
        times = []
        for _ in range(CALLS):
            started = time.perf_counter_ns()
            call()
            times.append(time.perf_counter_ns() - started)
            torch.cuda.synchronize()
        return statistics.median(times) / 1000

    bare = enqueue(lambda: core.forward_on_stream(x, ids, weights, y, workspace, stream))
    imports = microseconds(lambda: [capsule(tensor) for tensor in (x, ids, weights, y, workspace)])
    full = enqueue(lambda: layer(x, ids, weights))
    assert torch.equal(layer(x, ids, weights), y)
    print(f"\non GPU {layer.gpu}, us of the host: bare call {bare:.1f}, of which taking five tensors in {imports:.1f}; "
          f"MoELayer {full:.1f}, {full - bare + imports:.1f} over C++")


if __name__ == "__main__":
    main(sys.argv[1])
