"""Checks against what is there: required flags, files, the model's config.json and the number of ranks.

They run on every rank before torch is imported and load nothing but small JSON files.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spmdrl.config import hub
from spmdrl.config.flags import values_of
from spmdrl.config.heads import check_head
from spmdrl.config.splits import check_splits
from spmdrl.errors import UserError

if TYPE_CHECKING:
    from spmdrl.config.ppo import PPOConfig
    from spmdrl.config.sections import CheckpointConfig, RewardConfig

GENERATION = "generation_config.json"
CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
DATA_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".arrow")


def check_surroundings(config: PPOConfig, world_size: int) -> None:
    check_required(config)
    check_packages(config)
    check_engine(config)
    check_files(config)
    check_ranks(config, world_size)
    for flag, name in models(config).items():
        check_unpacked(flag, name)
        if model_config := read_model_config(flag, name):
            check_positions(config, model_config, f"--{flag} {name}")
            check_rope(config.max_total_len, model_config, f"--{flag} {name}")
    check_causal_lm("pretrain", config.model.pretrain or "")
    if model_config := read_model_config("pretrain", config.model.pretrain or ""):
        check_heads(config, model_config, world_size)


def inputs_of(config: PPOConfig) -> list[tuple[str, str | None]]:
    """(flag, name) of every checkpoint, adapters too."""
    rewards = [("reward_pretrain", name) for name in config.reward.models]
    return [("pretrain", config.model.pretrain), ("critic_pretrain", config.critic.critic_pretrain), *rewards]


def models(config: PPOConfig) -> dict[str, str]:
    """The checkpoints of whole models that are given, by flag."""
    critic = None if config.share_backbone else config.critic.critic_pretrain
    given = {"pretrain": config.model.pretrain, "critic_pretrain": critic}
    return {flag: name for flag, name in given.items() if name}


# Packages that are not installed by default, by the flag that asks for them.
PACKAGES = {
    "use_wandb": "wandb",
    "use_tensorboard": "tensorboard",
    "lora_rank": "peft",
    "load_in_4bit": "bitsandbytes",
}


def check_packages(config: Any) -> None:
    values = values_of(config)
    for flag, package in PACKAGES.items():
        if values.get(flag) not in (None, 0) and not is_installed(package):
            raise UserError(f"--{flag} needs the package {package}: pip install {package}, or leave the flag out")
    if values["attention"] == "flash_attention_2" and not is_installed("flash_attn"):
        raise UserError(
            "--attention flash_attention_2 (--flash_attn) needs the package flash-attn: pip install flash-attn "
            "--no-build-isolation, or leave the flag out"
        )


def check_engine(config: Any) -> None:
    if config.rollout.engine == "vllm" and not is_installed("vllm"):
        raise UserError("--engine vllm needs the package vllm: install it, or sample with --engine hf")


def is_installed(package: str) -> bool:
    """A directory of that name that happens to lie here, such as W&B's logs, does not count."""
    if package in sys.modules:
        return True
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def check_required(config: PPOConfig) -> None:
    if not config.model.pretrain:
        raise UserError("--pretrain is missing: the Hugging Face directory or hub name of the model to train")
    if not config.data.prompt_data:
        raise UserError("--prompt_data is missing: a file, directory or hub name with prompts")
    if not config.reward.num_sources:
        raise UserError(
            "no reward: give a function with --reward_func path.py:name, a model with --reward_pretrain or a server "
            "with --remote_rm_url http://host:port/path"
        )


def check_files(config: PPOConfig) -> None:
    check_models(models(config))
    if config.share_backbone:
        check_adapters(config)
    check_sources(
        {
            "prompt_data": config.data.prompt_data,
            "pretrain_data": config.ptx.pretrain_data,
            "eval_dataset": config.eval.eval_dataset,
        }
    )
    check_splits(config)
    prefix, has_adapters = config.critic.value_head_prefix, config.share_backbone
    check_reward_sources(config.reward, prefix, has_adapters=has_adapters)
    if config.needs_critic and not has_adapters:
        check_critic_head(config)
    check_outputs(config.checkpoint, inputs_of(config))


def check_adapters(config: PPOConfig) -> None:
    """With --share_backbone, critic and reward models are adapters that were trained on --pretrain."""
    pretrain, critic = str(config.model.pretrain), config.critic.critic_pretrain
    given = [("critic_pretrain", critic)] if critic not in (None, pretrain) else []
    for flag, name in [*given, *(("reward_pretrain", name) for name in config.reward.models)]:
        file = Path(name) / "adapter_config.json"
        if not os.path.isfile(file):
            raise UserError(
                f"--{flag} {name} with --share_backbone: no adapter, there is no adapter_config.json in it"
            )
        base = str(_read_object(file, f"--{flag} {name}").get("base_model_name_or_path"))
        if Path(base).absolute() != Path(pretrain).resolve() and base != pretrain:
            raise UserError(
                f"--{flag} {name} with --share_backbone: an adapter on {base}, not on --pretrain {pretrain}"
            )


def check_critic_head(config: PPOConfig) -> None:
    """Without --critic_pretrain the critic starts from a reward model, which is checked as one, or --pretrain."""
    if name := config.critic.critic_pretrain:
        check_head("critic_pretrain", name, config.critic.value_head_prefix)
    elif not config.reward.models:
        check_head("pretrain", str(config.model.pretrain), config.critic.value_head_prefix)


def check_reward_sources(reward: RewardConfig, value_head_prefix: str, *, has_adapters: bool = False) -> None:
    for name in () if has_adapters else reward.models:
        check_models({"reward_pretrain": name})
        check_head("reward_pretrain", name, value_head_prefix)
    if reward.servers and not is_installed("httpx2"):
        raise UserError("--remote_rm_url http://... needs the package httpx2: pip install httpx2")
    if not reward.servers:
        check_reward_file("remote_rm_url", reward.remote_rm_url)
    for spec in reward.reward_func:
        check_reward_file("reward_func", spec)


def check_models(names: Mapping[str, str]) -> None:
    """names: the checkpoints that are given, by flag."""
    for flag, name in names.items():
        if looks_local(name) and not os.path.isfile(Path(name) / "config.json"):
            if os.path.isfile(Path(name) / "adapter_config.json"):
                merge = f"cli/merge_lora.py{' --is_rm' if flag in ('reward_pretrain', 'critic_pretrain') else ''}"
                raise UserError(f"--{flag} {name} is a LoRA adapter: make a whole model of it with {merge}")
            missing = "there is no config.json in it" if os.path.exists(name) else "no such directory"
            raise UserError(f"--{flag} {name}: {missing}")
        if not looks_local(name):
            hub.check_model(flag, name)


def check_causal_lm(flag: str, name: str) -> None:
    """Raise UserError for a reward model, critic or other classifier: what it has learned is to score texts."""
    kinds = (_read_config(flag, name) or {}).get("architectures")
    if kinds and isinstance(kinds, list) and all(str(kind).endswith(CLASSIFIERS) for kind in kinds):
        raise UserError(
            f"--{flag} {name} is a {kinds[0]}, which scores texts (a reward model or critic?) and writes none: give a "
            "causal LM"
        )


def check_unpacked(flag: str, name: str) -> None:
    """Raise UserError for weights that are packed into few bits (GPTQ, AWQ, FP8): they cannot be trained, and what is
    saved would be read as packed again."""
    packed = (_read_config(flag, name) or {}).get("quantization_config")
    if packed:
        method = packed.get("quant_method") if isinstance(packed, dict) else None
        raise UserError(
            f"--{flag} {name} has quantised weights ({method or 'quantization_config'} in its config.json), which "
            "cannot be trained: give the model that they were made of; --load_in_4bit packs it for LoRA"
        )


def check_sources(specs: Mapping[str, str | None]) -> None:
    """specs: data sources, several separated by commas, by flag."""
    for flag, sources in specs.items():
        for source in (sources or "").split(","):
            path = source.strip()
            path = path if os.path.exists(os.path.expanduser(path)) else re.sub(r"@[^/@]*$", "", path)
            if looks_local(path) and not os.path.exists(os.path.expanduser(path)):
                raise UserError(f"--{flag} {path}: no such file or directory")
            if path and not looks_local(path):
                hub.check_dataset(flag, path)


def check_reward_file(flag: str, spec: str | None) -> None:
    if spec is None:
        return
    if re.match(r"https?://", spec):
        raise UserError(f"--{flag} {spec}: a reward server goes to --remote_rm_url")
    path = spec if spec.endswith(".py") else spec.rpartition(":")[0]
    if not path.endswith(".py"):
        server = ", or a server, http://host:port/path" if flag == "remote_rm_url" else ""
        raise UserError(f"--{flag} {spec}: takes path.py, which defines reward_func, or path.py:name{server}")
    if not os.path.isfile(os.path.expanduser(path)):
        raise UserError(f"--{flag} {path}: no such file")


def check_outputs(checkpoint: CheckpointConfig, inputs: Iterable[tuple[str, str | None]]) -> None:
    """inputs: (flag, name) of the checkpoints that the run starts from."""
    for flag, place in (("save_path", checkpoint.save_path), ("ckpt_path", checkpoint.ckpt_path)):
        check_save_path(place, flag)
        parts = ("", "ema", "critic") if flag == "save_path" else ("", "best")
        check_apart(flag, place, [os.path.join(place, part) for part in parts], inputs)


def check_apart(flag: str, given: str, places: Iterable[str], inputs: Iterable[tuple[str, str | None]]) -> None:
    """Raise UserError where one of the `places` that --flag `given` writes is one of the inputs, (flag, name)."""
    for other, name in inputs:
        if name and any(_is_same(place, name) for place in places):
            raise UserError(f"--{flag} {given} would overwrite --{other} {name}: give another place")


def _is_same(place: str, other: str) -> bool:
    """Whether two names are the same place, by whatever links they go; also one that is not there yet."""
    place, other = os.path.expanduser(place), os.path.expanduser(other)
    try:
        return os.path.realpath(place) == os.path.realpath(other) or os.path.samefile(place, other)
    except (OSError, ValueError):  # one is not there
        return False


def check_save_path(save_path: str, flag: str = "save_path") -> None:
    if not save_path.strip():
        raise UserError(f"--{flag} is empty: give a directory")
    path = Path(os.path.expanduser(save_path)).absolute()
    nearest = next(p for p in (path, *path.parents) if os.path.lexists(p))
    if not nearest.exists():
        raise UserError(f"--{flag} {save_path}: {nearest} is a link to {os.readlink(nearest)}, which is not there")
    if not nearest.is_dir():
        raise UserError(f"--{flag} {save_path}: {nearest} is a file")
    if not os.access(nearest, os.W_OK):
        raise UserError(f"--{flag} {save_path}: no permission to write in {nearest}")


def looks_local(name: str) -> bool:
    """Whether a model or data source is meant to be on this machine: it is, or no hub name (owner/name) looks so."""
    written_as_path = name.startswith(("/", ".", "~")) or name.count("/") > 1 or Path(name).suffix in DATA_SUFFIXES
    return bool(name) and (written_as_path or os.path.exists(name))


def check_ranks(config: Any, world_size: int) -> None:
    values = values_of(config)
    for name in ("vllm_tensor_parallel_size", "zpg"):
        size = values.get(name, 1)
        if world_size % size:
            raise UserError(
                f"--{name} {size} does not divide the {world_size} rank{'s' if world_size > 1 else ''} of this run; "
                f"valid: {_listed(divisors(world_size))}"
            )


def check_heads(config: Any, model_config: dict[str, Any], world_size: int) -> None:
    size, heads = config.rollout.vllm_tensor_parallel_size, _first(model_config, "num_attention_heads", "n_head")
    if heads and heads % size:
        valid = [d for d in divisors(world_size) if heads % d == 0]
        raise UserError(
            f"--vllm_tensor_parallel_size {size} does not divide the {heads} attention heads of --pretrain "
            f"{config.model.pretrain}; valid on {world_size} ranks: {_listed(valid)}"
        )


def check_positions(config: PPOConfig, model_config: dict[str, Any], model: str) -> None:
    positions = model_positions(model_config)
    if positions is None or config.max_total_len <= positions:
        return
    if config.rollout.max_len is not None:
        wanted = f"--max_len {config.rollout.max_len}"
        remedy = f"at most --max_len {positions}"
    else:
        wanted = (
            f"--prompt_max_len {config.data.prompt_max_len} + --generate_max_len {config.rollout.generate_max_len}"
        )
        room = positions - config.data.prompt_max_len
        remedy = f"at most --generate_max_len {room}" if room > 0 else f"lower --prompt_max_len below {positions}"
    raise UserError(f"{wanted} is more than the {positions} positions of {model}; {remedy}")


def model_positions(model_config: dict[str, Any]) -> int | None:
    """Tokens the model can attend to, or None where its config does not bound them. Extended RoPE counts in full."""
    positions = _first(model_config, "max_position_embeddings", "n_positions", "max_seq_len")
    rope, kind = _rope(model_config)
    if positions and kind in ("linear", "dynamic", "yarn") and isinstance(rope.get("factor"), (int, float)):
        original = _first(rope, "original_max_position_embeddings") or positions
        positions = max(positions, int(original * rope["factor"]))
    return positions


def _rope(model_config: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
    """How RoPE is extended, and the name of that."""
    rope = model_config.get("rope_scaling") or model_config.get("rope_parameters")
    rope = rope if isinstance(rope, dict) else {}
    return rope, rope.get("rope_type") or rope.get("type")


def check_rope(max_len: int, model_config: dict[str, Any], model: str) -> None:
    """Raise UserError for lengths at which a response's log-probs are those of its micro-batch: these models turn all
    of it by other angles once its longest sequence is beyond a length, and vLLM turns every sequence by those."""
    rope, kind = _rope(model_config)
    if kind not in ("longrope", "su", "dynamic"):
        return
    name = "original_max_position_embeddings"
    limit = _first(rope, name) or _first(model_config, name, "max_position_embeddings")
    if limit is not None and max_len > limit:
        raise UserError(
            f"{model} computes micro-batches with more than {limit} tokens otherwise ({kind} RoPE), so that log-probs "
            f"of the same response would differ: prompt and response can be up to {limit} tokens, got {max_len}"
        )


def read_model_config(flag: str, pretrain: str) -> dict[str, Any] | None:
    """config.json of a local model, or of a hub model in the local cache; None where neither is there."""
    content = _read_config(flag, pretrain)
    if content is None:
        return None
    inner = content.get("text_config")
    return inner if inner and isinstance(inner, dict) else content


def _read_config(flag: str, pretrain: str) -> dict[str, Any] | None:
    folder = hub.folder_of(pretrain)
    if folder is None:
        return None
    content = _read_object(folder / "config.json", f"--{flag} {pretrain}")
    if (folder / GENERATION).is_file():  # transformers would go on without the ids of EOS that are in it
        _read_object(folder / GENERATION, f"--{flag} {pretrain}")
    return content


def _read_object(path: Path, source: str) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        raise UserError(f"{source}: {path} is not valid JSON") from None
    if not isinstance(content, dict):
        raise UserError(f"{source}: {path} must hold an object, {{...}}, not a {type(content).__name__}")
    return content


def _first(model_config: dict[str, Any], *names: str) -> int | None:
    return next((value for name in names if type(value := model_config.get(name)) is int), None)


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
