"""Adapters beside frozen weights: what is trained, what the reference and the engine get, and what is saved."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from spmdrl.config import LoraConfig, ModelConfig
from spmdrl.config.merge import MergeLoraConfig
from spmdrl.distributed.weight_sync import iter_weights
from spmdrl.errors import UserError
from spmdrl.models.actor import Actor
from spmdrl.models.loading import CheckpointWeights, load_causal_lm
from spmdrl.models.lora import WithoutLora, add_lora, quantization
from spmdrl.models.merge import merge_lora
from spmdrl.models.tokenizer import load_tokenizer, pad_token_apart_from
from spmdrl.models.value_head import load_value_model
from spmdrl.trainer.build import enable_checkpointing
from spmdrl.trainer.export import hf_config_to_save, save_hf
from tests import zygote
from tests.launched import ROOT
from tests.models.test_value_head import add_weights
from tests.tiny import make_model

SEQUENCES = torch.tensor([[5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 15, 16]])
MASK = torch.tensor([[False, True, True, True, True]] * 2)


def load(path, dtype=torch.float32):
    return load_causal_lm(ModelConfig(pretrain=path), dtype=dtype)


def with_lora(path, *, trained=True, seed=1, dtype=torch.float32, **lora):
    """The model with adapters; trained ones add something, new ones do not."""
    model = load(path, dtype)
    add_lora(model, LoraConfig(**{"lora_rank": 2, **lora}), seed=seed)
    if trained:
        generator = torch.Generator().manual_seed(seed)
        for name, p in model.named_parameters():
            if ".lora_B." in name:
                p.data = (torch.randn(p.shape, generator=generator) / 10).to(dtype)
    return model


@pytest.mark.parametrize(("arch", "tie"), [("llama", False), ("qwen2", True), ("gpt2", True)])
def test_the_engine_gets_merged_weights_under_the_names_of_the_checkpoint(tmp_path, arch, tie):
    """A plain model with them says what the model with adapters says. The frozen weights keep every bit, 50 times."""
    path = make_model(tmp_path / "model", arch, tie=tie)
    model, plain = with_lora(path, lora_alpha=6), load(path)
    base = {name: p.clone() for name, p in model.named_parameters()}
    for _ in range(50):
        sent = dict(iter_weights(Actor(model), bucket_mb=1))
    assert list(sent) == CheckpointWeights(ModelConfig(pretrain=path)).names
    assert all(torch.equal(p, base[name]) for name, p in model.named_parameters())
    before = plain(SEQUENCES).logits
    plain.load_state_dict(sent, strict=not tie)
    with torch.no_grad():
        torch.testing.assert_close(plain(SEQUENCES).logits, model(SEQUENCES).logits, atol=1e-5, rtol=1e-5)
    assert (plain(SEQUENCES).logits - before).abs().max() > 0.1
    changed = {name for name, p in load(path).named_parameters() if not torch.equal(p, sent[name])}
    assert not any("embed" in name or "wte" in name or "lm_head" in name for name in changed)
    assert len(changed) == sum("lora_A" in name for name in base)


def test_merging_bf16_rounds_once(tmp_path):
    """W + (alpha / rank) B A, in fp32 until the end: that of one weight by hand."""
    model = with_lora(make_model(tmp_path / "model"), dtype=torch.bfloat16, lora_alpha=8)
    layer = model.model.layers[0].mlp.up_proj
    merged = dict(iter_weights(Actor(model), bucket_mb=1))["model.layers.0.mlp.up_proj.weight"]
    a, b = layer.lora_A.default.weight.double(), layer.lora_B.default.weight.double()
    expected = layer.base_layer.weight.double() + 8 / 2 * b @ a
    assert merged.dtype == torch.bfloat16
    assert ((merged - expected).abs() <= 2**-8 * expected.abs() * 1.001).all()


def test_the_reference_is_bit_for_bit_the_model_that_was_loaded(tmp_path):
    path = make_model(tmp_path / "model")
    actor, base = Actor(with_lora(path)), Actor(load(path))
    trainable = [p for p in actor.parameters() if p.requires_grad]
    assert torch.equal(WithoutLora(actor)(SEQUENCES, MASK)[0], base(SEQUENCES, MASK)[0])
    assert (actor(SEQUENCES, MASK)[0] - base(SEQUENCES, MASK)[0]).abs().max() > 0.01
    assert [p for p in actor.parameters() if p.requires_grad] == trainable


def test_new_adapters_add_nothing_and_follow_from_the_seed(tmp_path):
    path = make_model(tmp_path / "model")
    models = [with_lora(path, trained=False, seed=seed) for seed in (1, 1, 2)]
    assert torch.equal(models[0](SEQUENCES).logits, load(path)(SEQUENCES).logits)
    a, b, c = (model.model.layers[1].self_attn.q_proj.lora_A.default.weight for model in models)
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_trains_every_adapter_alike(tmp_path, reentrant):
    """The first layer's too, in front of which nothing is trained. Frozen weights, the head's too, get no gradient."""
    path = make_model(tmp_path / "model")
    gradients = []
    for checkpointing in (False, True):
        model = with_lora(path)
        config = ModelConfig(gradient_checkpointing=checkpointing, gradient_checkpointing_use_reentrant=reentrant)
        enable_checkpointing(model, config)
        model.train()
        Actor(model)(SEQUENCES, MASK)[0].sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    plain, checkpointed = gradients
    assert len(plain) == 2 * 7 * 2  # layers, linear layers of each, matrices of each
    assert plain.keys() == checkpointed.keys()
    for name, gradient in plain.items():
        assert ".lora_" in name
        assert gradient.abs().max() > 0
        torch.testing.assert_close(checkpointed[name], gradient)


def test_only_the_named_layers_get_adapters(tmp_path):
    model = with_lora(make_model(tmp_path / "model"), target_modules=("q_proj", "layers.1.mlp.up_proj"))
    names = {name.partition(".lora_A")[0] for name, _ in model.named_parameters() if ".lora_A." in name}
    assert names == {
        f"model.layers.{place}" for place in ("0.self_attn.q_proj", "1.self_attn.q_proj", "1.mlp.up_proj")
    }


@pytest.mark.parametrize("name", ["q_porj", "lm_head", "embed_tokens"])
def test_a_layer_that_cannot_have_an_adapter_is_named(tmp_path, name):
    known = "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
    with pytest.raises(UserError, match=f"--target_modules {name}: the model has no such linear layer, only {known}"):
        with_lora(make_model(tmp_path / "model"), target_modules=("q_proj", name))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPU")
def test_four_bits_without_a_gpu_are_one_line():
    with pytest.raises(UserError, match="--load_in_4bit needs a GPU"):
        quantization(LoraConfig(lora_rank=2, load_in_4bit=True), torch.bfloat16)


# ---- files ----------------------------------------------------------------------------------------------------------
def save(model, path, folder, *, mean=None, **changes):
    config = ModelConfig(pretrain=path)
    own = hf_config_to_save(path, config, dtype=torch.float32, **changes)
    own.mean = mean
    save_hf(model, load_tokenizer(config), folder, hf_config=own)


def test_the_adapter_loads_with_peft_on_its_base(tmp_path):
    """From another directory, too: the path to the base is absolute. Plain transformers loads both at once."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path, folder = make_model(tmp_path / "model"), tmp_path / "adapter"
    model = with_lora(path, lora_alpha=6, lora_dropout=0.1).eval()
    save(Actor(model), path, folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "model")
    expected = {"r": 2, "lora_alpha": 6, "lora_dropout": 0.1, "task_type": "CAUSAL_LM", "modules_to_save": None}
    assert {name: config[name] for name in expected} == expected
    weights = load_file(folder / "adapter_model.safetensors")
    assert len(weights) == 2 * 7 * 2
    assert all(w.numel() > 0 for w in weights.values())
    assert not (folder / "model.safetensors").exists()
    with torch.no_grad():
        for loaded in (PeftModel.from_pretrained(load(path), folder), AutoModelForCausalLM.from_pretrained(folder)):
            torch.testing.assert_close(loaded.eval()(SEQUENCES).logits, model(SEQUENCES).logits, atol=1e-5, rtol=1e-5)
    assert AutoTokenizer.from_pretrained(folder).chat_template


def scoring_model(path, *, bias=False):
    """A value model with trained adapters, and a head that is not the new one's."""
    if bias:
        add_weights(Path(path), {"score.weight": torch.ones(1, 64) / 64, "score.bias": torch.tensor([0.5])})
    critic = load_value_model(
        path, ModelConfig(), flag="--pretrain", value_head_prefix="score", dtype=torch.float32, seed=1
    )
    add_lora(critic.model, LoraConfig(lora_rank=2), seed=1)
    with torch.no_grad():
        for p in critic.parameters():
            if p.requires_grad:
                p += torch.linspace(-0.1, 0.1, p.numel()).reshape(p.shape)
    return critic


def test_the_head_of_a_value_model_is_trained_and_saved_with_the_adapter(tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    path, folder = make_model(tmp_path / "model"), tmp_path / "adapter"
    critic = scoring_model(path)
    assert {n for n, p in critic.named_parameters() if p.requires_grad and ".lora_" not in n} == {"model.score.weight"}
    own = ModelConfig(pretrain=path)
    tokenizer = load_tokenizer(own)
    pad_token_apart_from(tokenizer, [tokenizer.eos_token_id])  # as train_rm.py saves it
    hf_config = hf_config_to_save(path, own, dtype=torch.float32, num_labels=1)
    save_hf(critic, tokenizer, folder, hf_config=hf_config)
    base = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1)
    both_at_once = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "supervised.md").read_text(), flags=re.S)
    exec(example.replace("ADAPTER", str(folder)), documented := {})
    values = critic(SEQUENCES, torch.ones(2, 5, dtype=torch.bool))
    with torch.no_grad():
        for loaded in (PeftModel.from_pretrained(base, folder), both_at_once, documented["model"]):
            scores = loaded.eval()(SEQUENCES[:, :5]).logits[:, 0]
            torch.testing.assert_close(scores, values[:, -1], atol=1e-5, rtol=1e-5)
        assert base.config.pad_token_id == tokenizer.eos_token_id != tokenizer.pad_token_id
        ended = torch.cat([SEQUENCES[:1, :5], torch.tensor([[tokenizer.eos_token_id]])], dim=1)
        value = critic(torch.cat([ended, ended[:, :1]], dim=1), torch.ones(1, 6, dtype=torch.bool))[0, -1]
        assert float(documented["model"](ended).logits) == pytest.approx(float(value), abs=1e-5)


def merge(folder, out, **flags):
    return merge_lora(MergeLoraConfig(lora_path=str(folder), output_path=str(out), **flags))


def test_a_merged_model_has_the_weights_that_the_engine_got(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path, folder = make_model(tmp_path / "model", dtype="bfloat16"), tmp_path / "adapter"
    model = with_lora(path, lora_alpha=6, dtype=torch.bfloat16)
    sent = dict(iter_weights(Actor(model), bucket_mb=1))
    save(Actor(model), path, folder)
    said = merge(folder, tmp_path / "merged")
    expected = f"{path} with {folder} merged into 14 layers, in bfloat16, and the tokenizer of {folder}"
    assert said == f"{tmp_path / 'merged'}: {expected}"
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    assert merged.dtype == torch.bfloat16
    assert all(torch.equal(p, sent[name]) for name, p in merged.named_parameters())
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").chat_template
    merge(folder, tmp_path / "wide", model_path=path, bf16=False)
    wide = AutoModelForCausalLM.from_pretrained(tmp_path / "wide", dtype="auto")
    assert wide.dtype == torch.float32
    torch.testing.assert_close(wide(SEQUENCES).logits, model.float()(SEQUENCES).logits, atol=1e-5, rtol=1e-5)


def test_a_merged_model_is_whole_or_absent(tmp_path, monkeypatch):
    """What a killed merge left is gone after the next one, and so are the weights of a model that was there before."""
    from transformers import PreTrainedTokenizerBase

    path, folder, out = make_model(tmp_path / "model"), tmp_path / "adapter", tmp_path / "merged"
    save(Actor(with_lora(path)), path, folder)
    (out / ".partial").mkdir(parents=True)
    (out / ".partial" / "model-00007-of-00009.safetensors").write_text("half")
    (out / "pytorch_model.bin").write_text("old")
    with monkeypatch.context() as patch:

        def full(*args, **kwargs):
            raise OSError(28, "No space left on device")

        patch.setattr(PreTrainedTokenizerBase, "save_pretrained", full)
        with pytest.raises(UserError, match=r"--output_path .*merged: cannot write the model: .*No space left"):
            merge(folder, out)
    assert [file.name for file in out.iterdir()] == ["pytorch_model.bin"]
    merge(folder, out)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {file.name for file in out.iterdir()}
    assert not list(out.glob("*.bin")) + list(out.glob(".partial")) + list(out.glob("*00007*"))


@pytest.mark.parametrize("bias", [False, True])
def test_a_merged_reward_model_scores_the_same_and_keeps_its_statistics(tmp_path, bias):
    path, folder, out = make_model(tmp_path / "model"), tmp_path / "adapter", tmp_path / "merged"
    critic = scoring_model(path, bias=bias)
    save(critic, path, folder, num_labels=1, mean=0.25)
    merge(folder, out, is_rm=True)
    merged = load_value_model(
        str(out), ModelConfig(), flag="--pretrain", value_head_prefix="score", dtype=torch.float32, seed=1
    )
    assert not merged.has_new_head
    assert (merged.model.config.num_labels, merged.model.config.mean) == (1, 0.25)
    mask = torch.ones(2, 5, dtype=torch.bool)
    # Sums of numbers up to 4 in fp32: in fp64 both agree to 1e-6.
    torch.testing.assert_close(merged(SEQUENCES, mask), critic(SEQUENCES, mask), atol=5e-5, rtol=1e-5)


def test_what_does_not_belong_together_is_not_merged(tmp_path):
    path, folder = make_model(tmp_path / "model"), tmp_path / "adapter"
    save(Actor(with_lora(path)), path, folder)
    with pytest.raises(UserError, match="is that of a causal LM: drop --is_rm"):
        merge(folder, tmp_path / "merged", is_rm=True)
    shallow = make_model(tmp_path / "shallow", num_layers=1)
    with pytest.raises(UserError, match=r"does not fit the base: .*layers\.1\..* 14 in all"):
        merge(folder, tmp_path / "merged", model_path=shallow)
    headless = make_model(tmp_path / "headless")
    weights = load_file(Path(headless, "model.safetensors"))
    del weights["lm_head.weight"]
    save_file(weights, Path(headless, "model.safetensors"), metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"the base .*headless: weights are missing: lm_head\.weight, 1 in all"):
        merge(folder, tmp_path / "merged", model_path=headless)
    narrow = make_model(tmp_path / "narrow", hidden_size=32)
    with pytest.raises(UserError, match="cannot load an adapter and its base"):
        merge(folder, tmp_path / "merged", model_path=narrow)
    assert not (tmp_path / "merged").exists()


@pytest.mark.slow
def test_the_script_merges_and_says_in_one_line_what_is_wrong(tmp_path):
    path, folder = make_model(tmp_path / "model"), tmp_path / "adapter"
    model = with_lora(path)
    save(Actor(model), path, folder)
    command = [str(ROOT / "cli" / "merge_lora.py"), "--output_path", "merged", "--lora_path"]
    done = subprocess.run(
        [sys.executable, *command, "adapter"], capture_output=True, text=True, cwd=tmp_path, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"merged: {path} with adapter merged into 14 layers, in float32")
    merged = load(str(tmp_path / "merged"))
    torch.testing.assert_close(merged(SEQUENCES).logits, model(SEQUENCES).logits, atol=1e-5, rtol=1e-5)
    for words, message in (
        (["model"], "error: --lora_path model: there is no adapter_config.json in it\n"),
        (["adapter", "--model_path", "no/such/model"], "error: --model_path no/such/model: no such directory\n"),
        (["adapter", "--is_rm"], "error: --lora_path adapter is that of a causal LM: drop --is_rm\n"),
    ):
        with open(tmp_path / "said", "w") as said:
            failed = zygote.start([*command, *words], os.environ, tmp_path, said.fileno(), said.fileno())
        assert (failed.wait(200), (tmp_path / "said").read_text()) == (2, message)
