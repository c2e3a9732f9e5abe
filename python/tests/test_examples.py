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


def test_torch_model(monkeypatch, capsys):
    pytest.importorskip("transformers")
    shown = run(monkeypatch, "torch_model.py")
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("NVFP4: ") and len(line) > 40 for line in lines)
    assert (shown["compiled"](shown["x"]) - shown["block"](shown["x"])).abs().max() < 2**-5
