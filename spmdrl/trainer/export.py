"""Models out: Hugging Face folders that plain transformers, or peft for an adapter, loads."""

import copy
import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from spmdrl.config import CheckpointConfig, ModelConfig
from spmdrl.distributed import comm
from spmdrl.distributed.engine_state import EngineState
from spmdrl.distributed.strategy import unwrap
from spmdrl.distributed.weight_sync import iter_adapter, iter_weights, saved_name
from spmdrl.errors import UserError
from spmdrl.models import folder as folders
from spmdrl.models.lora import has_lora, write_adapter
from spmdrl.models.value_head import HF_HEAD
from spmdrl.trainer.tensor_file import write_tensors

EXPORT_BUCKET_MB = 512
SHARD_BYTES = 5 * 10**9  # host memory that an export takes, and the most that a file of weights has


def saved_dtype(config: CheckpointConfig, computed_in: torch.dtype) -> torch.dtype:
    return torch.float32 if config.save_dtype == "fp32" else computed_in


def hf_config_to_save(name: str, config: ModelConfig, *, dtype: torch.dtype, **changes: Any) -> Any:
    """The configuration of the checkpoint `name`, without what a reward model has there about its scores before they
    are trained; the trainer's copy of it has no dropout."""
    from transformers import AutoConfig

    own = AutoConfig.from_pretrained(name, trust_remote_code=config.trust_remote_code, dtype=dtype, **changes)
    for statistic in ("mean", "std"):
        vars(own).pop(statistic, None)
    return own


def save_hf(
    engine: Any,
    tokenizer: Any,
    folder: str | Path,
    *,
    hf_config: Any,
    value_head_prefix: str | None = None,
    flag: str = "--save_path",
) -> None:
    """Write the model in `engine` with its tokenizer and chat template to `folder`; every rank takes part. With LoRA
    it is the adapter, as peft reads it.

    In fp32, where `hf_config` has it for a model that computes in bf16, it is the optimizer's master weights: they
    hold updates that are too small for bf16. What was there stays until all is written. A value head has the name that
    transformers looks for and `value_head_prefix`, which is where OpenRLHF does. Raises UserError, naming `flag`, when
    the disk refuses.
    """
    model = getattr(unwrap(engine), "model", unwrap(engine))
    is_adapter = has_lora(model)
    export = (_AdapterExport if is_adapter else _Export)(model, Path(folder), hf_config)
    tensors = (iter_adapter if is_adapter else iter_weights)(engine, bucket_mb=EXPORT_BUCKET_MB)
    if hf_config.dtype == torch.float32:
        tensors = _in_fp32(engine, tensors, saved_name if is_adapter else str)
    for name, tensor in tensors:
        assert tensor.numel() > 0, f"{name} is empty: a shard, not a weight"
        export.add(name, tensor)
        if value_head_prefix not in (None, HF_HEAD) and name.startswith(f"{HF_HEAD}."):
            export.add(f"{value_head_prefix}{name[len(HF_HEAD) :]}", tensor)
    problem = comm.all_gather_object(export.finish(tokenizer))[0]
    if problem:
        raise UserError(f"{flag} {folder}: cannot write the model: {problem}")


def _in_fp32(
    engine: Any, tensors: Iterable[tuple[str, Tensor]], in_files: Callable[[str], str]
) -> Iterator[tuple[str, Tensor]]:
    """`tensors` of `engine` under their names in files, which are `in_files` of the model's; trained ones as the
    optimizer has them, before rounding."""
    trained: dict[str, str] = {}  # name in files -> name in the engine
    if hasattr(engine, "optimizer"):
        prefix = "model." if hasattr(unwrap(engine), "model") else ""
        names = [name for name, param in unwrap(engine).named_parameters() if param.requires_grad]
        trained = {in_files(name.removeprefix(prefix)): name for name in names}
    master: Callable[[str], Tensor] | None = None
    for name, tensor in tensors:
        if tensor.dtype not in (torch.bfloat16, torch.float16):
            yield name, tensor
        elif name not in trained:
            yield name, tensor.float()
        else:
            master = master or EngineState(engine).gather()
            yield name, master(trained[name])


class _Export:
    """A folder under construction, by the main rank. After a first refusal of the disk it does nothing more, since
    the other ranks go on gathering weights."""

    def __init__(self, model: Any, folder: Path, hf_config: Any):
        self.model, self.folder, self.hf_config = model, folder, hf_config
        self.problem: str | None = None
        self.waiting: dict[str, Tensor] = {}  # for the next file
        self.waiting_bytes = self.total_bytes = 0
        self.files: list[list[str]] = []  # names of the weights in each
        self._try(self._begin)

    def add(self, name: str, tensor: Tensor) -> None:
        self._try(lambda: self._add(name, tensor))

    def finish(self, tokenizer: Any) -> str | None:
        """Move everything in; returns what the disk said if it refused."""
        self._try(lambda: self._finish(tokenizer))
        if self.problem:
            folders.give_up(self.folder)
        return self.problem

    def _try(self, write: Callable[[], None]) -> None:
        if not comm.is_main() or self.problem:
            return
        try:
            write()
        except (OSError, SafetensorError) as error:
            self.problem = str(error)
        except Exception as error:  # of transformers' or a tokenizer's own code: a state can still be saved
            self.problem = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"

    def _begin(self) -> None:
        self.partial = folders.begin(self.folder)

    def _add(self, name: str, tensor: Tensor) -> None:
        if any(re.search(pattern, name) for pattern in getattr(self.model, "_keys_to_ignore_on_save", None) or ()):
            return
        num_bytes = tensor.numel() * tensor.element_size()
        if self.waiting and self.waiting_bytes + num_bytes > SHARD_BYTES:
            self._write_weights()
        self.waiting[name] = tensor.cpu()
        self.waiting_bytes += num_bytes

    def _write_weights(self) -> None:
        from transformers.core_model_loading import revert_weight_conversion

        weights = revert_weight_conversion(self.model, self.waiting)  # to the names and shapes that files have
        self.files.append(list(weights))
        write_tensors(self._weight_file(len(self.files)), weights, {"format": "pt"})
        self.total_bytes += self.waiting_bytes
        self.waiting, self.waiting_bytes = {}, 0

    def _weight_file(self, number: int) -> Path:
        """Until it is known how many there are."""
        return self.partial / f"{number}.weights"

    def _name_weight_files(self) -> None:
        total, index = len(self.files), {}
        for number, names in enumerate(self.files, start=1):
            file = f"model-{number:05d}-of-{total:05d}.safetensors" if total > 1 else "model.safetensors"
            self._weight_file(number).replace(self.partial / file)
            index |= dict.fromkeys(names, file)
        if total > 1:
            content = {"metadata": {"total_size": self.total_bytes}, "weight_map": index}
            (self.partial / "model.safetensors.index.json").write_text(json.dumps(content, indent=2, sort_keys=True))

    def _write_model(self) -> None:
        self._write_weights()
        own, written = self.model.config, copy.deepcopy(self.hf_config)
        self.model.config = written
        try:
            with _no_progress_bar():
                folders.write_model(self.model, self.partial, state_dict={})  # everything but the weights
        finally:
            self.model.config = own
        written.dtype = self.hf_config.dtype  # transformers has put that of the model in memory
        written.save_pretrained(self.partial)
        self._name_weight_files()  # after save_pretrained, which removes files of weights that it did not write

    def _finish(self, tokenizer: Any) -> None:
        self._write_model()
        tokenizer.save_pretrained(self.partial)
        folders.move_in(self.folder)


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """transformers would show one for the weights, of which it is given none."""
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


class _AdapterExport(_Export):
    """The adapters of LoRA, which are small."""

    def _write_model(self) -> None:
        write_adapter(self.model, self.waiting, self.partial, self.hf_config)
