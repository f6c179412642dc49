"""Models out: Hugging Face folders that plain transformers loads."""

import shutil
from pathlib import Path
from typing import Any

import torch

from spmdrl.distributed import comm
from spmdrl.distributed.strategy import unwrap
from spmdrl.distributed.weight_sync import iter_weights
from spmdrl.errors import UserError

EXPORT_BUCKET_MB = 512


def save_hf(engine: Any, tokenizer: Any, folder: str | Path, *, hf_config: Any) -> None:
    """Write the policy in `engine` with its tokenizer and chat template to `folder`; every rank takes part.

    The files are written beside it and moved in when they are whole. `hf_config` is the checkpoint's own
    configuration, which the trainer's copy differs from (dropout). Raises UserError when the disk refuses.
    """
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in iter_weights(engine, bucket_mb=EXPORT_BUCKET_MB):
        assert tensor.numel() > 0, f"{name} is empty: a shard, not a weight"
        if comm.is_main():
            weights[name] = tensor.cpu()
    problem = _write(unwrap(engine), weights, tokenizer, Path(folder), hf_config) if comm.is_main() else None
    problem = comm.all_gather_object(problem)[0]
    if problem:
        raise UserError(problem)


def _write(actor: Any, weights: dict[str, torch.Tensor], tokenizer: Any, folder: Path, hf_config: Any) -> str | None:
    model = getattr(actor, "model", actor)
    partial = folder / ".partial"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        own, model.config = model.config, hf_config
        try:
            model.save_pretrained(partial, state_dict=weights)
        finally:
            model.config = own
        tokenizer.save_pretrained(partial)
        for file in sorted(partial.iterdir()):
            file.replace(folder / file.name)
        partial.rmdir()
    except OSError as error:
        return f"--save_path {folder}: cannot write the model: {error}"
    return None
