"""The head of a critic or reward model, as far as the headers of its checkpoint's files tell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from spmdrl.config import hub
from spmdrl.errors import UserError

# What the heads of transformers, OpenRLHF, and TRL or DeepSpeed-Chat are called in their checkpoints.
HEAD_NAMES = ("score", "value_head", "v_head")
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_HEADER = 100_000_000  # bytes; the format allows no more


def check_head(flag: str, name: str, value_head_prefix: str) -> None:
    """Raise UserError for a checkpoint on this machine whose head gives more than one number. What cannot be read is
    left to what loads it."""
    try:
        folder = hub.folder_of(name)
        shapes = _shapes(folder, (value_head_prefix, *HEAD_NAMES)) if folder is not None else {}
    except (OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError):
        return
    for head in dict.fromkeys((value_head_prefix, *HEAD_NAMES)):
        own = {key.removeprefix(f"{head}."): shape for key, shape in shapes.items() if key.startswith(f"{head}.")}
        if own:  # the first that is there counts
            shape = own.get("weight") or own.get("summary.weight")
            if shape and shape[0] != 1:
                raise UserError(f"--{flag} {name}: its head {head!r} has width {shape[0]}, not 1")
            return


def _shapes(folder: Path, heads: tuple[str, ...]) -> dict[str, list[int]]:
    """Weight name → shape of everything in these modules."""
    if (folder / INDEX).is_file():
        files = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
    elif (folder / WEIGHTS).is_file():
        files = dict.fromkeys(_header(folder / WEIGHTS), WEIGHTS)
    else:
        return {}
    keys = [key for key in files if key.startswith(tuple(f"{head}." for head in heads))]
    headers = {file: _header(folder / file) for file in {files[key] for key in keys}}
    return {key: headers[files[key]][key]["shape"] for key in keys}


def _header(path: Path) -> dict[str, Any]:
    """Of a safetensors file: eight bytes with its length, then JSON."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        return json.loads(file.read(size)) if size <= MAX_HEADER else {}
