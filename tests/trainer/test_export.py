"""Invariant 10 and U31, U70: what is saved loads in plain transformers with equal logits, in files of bounded size."""

import json

import pytest
import torch

from spmdrl.config import LoraConfig, ModelConfig
from spmdrl.errors import UserError
from spmdrl.models.actor import Actor
from spmdrl.models.loading import load_causal_lm
from spmdrl.models.lora import add_lora
from spmdrl.models.tokenizer import load_tokenizer
from spmdrl.trainer import export
from tests.tiny import make_model

IDS = torch.tensor([[5, 6, 7, 8, 9]])


@pytest.fixture
def small_shards(monkeypatch):
    """Files of at most 40,000 bytes: a tiny model has some 15 of them, its largest weight being 81,920 bytes."""
    monkeypatch.setattr(export, "SHARD_BYTES", 40_000)


def saved(tmp_path, arch="qwen2", folder="out", **options):
    """A model that has been changed and saved; the model, and the folder."""
    config = ModelConfig(pretrain=make_model(tmp_path / "model", arch, **options))
    actor = Actor(load_causal_lm(config, dtype=torch.float32))
    with torch.no_grad():
        for param in actor.parameters():
            param += 0.01
    hf_config = export.hf_config_to_save(str(config.pretrain), config, dtype=torch.float32)
    export.save_hf(actor, load_tokenizer(config), tmp_path / folder, hf_config=hf_config)
    return actor.model, tmp_path / folder


def assert_loads(model, folder):
    from transformers import AutoModelForCausalLM

    loaded, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    assert not any(report[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert loaded.config.tie_word_embeddings == model.config.tie_word_embeddings
    with torch.no_grad():
        assert torch.equal(loaded(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize(("arch", "tie"), [("qwen2", True), ("qwen2", False), ("llama", False), ("gpt2", True)])
def test_a_model_in_many_files_loads_with_the_same_logits(tmp_path, small_shards, arch, tie):
    model, folder = saved(tmp_path, arch, tie=tie)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    total = len(files)
    assert total > 5
    assert files == [f"model-{i:05d}-of-{total:05d}.safetensors" for i in range(1, total + 1)]
    assert set(index["weight_map"].values()) == set(files)
    assert index["metadata"]["total_size"] == sum(p.numel() * 4 for p in model.parameters())
    heads = [name for name in index["weight_map"] if "lm_head" in name]
    assert heads == ([] if tie else ["lm_head.weight"])
    assert_loads(model, folder)


def test_experts_and_the_biases_that_choose_them_load_again(tmp_path, monkeypatch):
    """They are buffers and no parameters: 0 in a model that lacks them."""
    monkeypatch.setattr(export, "iter_weights", with_biases(export.iter_weights))
    model, folder = saved(tmp_path, "glm4_moe")
    assert model.model.layers[1].mlp.gate.e_score_correction_bias.abs().min() > 0.1
    assert_loads(model, folder)


def with_biases(iter_weights):
    def iterate(engine, **options):
        with torch.no_grad():
            engine.model.model.layers[1].mlp.gate.e_score_correction_bias += torch.tensor([0.5, -0.5, 0.3, -0.2])
        return iter_weights(engine, **options)

    return iterate


@pytest.mark.parametrize(
    "settings", [{"temperature": 0.9, "top_p": 0.6}, {"do_sample": False, "top_k": 5}, {"pad_token_id": -1}]
)
def test_settings_of_generate_that_transformers_finds_odd_are_saved_as_they_were(tmp_path, settings):
    """Vicuna's generation_config.json has a temperature without do_sample."""
    path = tmp_path / "model" / "generation_config.json"
    make_model(tmp_path / "model")
    own = json.loads(path.read_text()) | settings
    path.write_text(json.dumps(own))
    config = ModelConfig(pretrain=str(tmp_path / "model"))
    actor = Actor(load_causal_lm(config, dtype=torch.float32))
    hf_config = export.hf_config_to_save(str(config.pretrain), config, dtype=torch.float32)
    export.save_hf(actor, load_tokenizer(config), tmp_path / "out", hf_config=hf_config)
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == own
    assert_loads(actor.model, tmp_path / "out")
    assert actor.model.generation_config.eos_token_id == 2


def test_several_chat_templates_are_saved_again_where_they_were(tmp_path):
    from transformers import AutoTokenizer

    templates = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    path = make_model(tmp_path / "several", "qwen2")
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = templates
    tokenizer.save_pretrained(path)
    config = ModelConfig(pretrain=path)
    actor = Actor(load_causal_lm(config, dtype=torch.float32))
    for _ in range(2):
        export.save_hf(actor, tokenizer, tmp_path / "out", hf_config=actor.model.config)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == templates


@pytest.mark.parametrize("first_lora", [True, False])
def test_an_adapter_and_a_model_that_take_one_anothers_folder_leave_nothing_behind(tmp_path, first_lora):
    """transformers would load an adapter that lies beside a model on top of it."""
    config = ModelConfig(pretrain=make_model(tmp_path / "model"))
    hf_config = export.hf_config_to_save(str(config.pretrain), config, dtype=torch.float32)
    for has_lora in (first_lora, not first_lora):
        model = load_causal_lm(config, dtype=torch.float32)
        add_lora(model, LoraConfig(lora_rank=2 if has_lora else 0), seed=0)
        for folder in ("out", f"alone_{has_lora}"):
            export.save_hf(Actor(model), load_tokenizer(config), tmp_path / folder, hf_config=hf_config)
    alone = tmp_path / f"alone_{not first_lora}"
    assert {path.name for path in (tmp_path / "out").iterdir()} == {path.name for path in alone.iterdir()}


def test_a_small_model_is_one_file(tmp_path):
    model, folder = saved(tmp_path, "llama")
    assert [path.name for path in folder.glob("model*")] == ["model.safetensors"]
    assert_loads(model, folder)


def test_no_more_than_a_file_is_held_at_a_time(tmp_path, small_shards, monkeypatch):
    held, own = [], export.write_tensors

    def write(path, tensors, metadata):
        held.append(sum(t.numel() * 4 for t in tensors.values()))
        assert len(tensors) == 1 or held[-1] <= 40_000
        return own(path, tensors, metadata)

    monkeypatch.setattr(export, "write_tensors", write)
    model, _ = saved(tmp_path)
    assert sum(held) == sum(p.numel() * 4 for p in model.parameters())


def test_files_of_an_earlier_export_do_not_stay(tmp_path, monkeypatch):
    """transformers would take a model.safetensors before an index, and other files are none of ours."""
    _, folder = saved(tmp_path)
    (folder / "metrics.jsonl").write_text("{}")
    monkeypatch.setattr(export, "SHARD_BYTES", 40_000)
    model, _ = saved(tmp_path)
    assert not (folder / "model.safetensors").exists()
    assert_loads(model, folder)
    monkeypatch.undo()
    model, _ = saved(tmp_path)
    assert [path.name for path in folder.glob("model*")] == ["model.safetensors"]
    assert_loads(model, folder)
    assert (folder / "metrics.jsonl").exists()


def test_a_disk_that_refuses_leaves_what_was_there(tmp_path, small_shards, monkeypatch):
    model, folder = saved(tmp_path)
    before = sorted(path.name for path in folder.iterdir())
    calls, own = [], export.write_tensors

    def full(path, tensors, metadata):
        calls.append(path)
        if len(calls) > 3:
            raise OSError(28, "No space left on device")
        return own(path, tensors, metadata)

    monkeypatch.setattr(export, "write_tensors", full)
    with pytest.raises(UserError, match=r"--save_path \S+: cannot write the model: .*No space left on device"):
        saved(tmp_path)
    assert len(calls) == 4
    assert sorted(path.name for path in folder.iterdir()) == before
    assert_loads(model, folder)


def test_a_weight_without_elements_is_not_saved(tmp_path):
    config = ModelConfig(pretrain=make_model(tmp_path / "model"))
    actor = Actor(load_causal_lm(config, dtype=torch.float32))
    actor.model.model.norm.weight = torch.nn.Parameter(torch.empty(0))
    with pytest.raises(AssertionError, match=r"model\.norm\.weight is empty"):
        export.save_hf(actor, load_tokenizer(config), tmp_path / "out", hf_config=actor.model.config)
