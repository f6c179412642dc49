"""The folder of a model or an adapter, which becomes another one's when that is whole."""

import re
import shutil
from pathlib import Path
from typing import Any

# What makes a folder a model or an adapter: left beside another one it would be loaded with it.
MODEL_FILE = re.compile(
    r"(model(-\d{5}-of-\d{5})?\.safetensors|pytorch_model(-\d{5}-of-\d{5})?\.bin)(\.index\.json)?"
    r"|adapter_model\.(safetensors|bin)|(adapter_|merged_|generation_)?config\.json"
)


def begin(folder: Path) -> Path:
    """An empty directory in `folder` for the files, without what a killed process left of an earlier one."""
    give_up(folder)
    _partial(folder).mkdir(parents=True)
    return _partial(folder)


def give_up(folder: Path) -> None:
    """Remove what `begin` made; a full disk needs the room."""
    shutil.rmtree(_partial(folder), ignore_errors=True)


def write_model(model: Any, folder: Path, **options: Any) -> None:
    """`save_pretrained` that saves the settings of generate as the checkpoint has them: transformers refuses what it
    finds odd about them, such as a temperature without do_sample."""
    own = getattr(model, "generation_config", None)
    if own is not None:
        model.generation_config = type(own)()
    try:
        model.save_pretrained(str(folder), **options)
    finally:
        if own is not None:
            model.generation_config = own
    if own is not None and model.can_generate():
        own.to_json_file(folder / "generation_config.json", use_diff=True)


def move_in(folder: Path) -> None:
    """Make the files in what `begin` made those of `folder`, config.json as the last, and remove those of another
    model or adapter that was there."""
    partial = _partial(folder)
    new = sorted(partial.iterdir(), key=lambda file: (file.name == "config.json", file.name))
    stale = {file.name for file in folder.iterdir() if MODEL_FILE.fullmatch(file.name)}
    for file in new:
        if file.is_dir():  # of templates: a directory does not replace one that has files
            shutil.rmtree(folder / file.name, ignore_errors=True)
        file.replace(folder / file.name)
    for name in stale - {file.name for file in new}:
        (folder / name).unlink()
    partial.rmdir()


def _partial(folder: Path) -> Path:
    return folder / ".partial"
