"""Flags and yaml files in, a config out; and a config back to flat names."""

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

Config = TypeVar("Config")


def parse_config(cls: type[Config], argv: Sequence[str] | None = None) -> Config:
    """The config of this command line (`sys.argv` without argument)."""
    import tyro

    return tyro.cli(
        cls, args=argv, use_underscores=True, config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff)
    )


def to_flat_dict(config: Any) -> dict[str, Any]:
    """Flag name → value of every flag, without secrets."""
    flat: dict[str, Any] = {}
    for item in fields(config):
        value = getattr(config, item.name)
        flat |= to_flat_dict(value) if is_dataclass(value) else {item.name: value}
    if flat.get("use_wandb"):
        flat["use_wandb"] = "True"
    return {name: list(value) if isinstance(value, tuple) else value for name, value in flat.items()}


def save_config(config: Any, path: str | Path) -> None:
    """Write the resolved config as yaml that `--config` reads."""
    import yaml

    Path(path).write_text(yaml.safe_dump(to_flat_dict(config), sort_keys=False, allow_unicode=True))
