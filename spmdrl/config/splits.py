"""Flags that choose a split are refused where no source has splits to choose from."""

from __future__ import annotations

import os
from typing import Any

from spmdrl.config.flags import flags_of, values_of
from spmdrl.errors import UserError

# The sources that a flag chooses a split of: of several flags the first that is given.
SPLITS = {
    "prompt_split": ("prompt_data",),
    "pretrain_split": ("pretrain_data",),
    "dataset_split": ("dataset",),
    "train_split": ("dataset",),
    "eval_split": ("eval_dataset", "dataset"),
}


def check_splits(config: Any) -> None:
    """A single file is read whole, whatever the flag says: so only its default passes there."""
    flags, values = flags_of(type(config)), values_of(config)
    for name, sources in SPLITS.items():
        if name not in flags or values[name] == flags[name].default:
            continue
        flag = next((source for source in sources if values.get(source)), None)
        if flag is not None and not with_splits(values[flag]):
            raise UserError(
                f"--{name} {values[name]}: there are no splits to choose from in --{flag} {values[flag]}; leave it out"
            )


def sources_of(spec: str) -> list[str]:
    return [spec] if exists(spec) else [name.strip() for name in spec.split(",")]


def with_splits(spec: str) -> str:
    """The sources that are more than a single file, a saved `Dataset` or the split that their name names."""
    return ",".join(name for name in sources_of(spec) if not _is_one(name))


def _is_one(name: str) -> bool:
    path = os.path.expanduser(name)
    is_whole = os.path.isfile(path) or os.path.isfile(os.path.join(path, "state.json"))
    return is_whole or ("@" in name and not exists(name))


def exists(source: str) -> bool:
    """Also for what is no path, or too long for one."""
    return os.path.exists(os.path.expanduser(source))
