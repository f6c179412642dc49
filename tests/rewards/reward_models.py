"""Tiny reward models, and what plain transformers says that they score."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.tiny import make_model


def make_reward_model(path, *, mean=None, std=None, config=None, seed=0, **model):
    """A tiny model with a head that tells token ids apart, and `mean` and `std` in its config; returns its path."""
    path = make_model(path, **{"arch": "llama", "seed": seed, **model})
    file = Path(path, "model.safetensors")
    weights = load_file(file)
    hidden_size = weights["model.embed_tokens.weight"].shape[1]
    weights["score.weight"] = torch.randn(1, hidden_size, generator=torch.Generator().manual_seed(seed))
    save_file(weights, file, metadata={"format": "pt"})
    statistics = {name: value for name, value in (("mean", mean), ("std", std)) if value is not None}
    edit_config(path, **statistics, **(config or {}))
    return path


def edit_config(path, **changes):
    file = Path(path, "config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def permuted(path, permutation):
    """The checkpoint at `path` with other ids for the same tokens: id i has become permutation[i]."""
    path = Path(path)
    content = json.loads((path / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    content["model"]["vocab"] = {token: permutation[i] for token, i in vocabulary.items()}
    for token in content["added_tokens"]:
        token["id"] = permutation[token["id"]]
    (path / "tokenizer.json").write_text(json.dumps(content))
    weights = load_file(path / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        old, weights[name] = weights[name], torch.empty_like(weights[name])
        weights[name][permutation] = old
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    edit_config(path, eos_token_id=permutation[2], pad_token_id=permutation[2])
    return str(path)


def plain_scores(path, sequences):
    """By transformers, one sequence at a time and without a pad token, so that it reads at the last one."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1, dtype=torch.float32)
    model.config.pad_token_id = None
    with torch.no_grad():
        return [float(model(input_ids=torch.tensor([list(ids)])).logits[0, 0]) for ids in sequences]
