#!/usr/bin/env python3
"""Times a layer in PyTorch on its grouped GEMM in BF16, on an NVIDIA GPU: what `megamoe bench` is to be compared with.

    torch_baseline.py --tokens 1,8,64                      sizes of DeepSeek-V4-Flash
    torch_baseline.py --hidden 2048 --intermediate 768 --experts 128 --top-k 8
    torch_baseline.py --megamoe build/hopper/cli/megamoe --model glm-4.5-air

First both GEMMs of a layer and nothing else: no sort, no gather, no activation, no combine. Then the whole layer, as `megamoe
bench` times it, of PyTorch's own operations one by one, with plain SwiGLU and no bias. Random BF16 weights and tokens, uniform
random routing. As `megamoe bench` does, a measurement is some passes in a row, in one CUDA graph where capturing works, each on
the experts that were used longest ago, so that weights come from memory and not from the L2; the GPU rests after each, and
the median of the measurements counts. The first pass is held against FP32 before anything is timed.

In the same run: what a copy within the GPU's memory moves (bytes read and written), and what cuBLAS reaches on a BF16
product of 8192^3. With --megamoe the tool's own bench runs first, on the same model and tokens, and what PyTorch's whole layer takes
is printed as a multiple of it.

A table, and last one line of JSON.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import time

LEAST_BYTES = 4 << 30  # of weights that a measurement reads, for about a millisecond at least
MOST_PASSES = 64
SECONDS = 0.5  # of measurements, but FEWEST at least and MOST at most
FEWEST, MOST = 5, 100
REST = 3  # idle for so many times as long after each: at its power limit a GPU lowers its clocks
# Both sums are FP32; what differs is their rounding to BF16, at most 2^-8 of an element.
TOLERANCE = 2.0**-8
# Of a whole layer four roundings to BF16 follow each other: of the first GEMM's result, of the activation's product and of
# silu in it, of the second GEMM's result; and y's.
LAYER_TOLERANCE = 5 * TOLERANCE


class Routings:
    """Each token's experts, pass after pass: uniform, each pass on the experts that were used longest ago."""

    def __init__(self, experts, top_k, tokens, seed=1):
        self.random = random.Random(seed)
        self.experts, self.top_k, self.tokens = experts, top_k, tokens
        self.order = self.random.sample(range(experts), experts)
        self.turn = 0

    def next(self):
        drawn = [self.random.sample(range(self.experts), self.top_k) for _ in range(self.tokens)]
        names = {}
        for expert in sorted({expert for token in drawn for expert in token}):
            names[expert] = self.order[self.turn]
            self.turn = (self.turn + 1) % self.experts
        return [[names[expert] for expert in token] for token in drawn]


def grouped_mm(torch):
    """PyTorch's product of rows [R, K] with weights [E, K, N] by the ends of each expert's rows, under the name it has here."""
    for where, name in ((torch, "_grouped_mm"), (torch.nn.functional, "grouped_mm")):
        function = getattr(where, name, None)
        if function is not None:
            return lambda rows, weights, ends: function(rows, weights, offs=ends)
    sys.exit(f"torch_baseline.py: PyTorch {torch.__version__} has no grouped GEMM; expected 2.8 or newer")


class Timer:
    def __init__(self, torch):
        self.torch = torch

    def seconds(self, work):
        begin, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e-3

    def median(self, work):
        time.sleep(REST * self.seconds(work))  # once to warm up
        times = []
        while len(times) < FEWEST or (sum(times) < SECONDS and len(times) < MOST):
            times.append(self.seconds(work))
            time.sleep(REST * times[-1])
        return statistics.median(times)

    def median_of_graph(self, work):
        """Of `work` captured in one graph, and True; of its launches one by one, and False, where it cannot be captured."""
        work()  # loads what a capture may not
        self.torch.cuda.synchronize()
        try:
            graph = self.torch.cuda.CUDAGraph()
            with self.torch.cuda.graph(graph):
                work()
            return self.median(graph.replay), True
        except RuntimeError as error:
            self.torch.cuda.synchronize()
            print(f"no CUDA graph, launches are timed too: {str(error).splitlines()[0]}", file=sys.stderr)
        return self.median(work), False


def random_matrix(torch, *shape):
    """BF16 of variance 1 over the square root of its second last size, made in place: weights are most of the memory."""
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(0, shape[-2] ** -0.5)


def copy_bandwidth(torch, timer):
    size = 1 << 30
    source, target = (torch.zeros(size, dtype=torch.uint8, device="cuda") for _ in range(2))
    return 2 * size / timer.median(lambda: target.copy_(source))


def cublas_rate(torch, timer, size=8192):
    a, b = random_matrix(torch, size, size), random_matrix(torch, size, size)
    out = torch.empty_like(a)
    return 2 * size**3 / timer.median(lambda: torch.mm(a, b, out=out))


def check(torch, product, rows, weights, counts):
    """The grouped product against one in FP32, on the experts with the first, the middle and the last row."""
    ends = torch.tensor(counts, dtype=torch.int32, device="cuda").cumsum(0, dtype=torch.int32)
    got = product(rows, weights, ends)
    used = [expert for expert, count in enumerate(counts) if count > 0]
    for expert in {used[0], used[len(used) // 2], used[-1]}:
        begin = sum(counts[:expert])
        part = slice(begin, begin + min(counts[expert], 64))
        want = rows[part].float() @ weights[expert].float()
        error = ((got[part].float() - want).norm() / want.norm()).item()
        if not error <= TOLERANCE:
            sys.exit(f"torch_baseline.py: expert {expert} is off by {error:.3g} (relative L2), expected {TOLERANCE:.3g} at most")


def activated(torch, first_out, gated):
    if not gated:
        return torch.relu(first_out).square()
    gate, up = first_out.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def whole_layer(torch, product, first, second, gated, x, ids, weights):
    """x [T, H] BF16, ids [T, k] int32, weights [T, k] BF16 -> y [T, H]: sort, gather, both GEMMs, activation, weighted sum."""
    pairs = ids.flatten()
    order = pairs.argsort(stable=True)
    experts = torch.arange(first.shape[0], dtype=pairs.dtype, device="cuda")
    ends = torch.searchsorted(pairs[order], experts, right=True).int()
    h = activated(torch, product(x[order // ids.shape[1]], first, ends), gated)
    out = product(h, second, ends)
    row_of_pair = torch.empty_like(order)
    row_of_pair[order] = torch.arange(len(order), device="cuda")
    return torch.bmm(weights[:, None, :], out[row_of_pair].view(*ids.shape, -1))[:, 0]


def check_layer(torch, first, second, gated, x, ids, weights, got):
    """The first, the middle and the last token of the whole layer against FP32."""
    for token in {0, len(x) // 2, len(x) - 1}:
        want = sum(weight.float() * (activated(torch, x[token].float() @ first[expert].float(), gated) @ second[expert].float())
                   for expert, weight in zip(ids[token], weights[token]))
        error = ((got[token].float() - want).norm() / want.norm()).item()
        if not error <= LAYER_TOLERANCE:
            sys.exit(f"torch_baseline.py: token {token} is off by {error:.3g} (relative L2), expected {LAYER_TOLERANCE:.3g} at most")


def time_tokens(torch, timer, product, sizes, first, second, tokens):
    routings = Routings(sizes.experts, sizes.top_k, tokens)
    expert_bytes = 2 * (first[0].numel() + second[0].numel())
    passes, counts, used = [], [], 0
    while not passes or (used * expert_bytes < LEAST_BYTES and len(passes) < MOST_PASSES):
        drawn = routings.next()
        passes.append(torch.tensor(drawn, dtype=torch.int32, device="cuda"))
        counts.append(passes[-1].flatten().bincount(minlength=sizes.experts).tolist())
        used += sum(count > 0 for count in counts[-1])
    rows = tokens * sizes.top_k
    x = torch.randn(rows, first.shape[1], dtype=torch.bfloat16, device="cuda")
    h = torch.randn(rows, second.shape[1], dtype=torch.bfloat16, device="cuda")
    check(torch, product, x, first, counts[0])
    check(torch, product, h, second, counts[0])
    ends = [torch.tensor(count, dtype=torch.int32, device="cuda").cumsum(0, dtype=torch.int32) for count in counts]
    weights = torch.rand(tokens, sizes.top_k, device="cuda").bfloat16()
    layer = (torch, product, first, second, not sizes.no_gate, x[:tokens])
    check_layer(torch, *layer[2:], passes[0], weights, whole_layer(*layer, passes[0], weights))

    def gemms():
        for end in ends:
            product(x, first, end)
            product(h, second, end)

    def layers():
        for ids in passes:
            whole_layer(*layer, ids, weights)

    seconds, captured = timer.median_of_graph(gemms)
    layer_seconds, layer_captured = timer.median_of_graph(layers)
    return {
        "tokens": tokens,
        "rows": rows,
        "experts_used": used / len(passes),
        "passes": len(passes),
        "seconds": seconds / len(passes),
        "graph": captured,
        "layer_seconds": layer_seconds / len(passes),
        "layer_graph": layer_captured,
        "flops_per_second": 2 * rows * (first[0].numel() + second[0].numel()) * len(passes) / seconds,
        "weight_bytes_per_second": used * expert_bytes / seconds,
    }


def megamoe_bench(program, *options):
    """What `megamoe bench` reports; its own error message if it fails."""
    try:
        done = subprocess.run([program, "bench", *options, "--json"], check=False, stdout=subprocess.PIPE)
    except OSError as error:
        sys.exit(f"torch_baseline.py: cannot run {program}: {error.strerror}")
    if done.returncode != 0:
        sys.exit(done.returncode)
    return json.loads(done.stdout)


def sizes_of(program, model):
    for row in megamoe_bench(program, "--list")["models"]:
        if row["model"] == model:
            return row
    sys.exit(f"torch_baseline.py: there is no model '{model}'; `{program} bench --list` shows them")


def positive_numbers(text):
    numbers = [int(part) for part in text.split(",")]
    if min(numbers) < 1:
        raise ValueError
    return numbers


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=positive_numbers, default=[1, 8, 64, 512, 4096, 16384], help="numbers, with commas")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--intermediate", type=int, default=2048)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--top-k", type=int, default=6)
    parser.add_argument("--no-gate", action="store_true", help="one matrix before the activation instead of two (relu2)")
    parser.add_argument("--k-major", action="store_true", help="weights lie as [E, N, K], a linear layer's way, not [E, K, N]")
    parser.add_argument("--megamoe", help="the tool, to run its bench beside this one")
    parser.add_argument("--model", default="deepseek-v4-flash", help="with --megamoe: the model whose sizes are taken")
    out = parser.parse_args()
    if out.megamoe:
        row = sizes_of(out.megamoe, out.model)
        out.hidden, out.intermediate, out.experts, out.top_k = (
            row[name] for name in ("hidden", "intermediate", "experts", "top_k"))
        out.no_gate = row["activation"] == "relu2"
    if not 1 <= out.top_k <= out.experts:
        parser.error(f"--top-k must be 1 to {out.experts}, got {out.top_k}")
    return out


def weights_of(torch, sizes, depth, width):
    """[E, depth, width], as the product takes them."""
    if sizes.k_major:
        return random_matrix(torch, sizes.experts, width, depth).transpose(1, 2)
    return random_matrix(torch, sizes.experts, depth, width)


def main():
    sizes = arguments()
    try:
        import torch
    except ImportError:
        sys.exit("torch_baseline.py: needs PyTorch (pip install torch)")
    if not torch.cuda.is_available():
        sys.exit(f"torch_baseline.py: PyTorch {torch.__version__} finds no NVIDIA GPU")
    product = grouped_mm(torch)
    ours = []
    if sizes.megamoe:  # before PyTorch takes any of the GPU's memory
        report = megamoe_bench(sizes.megamoe, "--model", sizes.model, "--tokens", ",".join(map(str, sizes.tokens)))
        print(f"megamoe: {report['backend']} on {report['device']}")
        ours = report["results"]

    torch.manual_seed(1)
    timer = Timer(torch)
    copy, cublas = copy_bandwidth(torch, timer), cublas_rate(torch, timer)
    device = torch.cuda.get_device_name()
    print(f"PyTorch {torch.__version__} on {device}: a copy moves {copy * 1e-12:.2f} TB/s, "
          f"cuBLAS reaches {cublas * 1e-12:.0f} TFLOP/s in BF16")
    print(f"hidden {sizes.hidden}, intermediate {sizes.intermediate}, {sizes.experts} experts, top-{sizes.top_k}, BF16")
    first = weights_of(torch, sizes, sizes.hidden, sizes.intermediate * (1 if sizes.no_gate else 2))
    second = weights_of(torch, sizes, sizes.intermediate, sizes.hidden)

    formats = list(dict.fromkeys(result["activations"] for result in ours))
    print(f"{'tokens':>7} {'experts used':>13} {'GEMMs us':>10} {'TFLOP/s':>9} {'weight TB/s':>12} {'layer us':>10}" +
          "".join(f" {'megamoe ' + name + ' us':>19} {'ratio':>6}" for name in formats))
    results = []
    for tokens in sizes.tokens:
        result = time_tokens(torch, timer, product, sizes, first, second, tokens)
        line = (f"{tokens:>7} {result['experts_used']:>13.4g} {result['seconds'] * 1e6:>10.1f} "
                f"{result['flops_per_second'] * 1e-12:>9.1f} {result['weight_bytes_per_second'] * 1e-12:>12.2f} "
                f"{result['layer_seconds'] * 1e6:>10.1f}")
        for own in ours:
            if own["tokens"] == tokens:
                result[f"megamoe_{own['activations']}_seconds"] = own["seconds"]
                line += f" {own['seconds'] * 1e6:>19.1f} {result['layer_seconds'] / own['seconds']:>6.2f}"
        print(line, flush=True)
        results.append(result)
    print(json.dumps({
        "torch": torch.__version__,
        "device": device,
        "copy_bytes_per_second": copy,
        "cublas_flops_per_second": cublas,
        "hidden": sizes.hidden,
        "intermediate": sizes.intermediate,
        "experts": sizes.experts,
        "top_k": sizes.top_k,
        "k_major": sizes.k_major,
        "results": results,
    }))


if __name__ == "__main__":
    main()
