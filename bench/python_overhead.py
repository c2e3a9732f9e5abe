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


def microseconds(call, between=lambda: None):
    """The median time of a call; `between` runs after each, untimed."""
    times = []
    for _ in range(CALLS):
        started = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - started)
        between()
    return statistics.median(times) / 1000


def of_tool(tool, checkpoint, backend="cpu"):
    command = [tool, "run", checkpoint, "--activations", model / "activations.safetensors", "--layer", "0", "--tokens",
               "1", "--repeat", str(CALLS), "--threads", "1", "--backend", backend, "--json"]
    return json.loads(subprocess.run(command, check=True, capture_output=True).stdout)["layers"][0]["seconds"] * 1e6


def numpy_operands():
    x = np.random.default_rng(0).standard_normal((1, 256)).astype(ml_dtypes.bfloat16)
    return x, np.array([[0, 3, 7, 9]], np.int32), np.full((1, 4), 0.25, np.float32)


def check(y, expected):
    error = np.abs(y - expected).max()
    assert error < 2**-7 * np.abs(expected).max(), error


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
        expected = reference(*operands).astype(np.float32)
        check(layer(*operands).astype(np.float32), expected)
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
            on_gpu(torch, tool, checkpoint, tensors, expected)


def on_gpu(torch, tool, checkpoint, tensors, expected):
    layer = megamoe.MoELayer.from_checkpoint(checkpoint, 0)
    if layer.gpu is None:
        return
    operands = [tensor.cuda() for tensor in tensors]
    experts = megamoe.torch.Experts(layer)
    core, y = layer._core, torch.empty_like(operands[0])
    workspace = torch.empty((1, core.stream_workspace_bytes(1)), dtype=torch.uint8, device="cuda")
    stream = torch.cuda.current_stream().cuda_stream
    calls = {"C++, with tensors": lambda: core.forward_on_stream(*operands, y, workspace, stream),
             "tensors alone": lambda: [torch.utils.dlpack.to_dlpack(tensor) for tensor in (*operands, y, workspace)],
             "torch": lambda: layer(*operands), "torch module": lambda: experts(*operands)}
    for result in (layer(*operands), layer(*tensors), experts(*operands)):
        check(result.float().cpu().numpy(), expected)
    tool_times, host_times, times = [], [], {name: [] for name in calls}
    for _ in range(TURNS):
        tool_times.append(of_tool(tool, checkpoint, layer.backend))
        host_times.append(microseconds(lambda: layer(*tensors)))
        for name, call in calls.items():
            times[name].append(microseconds(call, torch.cuda.synchronize))  # so that the stream never fills up
    assert torch.equal(layer(*operands), y)
    least = {name: min(turns) for name, turns in times.items()}
    enqueue = least["C++, with tensors"] - least["tensors alone"]

    def row(name, time, base=None):
        print(f"{name:<34}{time:>8.1f}" + ("" if base is None else f"{time - base:>+10.1f}"))

    print(f"\n{f'one token on GPU {layer.gpu}, us':<34}{'time':>8}{'over C++':>10}")
    row("host memory: C++", min(tool_times))
    row("host memory: torch", min(host_times), min(tool_times))
    row("putting it on a stream: C++", enqueue)
    for name in ("torch", "torch module"):
        row(f"putting it on a stream: {name}", least[name], enqueue)


if __name__ == "__main__":
    main(sys.argv[1])
