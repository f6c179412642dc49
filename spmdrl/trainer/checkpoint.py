"""Models out: Hugging Face folders that plain transformers loads."""

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from spmdrl.config import ModelConfig
from spmdrl.distributed import comm
from spmdrl.distributed.strategy import unwrap
from spmdrl.distributed.weight_sync import iter_adapter, iter_weights
from spmdrl.errors import UserError
from spmdrl.models.lora import has_lora, write_adapter
from spmdrl.models.value_head import HF_HEAD

EXPORT_BUCKET_MB = 512


def hf_config_to_save(name: str, config: ModelConfig, *, dtype: torch.dtype, **changes: Any) -> Any:
    """The configuration of the checkpoint `name`; the trainer's copy of it has no dropout."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(name, trust_remote_code=config.trust_remote_code, dtype=dtype, **changes)


def save_hf(
    engine: Any, tokenizer: Any, folder: str | Path, *, hf_config: Any, value_head_prefix: str | None = None
) -> None:
    """Write the model in `engine` with its tokenizer and chat template to `folder`; every rank takes part. With LoRA
    it is the adapter, as peft reads it.

    The files are written beside it and moved in when they are whole. A critic's head has the name that transformers
    looks for and `value_head_prefix`, which is where OpenRLHF does. Raises UserError when the disk refuses.
    """
    weights: dict[str, torch.Tensor] = {}
    model = getattr(unwrap(engine), "model", unwrap(engine))
    tensors = iter_adapter if has_lora(model) else iter_weights
    for name, tensor in tensors(engine, bucket_mb=EXPORT_BUCKET_MB):
        assert tensor.numel() > 0, f"{name} is empty: a shard, not a weight"
        if comm.is_main():
            weights[name] = tensor.cpu()
            if value_head_prefix and name.startswith(f"{HF_HEAD}."):
                weights[f"{value_head_prefix}{name[len(HF_HEAD) :]}"] = tensor.cpu().clone()
    problem = _write(model, weights, tokenizer, Path(folder), hf_config) if comm.is_main() else None
    problem = comm.all_gather_object(problem)[0]
    if problem:
        raise UserError(problem)


def _write(model: Any, weights: dict[str, torch.Tensor], tokenizer: Any, folder: Path, hf_config: Any) -> str | None:
    partial = folder / ".partial"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        if has_lora(model):
            write_adapter(model, weights, partial, hf_config)
        else:
            _write_model(model, weights, partial, hf_config)
        tokenizer.save_pretrained(partial)
        for file in sorted(partial.iterdir()):
            file.replace(folder / file.name)
        partial.rmdir()
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)  # a full disk needs the room
        return f"--save_path {folder}: cannot write the model: {error}"
    return None


def _write_model(model: Any, weights: dict[str, torch.Tensor], folder: Path, hf_config: Any) -> None:
    own, model.config = model.config, hf_config
    try:
        model.save_pretrained(folder, state_dict=weights)
    finally:
        model.config = own
