"""The scripts in examples/python run and show what they say they show."""

import pathlib
import runpy
import sys

import pytest

SCRIPTS = pathlib.Path(__file__).resolve().parents[2] / "examples" / "python"


def run(monkeypatch, name, *arguments):
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    return runpy.run_path(str(SCRIPTS / name))


def test_quantize_model(monkeypatch, capsys, tmp_path):
    run(monkeypatch, "quantize_model.py", tmp_path)
    assert (tmp_path / "tiny-qwen3-moe-nvfp4" / "config.json").exists()
    errors = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines() if "relative error" in line]
    assert len(errors) == 4 and all(0.05 < error < 0.25 for error in errors)


def test_expert_errors(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    run(monkeypatch, "expert_errors.py", tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_torch_model(monkeypatch, capsys, model_path):
    pytest.importorskip("transformers")
    run(monkeypatch, "torch_model.py")
    shown = capsys.readouterr().out
    prompt = (model_path / "held_out.txt").read_bytes()[:64].decode()
    written = shown.split("\nNVFP4: ")[1]
    assert written.startswith(prompt) and written[len(prompt):].split("\n")[0].strip()
    # A sum in another order moves some numbers to their neighbours in NVFP4.
    assert float(shown.splitlines()[-1].removeprefix("compiled and eager differ by ").split()[0]) < 0.05
