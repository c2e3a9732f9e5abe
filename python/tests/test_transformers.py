"""Quantised experts in Hugging Face models, and what they cost on the shipped one."""

import copy
import json

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import megamoe  # noqa: E402
from megamoe.evaluate import Windows, bits_per_byte, evaluate, main, read_windows  # noqa: E402
from megamoe.torch import Experts  # noqa: E402
from megamoe.transformers import Recipe, replace_experts  # noqa: E402

COMMON = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
          "num_key_value_heads": 2, "head_dim": 32, "num_experts_per_tok": 2}
MODELS = {
    "Qwen3Moe": {"moe_intermediate_size": 48, "num_experts": 6, "intermediate_size": 48},
    "Mixtral": {"intermediate_size": 48, "num_local_experts": 6},
    "DeepseekV3": {"moe_intermediate_size": 48, "n_routed_experts": 8, "n_group": 2, "topk_group": 1,
                   "num_hidden_layers": 2, "first_k_dense_replace": 1, "intermediate_size": 64, "q_lora_rank": 32,
                   "kv_lora_rank": 32, "head_dim": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16,
                   "v_head_dim": 32},
    "GptOss": {"intermediate_size": 48, "num_local_experts": 6},
}


def make_model(kind):
    torch.manual_seed(1)
    config = getattr(transformers, f"{kind}Config")(**(COMMON | MODELS[kind]))
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():  # what starts as zero would hide a mistake, and experts should matter
        for name, parameter in model.named_parameters():
            if "experts" in name and "shared" not in name:
                parameter.normal_(std=0.5 if "bias" in name else 0.2)
    return model


def dequantized(model, gate_up_scale):
    """A copy of the model whose experts have the values of NVFP4, by transformers' own code in FP32."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if not hasattr(module, "gate_up_proj") or module.gate_up_proj.dim() != 3:
            continue
        gpt_oss = hasattr(module, "gate_up_proj_bias")
        for gate_up, down in zip(module.gate_up_proj.data, module.down_proj.data):
            rows = gate_up.T if gpt_oss else gate_up
            parts = [rows] if gate_up_scale == "shared" else [rows[::2], rows[1::2]] if gpt_oss else rows.chunk(2)
            for part in [*parts, down.T if gpt_oss else down]:
                part.copy_(torch.from_numpy(megamoe.quantize(part).dequantize()))
    return model


# x, h and y of the experts are rounded to BF16, half a unit in the last place of 8 bits each. (One such block, for a
# second one's router may choose other experts for that.)
BF16_ROUNDING = 3 * 2.0**-9


@torch.inference_mode()
def logits(model):
    return model(input_ids=torch.arange(90).reshape(2, 45) % 96, use_cache=False).logits


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("gate_up_scale", ["shared", "separate"])
def test_replaces_the_experts_of(kind, gate_up_scale):
    model = make_model(kind)
    before = logits(model)
    expected = logits(dequantized(model, gate_up_scale))
    replacement = replace_experts(model, Recipe(gate_up_scale=gate_up_scale))
    assert [name for name, module in model.named_modules() if isinstance(module, Experts)] == list(replacement.layers)
    after = logits(model)
    assert (after - expected).norm() < BF16_ROUNDING * expected.norm() < (before - expected).norm()
    replacement.restore()
    assert torch.equal(logits(model), before)


def test_finds_out_the_activation():
    def clamped(gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate.clamp(max=10)) * up.clamp(-10, 10)

    model = make_model("Mixtral")
    for module in model.modules():
        if hasattr(module, "gate_up_proj"):
            module.limit, module._apply_gate = 10.0, clamped
    for kind, expected in (("Mixtral", ("swiglu-clamped", 10.0)), ("Qwen3Moe", ("swiglu", 0.0)),
                           ("GptOss", ("gpt-oss", 7.0))):
        replacement = replace_experts(model if kind == "Mixtral" else make_model(kind))
        for layer in replacement.layers.values():
            assert (layer.config["activation"], layer.config["limit"]) == expected


@pytest.mark.parametrize("kind", MODELS)
def test_takes_experts_from_a_checkpoint(tmp_path, kind):
    model = make_model(kind).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "model")
    megamoe.quantize_checkpoint(tmp_path / "model", tmp_path / "nvfp4", fused_layout="cols-first")
    first = replace_experts(model)
    expected = logits(model)
    first.restore()
    replacement = replace_experts(model, tmp_path / "nvfp4")
    assert torch.equal(logits(model), expected)
    assert sorted(replacement.layers) == sorted(first.layers)


def test_says_what_does_not_fit(model_path, quantized_path):
    with pytest.raises(ValueError, match="must hold experts in NVFP4 or MXFP4, got dense ones"):
        replace_experts(transformers.AutoModelForCausalLM.from_pretrained(model_path), model_path)
    experts = next(module for module in make_model("Mixtral").modules() if hasattr(module, "gate_up_proj"))
    with pytest.raises(ValueError, match="got such a module itself"):
        replace_experts(experts)
    with pytest.raises(TypeError, match="model must be a torch module, got str"):
        replace_experts("model")
    with pytest.raises(FileNotFoundError, match="no-such"):
        replace_experts(make_model("Mixtral"), "no-such")
    with pytest.raises(ValueError, match="3-dimensional gate_up_proj and down_proj, Linear has none"):
        replace_experts(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"6 experts of hidden size 64 .* got a checkpoint with \(16, 256, 128\)"):
        replace_experts(make_model("Mixtral"), quantized_path)
    with pytest.raises(ValueError, match="shared or separate, got both"):
        replace_experts(make_model("Mixtral"), Recipe(gate_up_scale="both"))
    model = make_model("Mixtral")
    for module in model.modules():
        if hasattr(module, "act_fn"):
            module.act_fn = torch.nn.GELU()
    with pytest.raises(NotImplementedError, match="SwiGLU"):
        replace_experts(model)


@pytest.fixture(scope="module")
def shipped(model_path):
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    return model, read_windows(model_path, 256, (model_path / "held_out.txt").read_bytes(), 64, 256)


# FP8 activations cost less than a sample of this size can tell from nothing.
FP8_NOISE = 0.0003


def test_costs_what_it_should(shipped):
    before, weights, fp8, both = (result.bits_per_byte for result in evaluate(*shipped))
    assert before == pytest.approx(1.6892, abs=0.0001)
    assert weights == pytest.approx(1.694, abs=0.002)
    assert both == pytest.approx(1.703, abs=0.003)
    assert weights - FP8_NOISE < fp8 < both


def test_loss_is_that_of_the_probabilities():
    class Bigram(torch.nn.Module):  # knows that b follows a, and nothing else
        device = torch.device("cpu")

        def forward(self, input_ids, use_cache):
            logits = torch.zeros(*input_ids.shape, 256)
            logits[input_ids == ord("a"), ord("b")] = 100.0
            return transformers.modeling_outputs.CausalLMOutput(logits=logits)

    ids = torch.tensor([list(b"abxy"), list(b"xxab")])
    assert bits_per_byte(Bigram(), Windows(ids, 6), batch=1) == pytest.approx((4 * 8 + 2 * 0) / 6, abs=1e-6)


def test_prints_a_table_or_json(capsys, model_path, quantized_path):
    arguments = [str(model_path), "--text", str(model_path / "held_out.txt"), "--windows", "2", "--checkpoint",
                 str(quantized_path), "--activations", "bf16"]
    main(arguments)
    table = capsys.readouterr().out
    assert "2 windows of 256 tokens" in table and "as is" in table and "NVFP4     bf16" in table
    main([*arguments, "--json"])
    results = json.loads(capsys.readouterr().out)["results"]
    assert [result["activations"] for result in results] == [None, "bf16"]
    assert all(f"{result['bits_per_byte']:.4f}" in table for result in results)


@pytest.mark.parametrize("change, message", [
    (["--windows", "0"], "--windows: must be 1 or more, got 0"), (["--window", "1"], "must be 2 or more, got 1"),
    (["--batch", "-1"], "--batch: must be 1 or more"), (["--dtype", "int8"], "invalid choice: 'int8'"),
    (["--device", "gpu"], "--device gpu: "), (["--device", "meta"], "--device must be cpu or cuda, got 'meta'"),
    (["--activations", "bf16,int8"], "must be some of bf16, fp8 and nvfp4, got 'int8'"),
    (["--backend", "tpu"], "--backend must be one of "), (["--x-scale", "big"], "--x-scale must be static, layer-max"),
    (["--checkpoint", "no-such"], "there is no checkpoint no-such"), (["no-such-model"], "there is no directory no-such-model"),
])
def test_refuses_arguments_that_do_not_fit(capsys, model_path, change, message):
    with pytest.raises(SystemExit):
        main([*([] if change[0] == "no-such-model" else [str(model_path)]), "--text", str(model_path / "held_out.txt"),
              *change])
    assert message in capsys.readouterr().err


# Tokens are bytes, so that characters fall apart at a window's edges.
@pytest.mark.parametrize("text", ["plain words. " * 40, "\u3042\u3044\u3046" * 80, "\u043f\u0440\u0438\u0432\u0435\u0442 " * 40])
def test_counts_bytes_behind_a_tokenizer(tmp_path, text):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    windows = read_windows(tmp_path, 256, text.encode(), 8, 31)
    assert windows.ids.shape == (8, 31)
    cut = 0 if text.isascii() else 8 * 2 * 3  # a character at either end of each
    assert abs(windows.predicted_bytes - 8 * 30) <= cut


def test_refuses_texts_that_are_too_short(model_path):
    with pytest.raises(ValueError, match="64 windows of 256 tokens, got 100 tokens"):
        read_windows(model_path, 256, bytes(100), 64, 256)
    with pytest.raises(ValueError, match="tokenizer, or a vocabulary of 256 for bytes, got 1000"):
        read_windows(model_path, 1000, bytes(100), 1, 10)
