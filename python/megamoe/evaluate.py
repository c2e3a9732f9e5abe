"""What quantised experts cost a language model, in bits per byte of a text.

    python -m megamoe.evaluate MODEL --text FILE

runs the model as it is, then with its experts in NVFP4 and activations in BF16, FP8 and NVFP4.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import megamoe
from megamoe.transformers import Recipe, replace_experts

ACTIVATIONS = ("bf16", "fp8", "nvfp4")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


class Windows(NamedTuple):
    """Pieces of a text, each to be predicted from its own first token on."""

    ids: Tensor  # int64 [windows, length]
    predicted_bytes: int  # of the text behind all tokens but each window's first


class Result(NamedTuple):
    """A model's loss."""

    activations: str | None  # "bf16", "fp8" or "nvfp4" with NVFP4 experts; None: the model as it is
    bits_per_byte: float


def read_windows(model: str | os.PathLike[str], vocabulary: int, text: bytes, count: int, length: int) -> Windows:
    """The first `count` windows of `length` tokens of a text, by the tokenizer in the model's directory.

    A model without one whose vocabulary is 256 reads bytes. Raises ValueError where the text is too short or there is
    no tokenizer.
    """
    if any((pathlib.Path(model) / name).exists() for name in TOKENIZER_FILES):
        from transformers import AutoTokenizer

        tokenizer, characters = AutoTokenizer.from_pretrained(model), text.decode()
        if not tokenizer.is_fast:
            raise ValueError(f"{model} must have a tokenizer that says where its tokens lie in the text (a fast one)")
        found = tokenizer(characters, add_special_tokens=False, return_offsets_mapping=True)
        tokens, ends = found["input_ids"], [end for _, end in found["offset_mapping"]]
        # A character of several tokens is behind the first of them.
        size = lambda first, last: len(characters[ends[first]:ends[last]].encode())
    elif vocabulary == 256:
        tokens, size = list(text), lambda first, last: last - first
    else:
        raise ValueError(f"{model} must have a tokenizer, or a vocabulary of 256 for bytes, got {vocabulary}")
    if len(tokens) < count * length:
        raise ValueError(f"the text must have {count} windows of {length} tokens, got {len(tokens)} tokens")
    begins = range(0, count * length, length)
    return Windows(torch.tensor([tokens[begin:begin + length] for begin in begins]),
                   sum(size(begin, begin + length - 1) for begin in begins))


@torch.inference_mode()
def bits_per_byte(model: Any, windows: Windows, batch: int = 8,
                  progress: Callable[[Iterable[Tensor]], Iterable[Tensor]] = iter) -> float:
    """The mean number of bits that the model needs for a byte of the windows, `batch` of them at a time."""
    nats = 0.0
    for ids in progress(windows.ids.split(batch)):
        ids = ids.to(model.device)
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
        nats += torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum").item()
    return nats / math.log(2) / windows.predicted_bytes


def evaluate(model: torch.nn.Module, windows: Windows, source: str | os.PathLike[str] | Recipe = Recipe(),
             activations: Sequence[str] = ACTIVATIONS, batch: int = 8,
             progress: Callable[[str, Iterable[Tensor]], Iterable[Tensor]] = lambda name, batches: batches,
             **options: Any) -> list[Result]:
    """The loss of the model as it is, then with its experts replaced from `source` for each format of activations.

    `options` go to replace_experts. `progress(name, batches)` may show how far it is. The model is left as it was.
    """
    model.eval()
    results = [Result(None, bits_per_byte(model, windows, batch, lambda batches: progress("as it is", batches)))]
    for name in activations:
        replacement = replace_experts(model, source, activations=name, **options)
        try:
            loss = bits_per_byte(model, windows, batch, lambda batches: progress(name, batches))
        finally:
            replacement.restore()
        results.append(Result(name, loss))
    return results


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be {least} or more, got {value}")
        return value
    return number


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m megamoe.evaluate", description=__doc__.splitlines()[0])
    parser.add_argument("model", metavar="MODEL", help="a directory that transformers loads")
    parser.add_argument("--text", required=True, type=pathlib.Path, help="a file of text the model has not seen")
    parser.add_argument("--checkpoint", help="take the experts from this quantised checkpoint (default: quantise the "
                                             "model's own)")
    parser.add_argument("--activations", default=",".join(ACTIVATIONS), help="formats to try (default: %(default)s)")
    parser.add_argument("--x-scale", default="", help="nvfp4: tensor scale of x: static, layer-max, token or tensor")
    parser.add_argument("--h-scale", default="", help="nvfp4: tensor scale of h: likewise")
    parser.add_argument("--four-over-six", action="store_true", help="quantise with two candidates for each block")
    parser.add_argument("--backend", default="", help="what runs the experts (default: the best one)")
    parser.add_argument("--windows", type=_at_least(1), default=64, help="how many (default: %(default)s)")
    parser.add_argument("--window", type=_at_least(2), default=256, help="tokens of each (default: %(default)s)")
    parser.add_argument("--batch", type=_at_least(1), default=8, help="windows at a time (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"), help="of the rest of the model (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    if not pathlib.Path(options.model).is_dir():
        parser.error(f"there is no directory {options.model}")
    if options.checkpoint is not None and not pathlib.Path(options.checkpoint).exists():
        parser.error(f"there is no checkpoint {options.checkpoint}")
    options.activations = [name.strip() for name in options.activations.split(",")]
    for name in options.activations:
        if name not in ACTIVATIONS:
            parser.error(f"--activations must be some of bf16, fp8 and nvfp4, got {name!r}")
    if options.backend and options.backend not in (known := [backend["name"] for backend in megamoe.backends()]):
        parser.error(f"--backend must be one of {', '.join(known)}, got {options.backend!r}")
    for flag, scale in (("--x-scale", options.x_scale), ("--h-scale", options.h_scale)):
        if scale not in ("", "static", "layer-max", "token", "tensor"):
            parser.error(f"{flag} must be static, layer-max, token or tensor, got {scale!r}")
    try:
        if torch.device(options.device).type not in ("cpu", "cuda"):
            parser.error(f"--device must be cpu or cuda, got {options.device!r}")
        torch.empty(0, device=options.device)
    except (RuntimeError, AssertionError) as error:
        parser.error(f"--device {options.device}: {str(error).splitlines()[0]}")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parse(arguments)
    text = options.text.read_bytes()
    from tqdm import tqdm
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.dtype)).to(options.device)
    windows = read_windows(options.model, model.config.get_text_config().vocab_size, text, options.windows,
                           options.window)
    results = evaluate(model, windows, options.checkpoint or Recipe(four_over_six=options.four_over_six),
                       options.activations, options.batch,
                       lambda name, batches: tqdm(batches, name, leave=False, unit="batch", disable=None),
                       backend=options.backend, x_scale=options.x_scale, h_scale=options.h_scale)
    if options.json:
        print(json.dumps({"model": options.model, "windows": options.windows, "window": options.window,
                          "results": [result._asdict() for result in results]}))
        return
    print(f"{options.model}, {options.windows} windows of {options.window} tokens\n")
    print(f"{'experts':<10}{'activations':<13}{'bits per byte':>13}{'change':>10}")
    for result in results:
        row = f"{'NVFP4' if result.activations else 'as is':<10}{result.activations or '-':<13}{result.bits_per_byte:>13.4f}"
        print(row + (f"{result.bits_per_byte - results[0].bits_per_byte:>+10.4f}" if result.activations else ""))


if __name__ == "__main__":
    try:
        main()
    except (LookupError, OSError, ValueError, NotImplementedError) as error:
        sys.exit(f"megamoe.evaluate: {error}")
