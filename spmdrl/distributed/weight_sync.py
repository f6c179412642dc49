"""Whole weights out of a ZeRO engine, a bucket at a time, under the names that a Hugging Face checkpoint has."""

import re
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from spmdrl.distributed.strategy import unwrap


def iter_weights(engine: Any, *, bucket_mb: int) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, whole tensor) of the causal LM in `engine`; every rank must run the iterator to its end.

    Under ZeRO-3 at most `bucket_mb` MiB of weights (or one larger tensor) are gathered at a time. What is yielded is
    a copy, because a receiver may keep it longer than the gather lives. With LoRA it is the merged weight, under the
    name that the frozen one has in a checkpoint; the frozen one is only read, so that merging never adds up rounding.
    """
    model = unwrap(engine)
    yield from _iter_tensors(_weights(getattr(model, "model", model)), bucket_mb)


def iter_adapter(engine: Any, *, bucket_mb: int) -> Iterator[tuple[str, Tensor]]:
    """Like `iter_weights`, of what LoRA trains: its matrices and a value head, under the names that peft saves."""
    model = unwrap(engine)
    trained = ((name, p) for name, p in getattr(model, "model", model).named_parameters() if p.requires_grad)
    yield from _iter_tensors((_Piece(saved_name(name), p) for name, p in trained), bucket_mb)


def saved_name(name: str) -> str:
    """peft's parameters have the adapter's name in theirs, q_proj.lora_A.default.weight, its files do not."""
    return "base_model.model." + re.sub(r"(\.lora_[AB])\.\w+(?=\.)", r"\1", name)


@dataclass(frozen=True)
class _Piece:
    """One tensor to send: a parameter or buffer, or what becomes of it with the LoRA matrices of `layer` around it."""

    name: str
    param: Tensor
    layer: Any = None

    @property
    def params(self) -> list[Tensor]:
        if self.layer is None:
            return [self.param]
        matrices = [
            m[name].weight for name in self.layer.active_adapters for m in (self.layer.lora_A, self.layer.lora_B)
        ]
        return [self.param, *matrices]

    @property
    def num_bytes(self) -> int:
        """Under ZeRO-3 `numel()` of a shard is 0: `ds_numel` is the full size."""
        return sum(getattr(p, "ds_numel", p.numel()) * p.element_size() for p in self.params)

    @torch.no_grad()
    def whole(self) -> Tensor:
        """While `params` are gathered: a tensor that outlives the gather."""
        weight = _unpacked(self.param)
        if self.layer is not None:
            return _merged(weight, self.layer)
        return weight.clone() if hasattr(self.param, "ds_id") else weight


def _weights(model: nn.Module) -> Iterator[_Piece]:
    """The weights of a checkpoint: without peft's own parameters, and without its part of the names of frozen ones."""
    for name, tensor in named_tensors(model):
        owner, wrapped, leaf = name.partition(".base_layer.")
        if wrapped:
            yield _Piece(f"{owner}.{leaf}", tensor, model.get_submodule(owner) if leaf == "weight" else None)
        elif ".lora_" not in name:
            yield _Piece(name, tensor)


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What a checkpoint holds of a model: parameters, tied ones once, and then the buffers that are saved, such as the
    biases by which experts are chosen."""
    yield from model.named_parameters()
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield name, buffer


def _unpacked(param: Tensor) -> Tensor:
    """The weight behind a parameter that bitsandbytes packed, or the parameter itself."""
    if not hasattr(param, "quant_state"):
        return param.detach()
    import bitsandbytes.functional as bnb

    return bnb.dequantize_4bit(param.data, param.quant_state)


def _merged(weight: Tensor, layer: Any) -> Tensor:
    """W + (alpha / rank) B A in fp32, rounded once, to the dtype of the matrices."""
    total = weight.float()
    for name in layer.active_adapters:
        change = layer.lora_B[name].weight.float() @ layer.lora_A[name].weight.float()
        total = total + (change.T if layer.fan_in_fan_out else change) * layer.scaling[name]
    return total.to(layer.lora_A[name].weight.dtype)


def _iter_tensors(pieces: Iterable[_Piece], bucket_mb: int) -> Iterator[tuple[str, Tensor]]:
    for bucket in _buckets(pieces, bucket_mb * 2**20):
        with _gathered([p for piece in bucket for p in piece.params]):
            whole = [(piece.name, piece.whole()) for piece in bucket]
        yield from whole


def _buckets(pieces: Iterable[_Piece], max_bytes: int) -> Iterator[list[_Piece]]:
    """Consecutive pieces whose full sizes add up to at most `max_bytes`; a larger one is alone."""
    bucket: list[_Piece] = []
    used = 0
    for piece in pieces:
        size = piece.num_bytes
        if bucket and used + size > max_bytes:
            yield bucket
            bucket, used = [], 0
        bucket.append(piece)
        used += size
    if bucket:
        yield bucket


def _gathered(params: list[Tensor]) -> Any:
    sharded = [p for p in params if hasattr(p, "ds_id")]
    if not sharded:
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(sharded)


def check_names(sent: set[str], expected: set[str]) -> None:
    """Raise RuntimeError that names every weight that is missing from a sync or unknown to the receiver."""
    missing, unknown = sorted(expected - sent), sorted(sent - expected)
    if missing or unknown:
        parts = [f"{label}: {_some(names)}" for label, names in (("missing", missing), ("unknown", unknown)) if names]
        raise RuntimeError("weight sync: the engine did not get the trainer's weights; " + "; ".join(parts))


def _some(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


@torch.no_grad()
def copy_into(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Overwrite the weights of a plain module with `weights`; the names must be exactly its own."""
    own = dict(named_tensors(model))
    sent = set()
    for name, tensor in weights:
        sent.add(name)
        if name in own:
            own[name].copy_(tensor)
    check_names(sent, set(own))
