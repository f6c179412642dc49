"""A base model and a LoRA adapter made into one model."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from spmdrl.config.merge import MergeLoraConfig
from spmdrl.errors import UserError
from spmdrl.models import folder as folders
from spmdrl.models.loading import load_whole, reading
from spmdrl.models.lora import MERGED_CONFIG
from spmdrl.models.value_head import HF_HEAD


def merge_lora(config: MergeLoraConfig) -> str:
    """Write the merged model and its tokenizer to --output_path; a line that says so. Products and sums are fp32,
    rounded once.

    Raises UserError for an adapter and a base that do not belong together.
    """
    from transformers import AutoTokenizer

    folder, out = Path(str(config.lora_path)), Path(str(config.output_path)).expanduser()
    adapter = _read_adapter_config(folder, config)
    base = config.model_path or str(adapter["base_model_name_or_path"])
    with reading(f"--lora_path {folder} on {base}", "an adapter and its base"):
        model, dtype = _load_base(base, config)
        if config.bf16 is not None:
            dtype = torch.bfloat16 if config.bf16 else torch.float32
        merged, num_layers = merge_adapter(model, folder)
        merged = merged.to(dtype)
        if (folder / MERGED_CONFIG).is_file():
            merged.config = type(merged.config).from_json_file(folder / MERGED_CONFIG)
            merged.config.dtype = dtype
        source = tokenizer_folder(folder, base)
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=config.trust_remote_code)
    try:
        partial = folders.begin(out)
        folders.write_model(merged, partial)
        tokenizer.save_pretrained(str(partial))
        folders.move_in(out)
    except (OSError, SafetensorError) as error:
        folders.give_up(out)
        raise UserError(f"--output_path {config.output_path}: cannot write the model: {error}") from error
    layers = f"{num_layers} layer{'s' * (num_layers != 1)}"
    number_format = str(dtype).removeprefix("torch.")
    return f"{out}: {base} with {folder} merged into {layers}, in {number_format}, and the tokenizer of {source}"


def _read_adapter_config(folder: Path, config: MergeLoraConfig) -> dict[str, Any]:
    try:
        content = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise UserError(f"--lora_path {folder}: its adapter_config.json is not a JSON object")
    scores = content.get("task_type") == "SEQ_CLS"
    if scores != config.is_rm:
        kind = "that of a reward model or critic: give" if scores else "that of a causal LM: drop"
        raise UserError(f"--lora_path {folder} is {kind} --is_rm")
    return content


def _load_base(base: str, config: MergeLoraConfig) -> tuple[Any, torch.dtype]:
    """The base in fp32, and the dtype that it is saved in."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    source, options = f"the base {base}", {"dtype": "auto", "trust_remote_code": config.trust_remote_code}
    if config.is_rm:
        options |= {"head": HF_HEAD, "num_labels": 1}  # which the adapter brings
        model = load_whole(AutoModelForSequenceClassification, base, source, **options)
    else:
        model = load_whole(AutoModelForCausalLM, base, source, **options)
    dtype = model.dtype
    return model.float(), dtype


def tokenizer_folder(adapter: Path, base: str) -> str:
    """Where the tokenizer of an adapter is: beside it, or else with its base."""
    return str(adapter) if (adapter / "tokenizer_config.json").is_file() else base


def merge_adapter(model: Any, folder: Path) -> tuple[Any, int]:
    """`model` with the adapter merged into its weights, and into how many of its layers. Every tensor of the adapter
    finds its place, or UserError."""
    from peft import PeftConfig, PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import load_peft_weights

    weights = load_peft_weights(str(folder), device="cpu")
    if f"base_model.model.{HF_HEAD}.bias" in weights:  # which transformers' classifiers do not have
        setattr(model, HF_HEAD, nn.Linear(getattr(model, HF_HEAD).in_features, 1))
    adapted = PeftModel(model, PeftConfig.from_pretrained(str(folder)))
    found = adapted.load_adapter(str(folder), "default")
    lost = [*found.unexpected_keys, *(name for name in found.missing_keys if ".lora_" in name or HF_HEAD in name)]
    if lost:
        raise UserError(
            f"the adapter {folder} does not fit the base: {', '.join(sorted(lost)[:3])}, {len(lost)} in all"
        )
    num_layers = sum(isinstance(module, BaseTunerLayer) for module in adapted.modules())
    return adapted.merge_and_unload(), num_layers
