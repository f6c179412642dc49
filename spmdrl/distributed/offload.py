"""Training states of an engine in host memory while the device belongs to the engine that samples.

DeepSpeed's `offload_states` is not used: under ZeRO-3 it moves no Adam but DeepSpeed's own, and it adds entries to the
optimizer's states. Here the memory is taken away underneath the tensors and given back with the same content, so
whatever DeepSpeed holds of them, views included, stays valid, under any ZeRO stage.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from spmdrl.distributed.engine_state import state_tensors

CHUNK_BYTES = 2**28  # of host memory; torch rounds what it page-locks up to a power of two


class HostCopy:
    """Host memory for the states of one engine, page-locked where there is a GPU. It is kept from phase to phase,
    because locking pages takes longer than copying."""

    def __init__(self, engine: Any):
        self.engine = engine
        self._chunks: list[Tensor] = []

    @contextmanager
    def holds(self, device_type: str, *, weights: bool) -> Iterator[None]:
        """The states, and with `weights` the weights too, take no memory of the device for the time of the block. What
        is on another kind of device stays where it is. Local: ranks do not wait for one another."""
        self.engine.empty_partition_cache()  # ZeRO-3 keeps gathered weights for the next forward
        storages = _storages(state_tensors(self.engine, weights=weights), device_type)
        sizes = [storage.nbytes() for storage in storages]
        self._copy(storages, sizes, to_host=True)
        for storage in storages:
            storage.resize_(0)
        _return_memory(device_type)
        try:
            yield
        finally:
            for storage, size in zip(storages, sizes, strict=True):
                storage.resize_(size)
            self._copy(storages, sizes, to_host=False)

    def _copy(self, storages: Iterable[Any], sizes: list[int], *, to_host: bool) -> None:
        for _ in range(len(self._chunks), math.ceil(sum(sizes) / CHUNK_BYTES)):
            is_pinned = torch.cuda.is_available()
            self._chunks.append(torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=is_pinned))
        wholes = [torch.empty(0, dtype=torch.uint8, device=s.device).set_(s) for s in storages]
        for whole, host in _pieces(wholes, self._chunks):
            target, source = (host, whole) if to_host else (whole, host)
            target.copy_(source, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()


def _storages(tensors: Iterable[Tensor], device_type: str) -> list[Any]:
    """Each of the tensors' pieces of memory on that kind of device, once."""
    found = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if t.device.type == device_type}
    return [storage for pointer, storage in found.items() if pointer]


def _pieces(wholes: Iterable[Tensor], chunks: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Ranges of bytes, one whole after the other, and the ranges of the chunks where they go."""
    at = 0
    for whole in wholes:
        start = 0
        while start < len(whole):
            number, offset = divmod(at, CHUNK_BYTES)
            size = min(len(whole) - start, CHUNK_BYTES - offset)
            yield whole[start : start + size], chunks[number][offset : offset + size]
            start, at = start + size, at + size


def _return_memory(device_type: str) -> None:
    if device_type == "cuda":
        torch.cuda.empty_cache()
