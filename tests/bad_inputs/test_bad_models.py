"""Checkpoints and tokenizers that are damaged, incomplete, or bring code along: one line, and nothing is run."""

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from spmdrl.config import ModelConfig, PromptDataConfig
from spmdrl.data.prompts import load_prompts
from spmdrl.models.loading import eos_token_ids, load_causal_lm
from spmdrl.models.tokenizer import load_tokenizer
from spmdrl.models.value_head import load_value_model

WEIGHTS, SHARDS = "model.safetensors", ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"


class Evil:
    """Unpickled, it leaves a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def cut(num_bytes):
    return lambda path: (path / WEIGHTS).write_bytes((path / WEIGHTS).read_bytes()[:num_bytes])


def weights(change):
    """Change the tensors of a checkpoint, by name."""

    def apply(path):
        tensors = load_file(path / WEIGHTS)
        change(tensors)
        save_file(tensors, path / WEIGHTS, {"format": "pt"})

    return apply


def config(**values):
    return lambda path: edit_json(path / "config.json", values)


def edit_json(file, values):
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def evil_bin(path):
    (path / WEIGHTS).unlink()
    torch.save({"model.norm.weight": Evil(path / "ran")}, path / "pytorch_model.bin")


def evil_pickle(path):
    (path / WEIGHTS).unlink()
    (path / "pytorch_model.bin").write_bytes(pickle.dumps(Evil(path / "ran")))


def cut_bin(path):
    torch.save(load_file(path / WEIGHTS), path / "pytorch_model.bin")
    (path / WEIGHTS).unlink()
    content = (path / "pytorch_model.bin").read_bytes()
    (path / "pytorch_model.bin").write_bytes(content[: len(content) // 2])


def sharded(lost=None, index=None):
    """Two files and an index; `lost` is one of them, `index` other content of it."""

    def apply(path):
        tensors = load_file(path / WEIGHTS)
        (path / WEIGHTS).unlink()
        names = sorted(tensors)
        parts = dict(zip(SHARDS, (names[: len(names) // 2], names[len(names) // 2 :]), strict=True))
        for file, part in parts.items():
            save_file({name: tensors[name] for name in part}, path / file, {"format": "pt"})
        file_of = {name: file for file, part in parts.items() for name in part}
        (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": file_of}) if index is None else index)
        if lost:
            (path / lost).unlink()

    return apply


def brings_code(path):
    code = f"open({str(path / 'ran')!r}, 'w')\nclass Config: ...\nclass Model: ...\n"
    (path / "evil.py").write_text(code)
    auto_map = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (path / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": auto_map}))


MODELS = {
    "cut": (cut(5000), "SafetensorError: Error while deserializing header: incomplete metadata, file not fully"),
    "cut in the header": (cut(100), "SafetensorError: Error while deserializing header"),
    "empty": (cut(0), "SafetensorError: Error while deserializing header: header too small"),
    "garbage": (lambda p: (p / WEIGHTS).write_bytes(b"\xff" * 999), "SafetensorError: Error while deserializing"),
    "no weights": (lambda p: (p / WEIGHTS).unlink(), "Error no file named model.safetensors"),
    "a weight is missing": (
        weights(lambda t: t.pop("model.norm.weight")),
        ": weights are missing: model.norm.weight, 1 in all",
    ),
    "a layer is missing": (
        config(num_hidden_layers=3),
        ": weights are missing: model.layers.2.input_layernorm.weight,",
    ),
    "a weight of another size": (
        weights(lambda t: t.update({"model.norm.weight": torch.zeros(3)})),
        ": model.norm.weight has the shape (3,), by config.json it is (64,)",
    ),
    "another width": (config(hidden_size=32), "by config.json it is (320, 32)"),
    "code in a .bin": (evil_bin, "a .bin file in it holds more than tensors, and code from a checkpoint is never run"),
    "a pickle": (evil_pickle, "a .bin file in it holds more than tensors, and code from a checkpoint is never run"),
    "a cut .bin": (cut_bin, "RuntimeError: PytorchStreamReader failed reading zip archive"),
    "a shard is missing": (sharded(lost=SHARDS[1]), SHARDS[1]),
    "an index that is no JSON": (sharded(index="{"), "JSONDecodeError"),
    "an index without its map": (sharded(index="{}"), "KeyError: 'weight_map'"),
    "an index that is a list": (sharded(index="[1]"), "TypeError"),
    "an index of numbers": (sharded(index='{"metadata": {}, "weight_map": {"a": 3}}'), "TypeError"),
    "code of its own": (brings_code, "contains custom code which must be executed to correctly load the model"),
    "an unknown kind": (config(model_type="nosuch"), "has model type `nosuch` but Transformers does not recognize"),
    "text for a width": (config(hidden_size="big"), "Field 'hidden_size' expected int, got str (value: 'big')"),
    "a negative width": (config(hidden_size=-4), "RuntimeError: Trying to create tensor with negative dimension -4"),
    "heads that do not divide": (config(num_attention_heads=3), "is not a multiple of the number of attention heads"),
    "no heads": (config(num_attention_heads=0), "ZeroDivisionError"),
    "an unknown activation": (config(hidden_act="nosuch"), "KeyError: 'nosuch'"),
    "an odd dtype": (config(dtype="nosuch"), "AttributeError: module 'torch' has no attribute 'nosuch'"),
    "no config": (lambda p: (p / "config.json").write_text("null"), "TypeError"),
    "an encoder and decoder": (lambda p: (p / "config.json").write_text('{"model_type": "t5"}'), ""),
}


@pytest.fixture
def model(tmp_path, good_model):
    return Path(shutil.copytree(good_model, tmp_path / "model"))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("role", ["policy", "critic"])
def test_models(model, line_of, name, role):
    spoil, line = MODELS[name]
    spoil(model)
    flags = ModelConfig(pretrain=str(model))
    if role == "policy":
        said = line_of(load_causal_lm, flags, dtype=torch.float32)
    else:
        options = {"flag": "--critic_pretrain", "value_head_prefix": "score", "seed": 0, "dtype": torch.float32}
        said = line_of(load_value_model, str(model), flags, **options)
    assert said.startswith(f"--{'pretrain' if role == 'policy' else 'critic_pretrain'} {model}: ")
    assert line in said
    assert not (model / "ran").exists()


@pytest.mark.parametrize("spoil", [lambda p: None, sharded()], ids=["one file", "shards"])
def test_the_same_model_undamaged_loads(model, spoil):
    spoil(model)
    load_causal_lm(ModelConfig(pretrain=str(model)), dtype=torch.float32)


def test_ends_of_responses_that_are_no_ids(model, line_of, tokenizer):
    loaded = load_causal_lm(ModelConfig(pretrain=str(model)), dtype=torch.float32)
    loaded.generation_config.eos_token_id = "x"
    expected = "--pretrain: eos_token_id of its generation_config.json is 'x', expected token ids"
    assert line_of(eos_token_ids, loaded, tokenizer) == expected


TOKENIZERS = {
    "garbage": ("tokenizer.json", "{x", "JSONDecodeError"),
    "empty": ("tokenizer.json", "", "JSONDecodeError"),
    "a list": ("tokenizer.json", "[]", "TypeError"),
    "nothing in it": ("tokenizer.json", "{}", "KeyError: 'added_tokens'"),
    "a config that is garbage": ("tokenizer_config.json", "{x", "JSONDecodeError"),
    "a config that is a list": ("tokenizer_config.json", "[]", "AttributeError"),
    "a class that is a number": ("tokenizer_config.json", '{"tokenizer_class": 3}', "AttributeError"),
    "an EOS that is a number": ("tokenizer_config.json", '{"eos_token": 5}', "eos_token has to be either str or"),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokenizers(model, line_of, name):
    file, content, line = TOKENIZERS[name]
    (model / file).write_text(content)
    said = line_of(load_tokenizer, ModelConfig(pretrain=str(model)))
    assert said.startswith(f"--pretrain {model}: the tokenizer files there do not load (")
    assert line in said


def test_a_tokenizer_without_an_end(model, line_of):
    (model / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    said = line_of(load_tokenizer, ModelConfig(pretrain=str(model)))
    assert said == f"--pretrain {model}: the tokenizer has neither a pad nor an eos token; set one in its files"


def test_a_tokenizer_with_more_tokens_than_the_model(tmp_path, model, line_of):
    """A token that was added to the tokenizer alone, in the second of two prompts."""
    tokenizer = load_tokenizer(ModelConfig(pretrain=str(model)))
    assert tokenizer.add_tokens(["<new>"]) == 1
    path = tmp_path / "p.jsonl"
    path.write_text('{"input": "a"}\n{"input": "b<new>"}\n')
    prompts = load_prompts(PromptDataConfig(prompt_data=str(path)), tokenizer, seed=0)
    prompts.check_ids(321)
    expected = f"{path} line 2: its prompt has token 320, the model of --pretrain has 320: the tokenizer there is of"
    assert line_of(prompts.check_ids, 320).startswith(expected)
