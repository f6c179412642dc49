"""The flags of cli/merge_lora.py."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from spmdrl.config.foreign import Foreign
from spmdrl.config.preflight import check_apart, check_models, check_save_path
from spmdrl.errors import UserError


@dataclass(frozen=True, kw_only=True)
class MergeLoraConfig:
    """Make one whole model of a base and a LoRA adapter; it loads without peft."""

    foreign: ClassVar[Foreign] = Foreign({}, {}, {})

    model_path: str | None = None
    """The base, a Hugging Face directory or hub name; left out: the one that the adapter was trained on."""
    lora_path: str | None = None
    """Directory of the adapter, such as the --save_path of a run with --lora_rank."""
    output_path: str | None = None
    """Directory for the merged model and its tokenizer."""
    is_rm: bool = False
    """The adapter is that of a reward model or critic, with its head."""
    bf16: bool | None = None
    """Save in bfloat16, with --no_bf16 in fp32; left out: in the base's own number format."""
    trust_remote_code: bool = False
    """Run model code that a checkpoint brings along."""

    def validate(self, world_size: int) -> None:
        for flag in ("lora_path", "output_path"):
            if not getattr(self, flag):
                raise UserError(f"--{flag} is missing")
        if not Path(str(self.lora_path), "adapter_config.json").is_file():
            raise UserError(f"--lora_path {self.lora_path}: there is no adapter_config.json in it")
        base = self.model_path or self._base_of_adapter()
        check_models({"model_path": base} if base else {})
        check_save_path(str(self.output_path), "output_path")
        inputs = [("lora_path", self.lora_path), ("model_path", base)]
        check_apart("output_path", str(self.output_path), [str(self.output_path)], inputs)
        if Path(str(self.output_path), "adapter_config.json").is_file():
            raise UserError(
                f"--output_path {self.output_path} has an adapter in it, which would be loaded on top of the merged "
                f"model: give another directory"
            )

    def _base_of_adapter(self) -> str | None:
        """None where its file is damaged, which is said when it is read."""
        try:
            content = json.loads(Path(str(self.lora_path), "adapter_config.json").read_text(encoding="utf-8"))
            return str(content["base_model_name_or_path"])
        except (OSError, ValueError, RecursionError, TypeError, KeyError):
            return None
