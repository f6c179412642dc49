"""The flags of cli/chat.py. Names are those of OpenRLHF's interactive_chat.py."""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from spmdrl.config import checks, hub, preflight
from spmdrl.config.foreign import NOT_YET, Foreign
from spmdrl.config.sections import LoadConfig
from spmdrl.errors import UserError

RANGES: dict[str, checks.Range] = {
    **checks.RANGES,
    "max_len": (lambda x: x >= 2, "at least 2"),
    "max_new_tokens": (lambda x: x >= 1, "at least 1"),
    "repetition_penalty": (lambda x: x > 0, "above 0; 1 is none"),
}


@dataclass(frozen=True, kw_only=True)
class ChatConfig:
    """Talk to a model in the terminal: a checkpoint, or the folder of a LoRA adapter. Ctrl-C stops an answer; /clear
    forgets the conversation; /quit or Ctrl-D ends it."""

    foreign: ClassVar[Foreign] = Foreign(
        not_yet={
            "use_ms": NOT_YET["use_ms"],
            "load_in_4bit": "the model is loaded in --bf16; drop it",
            **dict.fromkeys(("enable_csft", "csft_prompt"), "prompts are not conditioned on a reward; drop it"),
        },
        refused={
            "apply_chat_template": "the chat template is used unless --input_template is given; drop it",
            "zero_stage": "one process holds the whole model; drop it",
        },
        other_names={"ta_prompt": "system_prompt", "generate_max_len": "max_new_tokens"},
    )

    model: LoadConfig = field(default_factory=LoadConfig)
    system_prompt: str | None = None
    """What the model is told first: the system message, or without a chat template the text in front of all."""
    input_template: str | None = None
    """Text around each of your lines, with {} where it goes, such as 'User: {}\\nAssistant: '; left out: the
    tokenizer's chat template."""
    max_len: int | None = None
    """Most tokens of a conversation; left out: the model's positions."""
    max_new_tokens: int = 1024
    """Most tokens of an answer."""
    greedy_sampling: bool = False
    """Take the most likely token each time."""
    temperature: float = 0.2
    """Sampling temperature."""
    top_p: float = 0.9
    """Sample from the smallest set of tokens with this much probability."""
    repetition_penalty: float = 1.0
    """Divide the scores of tokens that are there already by this; 1 leaves the model as it is."""
    stop: tuple[str, ...] = ()
    """Strings that end an answer, such as --stop 'User:'."""
    seed: int = 42
    """Seed of sampling."""

    def __post_init__(self) -> None:
        checks.check_ranges(self, RANGES)
        for name in ("temperature", "top_p"):
            if self.greedy_sampling and getattr(self, name) != getattr(ChatConfig, name):
                raise UserError(f"--{name} changes nothing with --greedy_sampling; drop one of them")
        if self.input_template is not None and self.model.tokenizer_chat_template is not None:
            raise UserError("--tokenizer_chat_template does nothing with --input_template; drop one of them")

    def validate(self, world_size: int) -> None:
        """Raise UserError where there is no model, or more than one process."""
        if not self.model.pretrain:
            raise UserError("--pretrain is missing: the directory or hub name of a model, or the folder of an adapter")
        if world_size > 1:
            raise UserError(f"one process chats, not {world_size}: start it with python")
        preflight.check_packages(self)
        base = base_of_adapter(self.model.pretrain)
        preflight.check_causal_lm("pretrain", base or self.model.pretrain)
        if base is None:
            preflight.check_models({"pretrain": self.model.pretrain})
        elif not preflight.is_installed("peft"):
            raise UserError(f"--pretrain {self.model.pretrain} is a LoRA adapter: it needs the package peft")
        elif preflight.looks_local(base) and not (Path(base) / "config.json").is_file():
            raise UserError(
                f"--pretrain {self.model.pretrain} is a LoRA adapter of {base}, which is not there: merge it with its "
                "base by cli/merge_lora.py --model_path BASE"
            )
        elif not preflight.looks_local(base):
            hub.check_model("pretrain", base)


def base_of_adapter(name: str) -> str | None:
    """The model that the adapter in folder `name` was trained on; None where there is no adapter. Raises UserError for
    one that is damaged and for one of a reward model."""
    path = Path(name)
    if os.path.isfile(path / "config.json") or not os.path.isfile(path / "adapter_config.json"):
        return None
    try:
        content = json.loads((path / "adapter_config.json").read_text(encoding="utf-8"))
        base, kind = str(content["base_model_name_or_path"]), content.get("task_type")
    except (OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError):
        raise UserError(f"--pretrain {name}: adapter_config.json in it names no base_model_name_or_path") from None
    if kind == "SEQ_CLS":
        raise UserError(
            f"--pretrain {name} is the adapter of a reward model or critic, which scores texts and writes none: give "
            "a causal LM, or the adapter of one"
        )
    return base
