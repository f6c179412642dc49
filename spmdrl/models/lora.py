"""LoRA by peft: small trainable matrices beside frozen linear layers, W x + (alpha / rank) B A x (Hu et al., 2021,
https://arxiv.org/abs/2106.09685). 4-bit W: Dettmers et al., 2023, https://arxiv.org/abs/2305.14314."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spmdrl.config import LoraConfig
from spmdrl.distributed.strategy import unwrap
from spmdrl.distributed.weight_sync import saved_name
from spmdrl.errors import UserError, first_line
from spmdrl.models.value_head import HF_HEAD, ValueHead

ALL_LINEAR = "all-linear"
# Beside an adapter: the config of the whole model. Named config.json, it would make transformers look for weights.
MERGED_CONFIG = "merged_config.json"


def add_lora(model: Any, config: LoraConfig, *, seed: int) -> None:
    """Freeze the Hugging Face `model` and put trainable matrices beside its linear layers, in place; the model keeps
    its class. A value head stays trainable. The matrices follow from `seed`, and add nothing until they are trained.

    Nothing happens without --lora_rank. Raises UserError where --target_modules names no linear layer of the model.
    """
    if config.lora_rank == 0:
        return
    from peft import LoraConfig as PeftConfig
    from peft import TaskType
    from transformers.pytorch_utils import Conv1D

    peft_config = PeftConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        target_modules=_targets(model, config.target_modules),
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),  # GPT-2's weights are W^T
        task_type=TaskType.CAUSAL_LM if _value_head(model) is None else TaskType.SEQ_CLS,
        base_model_name_or_path=absolute(model.config.name_or_path),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        _inject(model, peft_config)


def load_adapter(model: Any, folder: str) -> None:
    """The same with the adapters, and the value head, that `write_adapter` or peft saved in `folder`."""
    from peft import PeftConfig
    from peft.utils import load_peft_weights

    _inject(model, PeftConfig.from_pretrained(folder))
    weights = {saved_name(name): p for name, p in model.named_parameters() if p.requires_grad}
    found = load_peft_weights(folder, device="cpu")
    if strangers := sorted(weights.keys() ^ found.keys()):
        raise ValueError(f"{', '.join(strangers[:3])} in one of them only, {len(strangers)} in all")
    with torch.no_grad():
        for name, p in weights.items():
            p.copy_(found[name])


def _inject(model: Any, peft_config: Any) -> None:
    from peft import inject_adapter_in_model

    peft_config.modules_to_save, peft_config.inference_mode = None, False
    inject_adapter_in_model(peft_config, model)
    head = _value_head(model)
    if head is not None:
        head.requires_grad_(True)
        peft_config.modules_to_save = [HF_HEAD]  # what a reader of the adapter replaces as a whole


def _value_head(model: Any) -> ValueHead | None:
    head = dict(model.named_children()).get(HF_HEAD)
    return head if isinstance(head, ValueHead) else None


def _targets(model: Any, names: tuple[str, ...]) -> str | list[str]:
    if names == (ALL_LINEAR,):
        return ALL_LINEAR
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    linear = [name for name, m in model.named_modules() if isinstance(m, (nn.Linear, Conv1D)) and m is not head]
    for name in names:
        if not any(layer == name or layer.endswith(f".{name}") for layer in linear):
            known = ", ".join(sorted({layer.rpartition(".")[2] for layer in linear}))
            raise UserError(f"--target_modules {name}: the model has no such linear layer, only {known}")
    return list(names)


def absolute(name: str) -> str:
    """A local folder's full path, so that an adapter finds its base from anywhere; a hub name as it is."""
    return str(Path(name).resolve()) if Path(name).exists() else name


def quantization(config: LoraConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Arguments of `from_pretrained` for --load_in_4bit. Raises UserError where there is no GPU or no bitsandbytes."""
    if not config.load_in_4bit:
        return {}
    if not torch.cuda.is_available():
        raise UserError("--load_in_4bit needs a GPU; drop it to train LoRA on weights in full precision")
    from transformers import BitsAndBytesConfig

    try:
        packed = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
    except ImportError as error:
        raise UserError(f"--load_in_4bit: {first_line(error)}") from error
    return {"quantization_config": packed}


class WithoutLora:
    """The frozen model inside an engine with LoRA, called as the engine is: a reference model that takes no memory."""

    def __init__(self, engine: Any):
        self.engine = engine

    @torch.no_grad()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with lora_off(unwrap(self.engine)):
            return self.engine(*args, **kwargs)


@contextmanager
def lora_off(model: nn.Module) -> Iterator[None]:
    """The model computes with its frozen weights alone for the time of the block."""
    from peft.tuners.lora import LoraLayer

    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def has_lora(model: Any) -> bool:
    """Whether `add_lora` put adapters into the Hugging Face `model`."""
    return hasattr(model, "peft_config")


def write_adapter(model: Any, weights: Mapping[str, Tensor], folder: Path, merged_config: Any) -> None:
    """Write the adapters in `model`, whose whole `weights` are given by peft's names, as peft reads them."""
    from safetensors.torch import save_file

    (config,) = model.peft_config.values()
    replace(config, inference_mode=True, target_modules=sorted(config.target_modules)).save_pretrained(str(folder))
    save_file({name: w.contiguous() for name, w in weights.items()}, folder / "adapter_model.safetensors")
    merged_config.to_json_file(folder / MERGED_CONFIG)
