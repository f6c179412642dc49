"""Whole weights out of a ZeRO engine, a bucket at a time, under the names that a Hugging Face checkpoint has."""

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from spmdrl.distributed.strategy import unwrap


def iter_weights(engine: Any, *, bucket_mb: int) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, whole tensor) of the causal LM in `engine`; every rank must run the iterator to its end.

    Under ZeRO-3 at most `bucket_mb` MiB of weights (or one larger tensor) are gathered at a time. What is yielded is
    a copy, because a receiver may keep it longer than the gather lives.
    """
    model = unwrap(engine)
    model = getattr(model, "model", model)
    for bucket in _buckets(model.named_parameters(), bucket_mb * 2**20):
        params = [p for _, p in bucket]
        with _gathered(params):
            whole = [(name, p.detach().clone() if hasattr(p, "ds_id") else p.detach()) for name, p in bucket]
        yield from whole


def _buckets(named: Iterable[tuple[str, nn.Parameter]], max_bytes: int) -> Iterator[list[tuple[str, nn.Parameter]]]:
    """Consecutive parameters whose full sizes add up to at most `max_bytes`; a larger one is alone.

    Under ZeRO-3 `numel()` of a shard is 0: `ds_numel` is the full size.
    """
    bucket: list[tuple[str, nn.Parameter]] = []
    used = 0
    for name, param in named:
        size = getattr(param, "ds_numel", param.numel()) * param.element_size()
        if bucket and used + size > max_bytes:
            yield bucket
            bucket, used = [], 0
        bucket.append((name, param))
        used += size
    if bucket:
        yield bucket


def _gathered(params: list[nn.Parameter]) -> Any:
    if not any(hasattr(p, "ds_id") for p in params):
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(params)


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
    """Overwrite the parameters of a plain module with `weights`; the names must be exactly its own."""
    params = dict(model.named_parameters())
    sent = set()
    for name, tensor in weights:
        sent.add(name)
        if name in params:
            params[name].copy_(tensor)
    check_names(sent, set(params))
