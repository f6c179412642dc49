"""Checks of the supervised trainers' flags: against their ranges, one another, files and ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spmdrl.config import checks, preflight
from spmdrl.config.flags import flags_of, values_of
from spmdrl.config.heads import check_head
from spmdrl.config.splits import check_splits
from spmdrl.errors import UserError

if TYPE_CHECKING:
    from spmdrl.config.supervised import SupervisedConfig

RANGES: dict[str, checks.Range] = {
    **checks.RANGES,
    "max_len": (lambda x: x >= 2, "at least 2"),
    "learning_rate": (lambda x: x >= 0, "0 or more"),
    "beta": (lambda x: x > 0, "above 0"),
    "label_smoothing": (lambda x: 0 <= x < 0.5, "from 0 to below 0.5"),
    "nll_loss_coef": (lambda x: x >= 0, "0 or more"),
    "desirable_loss_weight": (lambda x: x >= 0, "0 or more"),
    "undesirable_loss_weight": (lambda x: x >= 0, "0 or more"),
    "kd_coef": (lambda x: 0 <= x <= 1, "from 0 to 1"),
    "eval_steps": (lambda x: x == -1 or x >= 1, "-1 (after every epoch) or at least 1"),
}

# Held-out rows may be a split of --dataset.
NEEDS = {setting: needed for setting, needed in checks.NEEDS.items() if needed != "eval_dataset"}


def check_flags(config: SupervisedConfig) -> None:
    """Raise UserError for the first combination that cannot be meant, naming its flags and what would be valid."""
    checks.check_ranges(config, RANGES)
    checks.check_needs(config, NEEDS)
    checks.check_hardware(config)
    check_rendering(config)
    values = values_of(config)
    if values.get("ipo") and values["label_smoothing"]:
        raise UserError("--label_smoothing smooths the sigmoid loss, which --ipo replaces: give one of them")


def check_rendering(config: SupervisedConfig) -> None:
    """One thing shapes a row: the chat template, a text template or, for plain texts, neither."""
    values, flags = values_of(config), flags_of(type(config))
    has_template = values["input_template"] not in (None, flags["input_template"].default)
    if values.get("pretrain_mode"):
        shaped = {
            "apply_chat_template": values["apply_chat_template"],
            "input_template": has_template,
            "output_key": values["output_key"] != flags["output_key"].default,
            "multiturn": values["multiturn"],
        }
        for name, given in shaped.items():
            if given:
                raise UserError(f"--pretrain_mode learns plain texts as they are: leave --{name} out")
    checks.check_chat_template(config)
    if has_template and values["apply_chat_template"]:
        raise UserError("--input_template and --apply_chat_template both shape the prompt; give one of them")
    if has_template and values.get("prompt_key", "") is None:
        raise UserError("--input_template goes around a pair's prompt: name the prompt's column with --prompt_key")
    if values.get("multiturn") and not values["apply_chat_template"]:
        raise UserError("--multiturn learns the turns of the chat template: add --apply_chat_template")
    if values.get("multiturn") and values["output_key"] is not None:
        remedy = "give --output_key None" if flags["output_key"].default else "leave --output_key out"
        raise UserError(f"--multiturn takes whole conversations from --input_key: {remedy}")


def check_required(config: SupervisedConfig) -> None:
    if not config.model.pretrain:
        raise UserError("--pretrain is missing: the Hugging Face directory or hub name of the model to train")
    if not config.data.dataset:
        raise UserError("--dataset is missing: a file, directory or hub name with rows to train on")
    if "teacher_model" in config.other_models and not config.other_models["teacher_model"]:
        raise UserError("--teacher_model is missing: the directory or hub name of the model to learn from")
    values = values_of(config)
    is_text = not values["apply_chat_template"] and not values.get("pretrain_mode")
    if "output_key" in values and values["output_key"] is None and is_text:
        plain = ", --pretrain_mode for plain texts" if "pretrain_mode" in values else ""
        raise UserError(
            f"--output_key is missing, the column with the response{plain}; conversations take --apply_chat_template"
        )


def check_surroundings(config: SupervisedConfig, world_size: int) -> None:
    check_required(config)
    preflight.check_packages(config)
    named = {"pretrain": config.model.pretrain, **config.other_models}
    models = {flag: name for flag, name in named.items() if name}
    preflight.check_models(models)
    preflight.check_sources({"dataset": config.data.dataset, "eval_dataset": config.data.eval_dataset})
    check_splits(config)
    preflight.check_outputs(config.checkpoint, named.items())
    preflight.check_ranks(config, world_size)
    preflight.check_unpacked("pretrain", models["pretrain"])
    for flag, name in models.items():
        if config.program == "rm":  # which goes on with a reward model too
            check_head(flag, name, values_of(config)["value_head_prefix"])
        else:
            preflight.check_causal_lm(flag, name)
        if model_config := preflight.read_model_config(flag, name):
            check_positions(config.data.max_len, model_config, f"--{flag} {name}")
            if config.program in ("dpo", "kto"):  # which compare log-probs
                preflight.check_rope(config.data.max_len, model_config, f"--{flag} {name}")


def check_positions(max_len: int, model_config: dict[str, Any], model: str) -> None:
    positions = preflight.model_positions(model_config)
    if positions is not None and max_len > positions:
        raise UserError(f"--max_len {max_len} is more than the {positions} positions of {model}; at most {positions}")
