"""Checkpoints: what is said where weights are not those of config.json, a line of ours and no table; what is read
beside weights."""

import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging as hf_logging

from spmdrl.config import ModelConfig
from spmdrl.errors import UserError
from spmdrl.models.actor import LogProbHead
from spmdrl.models.loading import checkpoint_eos_token_ids, eos_token_ids, load_causal_lm
from spmdrl.models.value_head import load_reward_model
from tests.rewards.reward_models import edit_config
from tests.tiny import make_model, make_tokenizer


@pytest.fixture(params=["warning", "error"])
def verbosity(request):
    """transformers says what it says by itself, or as a run sets it."""
    before = hf_logging.get_verbosity()
    getattr(hf_logging, f"set_verbosity_{request.param}")()
    yield request.param
    hf_logging.set_verbosity(before)


@pytest.fixture
def model(tmp_path):
    return make_model(tmp_path / "model", "llama")


def load_policy(path):
    return load_causal_lm(ModelConfig(pretrain=path), dtype=torch.float32)


def load_scorer(path):
    options = {"flag": "--reward_pretrain", "value_head_prefix": "score", "dtype": torch.float32}
    return load_reward_model(path, ModelConfig(), **options)


def change(path, **tensors):
    """Weights to add, or by None to leave out."""
    file = f"{path}/model.safetensors"
    weights = load_file(file) | {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    save_file({name: w for name, w in weights.items() if w is not None}, file, {"format": "pt"})


def said_by_us(caplog):
    return [record.getMessage() for record in caplog.records if record.name.startswith("spmdrl")]


def test_a_missing_head_or_weight_is_one_line_without_a_table(model, verbosity, caplog):
    with pytest.raises(UserError, match="no trained head in it"):
        load_scorer(model)
    change(model, model__norm__weight=None)
    with pytest.raises(UserError, match=r"weights are missing: model\.norm\.weight, 1 in all"):
        load_policy(model)
    assert "LOAD REPORT" not in caplog.text


def test_weights_without_a_place_are_named_once(model, verbosity, caplog):
    """Which a table that is hidden would not do; a language model's head has no place in a reward model by design."""
    change(model, score__weight=torch.ones(1, 64), v_head__weight=torch.ones(1, 64))
    load_scorer(model)
    assert said_by_us(caplog) == []
    edit_config(model, num_hidden_layers=1)
    said = f"{model}: weights that its config.json has no place for are left out: "
    load_policy(model)
    load_policy(model)
    load_scorer(model)
    assert said_by_us(caplog) == [
        f"--pretrain {said}model.layers.1.input_layernorm.weight, model.layers.1.mlp.down_proj.weight, "
        "model.layers.1.mlp.gate_proj.weight, 11 in all",
        f"--reward_pretrain {said}model.layers.1.input_layernorm.weight, model.layers.1.mlp.down_proj.weight, "
        "model.layers.1.mlp.gate_proj.weight, 9 in all",
    ]
    assert "LOAD REPORT" not in caplog.text


def test_a_table_that_an_error_refers_to_is_shown(model, verbosity, monkeypatch, caplog):
    library = logging.getLogger("transformers.modeling_utils")

    def fails(*args, **kwargs):
        library.warning("LlamaForCausalLM LOAD REPORT from: here\nexperts | CONVERSION | sizes differ")
        raise RuntimeError("For details look at the `CONVERSION` entries of the above report!")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fails)
    with pytest.raises(UserError, match=r"cannot load a causal LM: RuntimeError: For details .* above report!"):
        load_policy(model)
    assert [message.splitlines()[-1] for message in said_by_us(caplog)] == ["experts | CONVERSION | sizes differ"]
    assert library.filters == [] and library.level == logging.NOTSET


@pytest.mark.parametrize("load", [load_policy, load_scorer])
def test_the_embedding_of_the_padding_token_is_trained_where_it_is_a_token_of_the_text(tmp_path, load):
    """The EOS between two turns, say, by which many models pad: torch leaves a padding_idx without gradient."""
    path = make_model(tmp_path / "model", pad="eos")
    if load is load_scorer:
        change(path, score__weight=torch.ones(1, 64))
    embeddings = load(path).model.get_input_embeddings()
    embeddings(torch.tensor([5, 2])).sum().backward()
    assert embeddings.weight.grad[2].tolist() == embeddings.weight.grad[5].tolist() == [1.0] * 64


def test_eos_ids_without_a_generation_config_are_those_of_the_config(model):
    """As of the model itself, which transformers and vLLM make one for."""
    edit_config(model, eos_token_id=[7, 9])
    (Path(model) / "generation_config.json").unlink()
    tokenizer = make_tokenizer()
    found = checkpoint_eos_token_ids(ModelConfig(pretrain=model), tokenizer)
    assert found == eos_token_ids(load_policy(model), tokenizer) == [2, 7, 9]


def test_a_head_that_is_no_linear_layer_is_refused():
    with pytest.raises(UserError, match="models whose LM head is a Sequential and no linear layer are not supported"):
        LogProbHead(torch.nn.Sequential())
