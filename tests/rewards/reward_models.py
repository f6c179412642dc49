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


def plain_scores(path, sequences):
    """By transformers, one sequence at a time and without a pad token, so that it reads at the last one."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1, dtype=torch.float32)
    model.config.pad_token_id = None
    with torch.no_grad():
        return [float(model(input_ids=torch.tensor([list(ids)])).logits[0, 0]) for ids in sequences]
