"""safetensors files, written tensor by tensor with a checksum on the way, and read by ranges."""

import hashlib
import json
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from spmdrl.distributed import whereabouts

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
CHUNK_BYTES = 2**24


@dataclass(frozen=True)
class Written:
    """A file as it was written."""

    size: int
    checksum: str

    @classmethod
    def of(cls, path: Path) -> "Written":
        """As it lies on the disk."""
        digest, size = hashlib.blake2b(digest_size=16), 0
        with path.open("rb") as file:
            while block := file.read(CHUNK_BYTES):
                digest.update(block)
                size += len(block)
                whereabouts.beat()
        return cls(size, digest.hexdigest())


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Written:
    """Write a safetensors file to the disk itself. On the way one tensor at a time is copied to host memory."""
    # Wide numbers first: readers want each tensor at a multiple of its element size.
    names = sorted(tensors, key=lambda name: -tensors[name].element_size())
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name in names:
        tensor, start = tensors[name], end
        end += tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return write_file(path, _parts(struct.pack("<Q", len(text)) + text, (tensors[name] for name in names)))


def _parts(head: bytes, tensors: Iterable[Tensor]) -> Iterable[Any]:
    yield head
    for tensor in tensors:
        if tensor.numel():
            yield tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def write_file(path: Path, parts: Iterable[Any]) -> Written:
    """Write bytes and wait until they are on the disk."""
    digest, size = hashlib.blake2b(digest_size=16), 0
    with path.open("wb") as file:
        for part in parts:
            view = memoryview(part)
            for start in range(0, len(view), CHUNK_BYTES):
                block = view[start : start + CHUNK_BYTES]
                file.write(block)
                digest.update(block)
                whereabouts.beat()
            size += len(view)
        file.flush()
        os.fsync(file.fileno())
    return Written(size, digest.hexdigest())


def read_tensors(path: Path) -> dict[str, Tensor]:
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in list(file.keys())}


STARTS = "starts"  # in the metadata of a file of ranges: JSON, name → where its range starts in the flattened whole


class RangeReader:
    """Flat tensors that lie in ranges over several files, each read where it is asked for."""

    def __init__(self, paths: Sequence[Path]):
        self.files = [safe_open(path, framework="pt") for path in paths]
        self.ranges: dict[str, list[tuple[int, int, Any]]] = {}  # name → (start, end, file)
        for file in self.files:
            starts: dict[str, int] = json.loads(file.metadata()[STARTS])
            for name, start in starts.items():
                (numel,) = file.get_slice(name).get_shape()
                self.ranges.setdefault(name, []).append((start, start + numel, file))

    def read(self, name: str, start: int, end: int, total: int) -> Tensor:
        """Elements `start` to `end` of `total`. Raises ValueError where the files have not these."""
        ranges = sorted(self.ranges.get(name, ()), key=lambda found: found[:2])
        saved = sum(last - first for first, last, _ in ranges)
        if saved != total:
            raise ValueError(f"{name} has {saved} elements there, {total} here")
        pieces, at = [], start
        for first, last, file in ranges:
            if first <= at < min(last, end):
                stop = min(last, end)
                pieces.append(file.get_slice(name)[at - first : stop - first])
                at = stop
        if at != end:
            raise ValueError(f"{name} has a gap at element {at}")
        if len(pieces) == 1:
            return pieces[0]
        return torch.cat(pieces) if pieces else torch.empty(0)


# ---- JSON with tensors in it ----------------------------------------------------------------------------------------
TENSOR = "__tensor__"


def pack(value: Any, tensors: dict[str, Tensor], at: str = "state") -> Any:
    """What JSON can hold, with the tensors moved into `tensors` and their names in their place."""
    if isinstance(value, Tensor):
        tensors[at] = value
        return {TENSOR: at}
    if isinstance(value, Mapping):
        assert all(isinstance(key, str) for key in value), f"{at}: keys of a state are strings, got {list(value)[:3]}"
        return {key: pack(part, tensors, f"{at}/{key}") for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [pack(part, tensors, f"{at}/{i}") for i, part in enumerate(value)]
    return value


def unpack(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What was packed; tuples are lists."""
    if isinstance(value, dict):
        if value.keys() == {TENSOR}:
            return tensors[value[TENSOR]]
        return {key: unpack(part, tensors) for key, part in value.items()}
    return [unpack(part, tensors) for part in value] if isinstance(value, list) else value
