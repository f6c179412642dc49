"""Critic and reward model: a causal backbone with a scalar head; one value a step, or one score a sequence, out."""

import json
import math
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spmdrl.config import LoadConfig
from spmdrl.config.heads import HEAD_NAMES
from spmdrl.errors import UserError
from spmdrl.models.loading import load_whole, loading_options, read_hf_config, reading
from spmdrl.models.packing import Layout, last_action_lengths, padded

HF_HEAD = "score"  # in every AutoModelForSequenceClassification with a causal backbone
INDEX_FILES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")


class ValueHead(nn.Module):
    """(..., H) -> (..., 1) in fp32: bf16 values would have two decimal digits."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden.float(), self.weight.float(), None if self.bias is None else self.bias.float())


class ValueModel(nn.Module):
    """A Hugging Face sequence classifier with one label, whose head scores every step instead of the last token.

    Sequences are right-padded and attention is causal, so no attention mask is passed and the pad token's id is
    irrelevant, as in Actor. `layout`: how sequences go through the backbone.
    """

    def __init__(self, model: Any, *, has_new_head: bool = False, layout: Layout = padded):
        super().__init__()
        self.model = model
        self.has_new_head = has_new_head
        self.layout = layout

    def forward(self, sequences: Tensor, action_mask: Tensor) -> Tensor:
        """Values (B, A) fp32, 0 off the mask. That of step t is of the state before token t + 1 is sampled, so it is
        read where that token's log-prob is.

        sequences: (B, S) int64, right-padded. action_mask: (B, A) bool with A = S - 1.
        """
        hidden = self.layout(self.model.base_model, sequences, last_action_lengths(action_mask))
        picked = getattr(self.model, HF_HEAD)(hidden[:, :-1][action_mask])[:, 0]
        return picked.new_zeros(action_mask.shape).masked_scatter(action_mask, picked)


class RewardModel(nn.Module):
    """A Hugging Face sequence classifier with one label, as a reward model: one score a sequence.

    Sequences are right-padded and no attention mask is passed, as in ValueModel. The score is read at the last real
    token, whatever its id: transformers' own forward reads before an EOS that is the pad token too. `layout`:
    how sequences go through the backbone.
    """

    def __init__(self, model: Any, *, has_new_head: bool = False, layout: Layout = padded):
        super().__init__()
        self.model = model
        self.has_new_head = has_new_head
        self.layout = layout

    def forward(self, sequences: Tensor, lengths: Tensor) -> Tensor:
        """Scores (B,) fp32. sequences: (B, S) int64, right-padded. lengths: (B,) int64, real tokens, at least 1."""
        hidden = self.layout(self.model.base_model, sequences, lengths)
        last = hidden[torch.arange(len(lengths), device=hidden.device), lengths - 1]
        return getattr(self.model, HF_HEAD)(last)[:, 0]

    @property
    def normalization(self) -> tuple[float, float] | None:
        """Mean and standard deviation of its scores that training left in the config, None where it left none.

        Raises UserError for a standard deviation that nothing can be divided by.
        """
        mean, std = getattr(self.model.config, "mean", None), getattr(self.model.config, "std", None)
        if mean is None or std is None:
            return None
        if not (math.isfinite(mean) and math.isfinite(std) and std > 0):
            raise UserError(
                f"--normalize_reward: the config of {self.model.config.name_or_path} has mean {mean} and std {std}"
            )
        return float(mean), float(std)


def load_value_model(
    name: str,
    config: LoadConfig,
    *,
    flag: str,
    value_head_prefix: str,
    dtype: torch.dtype,
    seed: int,
    **options: Any,
) -> ValueModel:
    """The checkpoint `name`, a causal LM or one with a scalar head, as a ValueModel; see `load_classifier`."""
    model, has_new_head = load_classifier(
        name, config, flag=flag, value_head_prefix=value_head_prefix, dtype=dtype, seed=seed, **options
    )
    return ValueModel(model, has_new_head=has_new_head)


def load_reward_model(
    name: str,
    config: LoadConfig,
    *,
    flag: str,
    value_head_prefix: str,
    dtype: torch.dtype,
    seed: int | None = None,
    **options: Any,
) -> RewardModel:
    """The checkpoint `name` as a RewardModel; see `load_classifier`. Without `seed` one that has no head is refused:
    its scores would be noise."""
    model, has_new_head = load_classifier(
        name, config, flag=flag, value_head_prefix=value_head_prefix, dtype=dtype, seed=seed or 0, **options
    )
    if has_new_head and seed is None:
        names = ", ".join(dict.fromkeys((value_head_prefix, *HEAD_NAMES)))
        raise UserError(
            f"{flag} {name}: no trained head in it (none of {names}), so it is no reward model; train one with "
            f"cli/train_rm.py, or name its head with --value_head_prefix"
        )
    return RewardModel(model, has_new_head=has_new_head)


def load_classifier(
    name: str,
    config: LoadConfig,
    *,
    flag: str,
    value_head_prefix: str,
    dtype: torch.dtype,
    seed: int,
    **options: Any,
) -> tuple[Any, bool]:
    """The checkpoint `name`, a causal LM or one with a scalar head, as transformers' classifier with a ValueHead, and
    whether that head is new, drawn from `seed`; `options` are of `from_pretrained`.

    Raises UserError, naming `flag`, for a head that is not one linear layer of width 1 and for a backbone of which
    weights are missing.
    """
    from transformers import AutoModelForSequenceClassification

    source = f"{flag} {name}"
    with reading(source, "a causal backbone"):
        head = read_head(name, source, value_head_prefix)
        hf_config = read_hf_config(name, config, num_labels=1)
        options |= loading_options(AutoModelForSequenceClassification, hf_config, config, dtype)
        model = load_whole(AutoModelForSequenceClassification, name, source, head=HF_HEAD, **options)
    children = dict(model.named_children())
    if not isinstance(children.get(HF_HEAD), nn.Linear):
        raise UserError(f"{source}: transformers' classifier of this architecture has no linear {HF_HEAD!r} head")
    hidden_size = children[HF_HEAD].in_features
    weight, bias = head or (new_head(hidden_size, seed), None)
    if weight.shape[1] != hidden_size:
        raise UserError(f"{source}: its head reads {weight.shape[1]} numbers, its backbone writes {hidden_size}")
    setattr(model, HF_HEAD, ValueHead(weight.to(dtype), None if bias is None else bias.to(dtype)))
    return model, head is None


def new_head(hidden_size: int, seed: int) -> Tensor:
    """(1, H): small, so that first values are near 0; the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, hidden_size, generator=generator) / (hidden_size + 1)


def read_head(name: str, source: str, value_head_prefix: str) -> tuple[Tensor, Tensor | None] | None:
    """Weight and bias of the head in a checkpoint, None where it has none; the first of the known names counts."""
    files = weight_files(name)
    for head in dict.fromkeys((value_head_prefix, *HEAD_NAMES)):
        found = {key[len(head) + 1 :].removeprefix("summary."): key for key in files if key.startswith(f"{head}.")}
        if not found:
            continue
        if not {"weight"} <= set(found) <= {"weight", "bias"}:
            raise UserError(
                f"{source}: its head {head!r} is not one linear layer: {', '.join(sorted(found.values())[:4])}"
            )
        tensors = {part: _read_tensor(files[key], key) for part, key in found.items()}
        if len(tensors["weight"]) != 1:
            raise UserError(f"{source}: its head {head!r} has width {len(tensors['weight'])}, not 1")
        return tensors["weight"], tensors.get("bias")
    return None


def weight_files(name: str) -> dict[str, Path]:
    """Weight name → file of a checkpoint, local or in the hub's cache."""
    from transformers.utils import cached_file

    missing_is_fine = {"_raise_exceptions_for_missing_entries": False}
    for file in INDEX_FILES:
        if index := cached_file(name, file, **missing_is_fine):
            shards: dict[str, str] = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
            paths = {shard: Path(str(cached_file(name, shard))) for shard in set(shards.values())}
            return {key: paths[shard] for key, shard in shards.items()}
    for file in WEIGHT_FILES:
        if path := cached_file(name, file, **missing_is_fine):
            return dict.fromkeys(_keys(Path(path)), Path(path))
    return {}


def _keys(path: Path) -> list[str]:
    if path.suffix != ".safetensors":
        return list(_load_bin(path))
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return list(file.keys())


def _load_bin(path: Path) -> dict[str, Tensor]:
    return torch.load(path, weights_only=True, mmap=is_zipfile(path), map_location="cpu")


def _read_tensor(path: Path, key: str) -> Tensor:
    if path.suffix != ".safetensors":
        return _load_bin(path)[key].clone()
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return file.get_tensor(key)
