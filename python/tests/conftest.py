"""What the tests share: the shipped model, and layers made of random numbers."""

import pathlib

import pytest

MODEL = pathlib.Path(__file__).resolve().parents[2] / "examples" / "tiny-qwen3-moe"


@pytest.fixture(scope="session")
def model_path():
    return MODEL


@pytest.fixture(scope="session")
def quantized_path(tmp_path_factory):
    """The shipped model with NVFP4 experts, as ModelOpt names them."""
    import megamoe

    path = tmp_path_factory.mktemp("models") / "nvfp4"
    megamoe.quantize_checkpoint(MODEL, path, activations="dynamic")
    return path
