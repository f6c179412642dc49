"""Checks of flags against their ranges and against one another. No file is read and no rank counted."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, parse_qsl, urlsplit

from spmdrl.config.flags import flags_of, values_of
from spmdrl.config.registry import ALGOS, dict_of_strings
from spmdrl.errors import UserError, shortened

if TYPE_CHECKING:
    from spmdrl.config.ppo import PPOConfig


def check_flags(config: PPOConfig) -> None:
    """Raise UserError for the first combination that cannot be meant, naming its flags and what would be valid."""
    check_ranges(config)
    check_batches(config)
    check_lengths(config)
    check_estimator(config)
    check_critic(config)
    check_rewards(config)
    check_kl(config)
    check_old_log_probs(config)
    check_unread_settings(config)
    check_needs(config)
    check_template(config)
    check_hardware(config)
    check_role_stages(config)
    check_share_backbone(config)
    check_evaluation(config)
    check_anomaly(config)


Range = tuple[Callable[[Any], bool], str]  # whether a value is in it, and what it is called
_POSITIVE = (lambda x: x > 0, "above 0")
_NOT_NEGATIVE = (lambda x: x >= 0, "0 or more")
_AT_LEAST_1 = (lambda x: x >= 1, "at least 1")
_SHARE = (lambda x: 0 <= x <= 1, "from 0 to 1")
_ASCENDING = (lambda x: x[0] < x[1], "two numbers, the lower first")

RANGES: dict[str, Range] = {
    **dict.fromkeys(
        (
            *("rollout_batch_size", "micro_rollout_batch_size", "train_batch_size", "micro_train_batch_size"),
            *("n_samples_per_prompt", "max_epochs", "num_episodes", "logging_steps", "max_samples", "prompt_max_len"),
            *("generate_max_len", "generate_min_len", "vllm_tensor_parallel_size", "sync_bucket_mb", "zpg"),
            *("vllm_kv_cache_gb", "kl_horizon", "overlong_buffer_len", "dynamic_filtering_max_draws", "lora_alpha"),
            *("max_ckpt_num", "max_ckpt_mem"),
        ),
        _AT_LEAST_1,
    ),
    **dict.fromkeys(
        (
            *("max_norm", "l2", "init_kl_coef", "entropy_coef", "ptx_coef", "overlong_penalty_factor"),
            *("phase_timeout", "time_limit_margin_s"),
        ),
        _NOT_NEGATIVE,
    ),
    **dict.fromkeys(("actor_learning_rate", "critic_learning_rate"), _NOT_NEGATIVE),
    **dict.fromkeys(("eps_clip", "value_clip", "kl_target", "rollout_token_cap", "remote_rm_timeout"), _POSITIVE),
    **dict.fromkeys(("sapo_tau_pos", "sapo_tau_neg"), _POSITIVE),
    **dict.fromkeys(("gamma", "lambd", "lr_warmup_ratio", "min_lr_ratio", "ema_beta"), _SHARE),
    **dict.fromkeys(("reward_clip_range", "rollout_correction_range", "dynamic_filtering_range"), _ASCENDING),
    "eval_steps": (lambda x: x == -1 or x >= 1, "-1 (never) or at least 1"),
    "eval_temperature": _NOT_NEGATIVE,
    "anomaly_min_entropy": _NOT_NEGATIVE,
    "anomaly_spike_factor": (lambda x: x > 1, "above 1"),
    "temperature": (lambda x: x > 0, "above 0: a greedy choice has no probability to train"),
    "lora_rank": _NOT_NEGATIVE,
    "lora_dropout": (lambda x: 0 <= x < 1, "from 0 to below 1"),
    "top_p": (lambda x: 0 < x <= 1, "above 0 and at most 1"),
    "top_k": (lambda x: x == -1 or x >= 1, "-1 (all tokens) or at least 1"),
    **dict.fromkeys(
        ("zero_stage", "critic_zero_stage", "ref_reward_zero_stage"), (lambda x: 0 <= x <= 3, "0, 1, 2 or 3")
    ),
    "vllm_gpu_memory_utilization": (lambda x: 0 < x < 1, "between 0 and 1"),
    "adam_betas": (lambda x: all(0 <= beta < 1 for beta in x), "two numbers from 0 to below 1"),
    "eps_clip_low_high": (lambda x: 0 < x[0] <= 1 and x[1] > 0, "two widths above 0, the first at most 1"),
    "dual_clip": (lambda x: x > 1, "above 1"),
    "save_steps": (lambda x: x == -1 or x >= 1, "-1 (never) or at least 1"),
    "stop": (all, "texts that are not empty"),
    "value_head_prefix": (lambda x: all(map(str.isidentifier, x.split("."))), "the name of a module, such as score"),
    "seed": (lambda x: 0 <= x < 2**31, "from 0 to 2147483647"),
}


# Where infinity means that there is no limit.
MAY_BE_INFINITE = {
    *("max_norm", "eps_clip", "eps_clip_low_high", "dual_clip", "value_clip", "rollout_token_cap"),
    *("reward_clip_range", "rollout_correction_range", "dynamic_filtering_range", "anomaly_spike_factor"),
}


def check_ranges(config: Any, ranges: Mapping[str, Range] = RANGES) -> None:
    for name, value in values_of(config).items():
        if isinstance(value, float) and math.isinf(value) and name not in MAY_BE_INFINITE:
            raise UserError(f"--{name} must be finite, got {value}")
        if value is None or name not in ranges:
            continue
        is_valid, wanted = ranges[name]
        if not is_valid(value):
            shown = shortened(" ".join(map(_shown, value)) if isinstance(value, tuple) else str(value))
            raise UserError(f"--{name} must be {wanted}, got {shown}")


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else repr(value)


def check_batches(config: PPOConfig) -> None:
    samples, batch = config.samples_per_step, config.optim.train_batch_size
    if samples % batch == 0:
        return
    small = [d for d in range(1, math.isqrt(min(samples, 10**10)) + 1) if samples % d == 0]
    divisors = sorted({*small, *(samples // d for d in small)})
    nearest = [max(d for d in divisors if d < batch), *(d for d in divisors if d > batch)][:2]
    raise UserError(
        f"--train_batch_size {batch} does not divide the {samples} samples of a step (--rollout_batch_size "
        f"{config.rollout.rollout_batch_size} x --n_samples_per_prompt {config.rollout.n_samples_per_prompt}); the "
        f"nearest that does is {' or '.join(map(str, nearest))}"
    )


def check_lengths(config: PPOConfig) -> None:
    rollout, data = config.rollout, config.data
    if rollout.generate_min_len > rollout.generate_max_len:
        raise UserError(
            f"--generate_min_len {rollout.generate_min_len} is more than --generate_max_len {rollout.generate_max_len}"
        )
    if config.algo.overlong_buffer_len is not None and config.algo.overlong_buffer_len >= rollout.generate_max_len:
        raise UserError(
            f"--overlong_buffer_len {config.algo.overlong_buffer_len} must be less than --generate_max_len "
            f"{rollout.generate_max_len}"
        )
    if rollout.max_len is not None and rollout.max_len <= data.prompt_max_len:
        raise UserError(
            f"--max_len {rollout.max_len} leaves no room for a response after --prompt_max_len {data.prompt_max_len}; "
            f"lower --prompt_max_len or leave --max_len out"
        )


def check_estimator(config: PPOConfig) -> None:
    algo, n = config.algo, config.rollout.n_samples_per_prompt
    needed = (
        flags_of(type(config))["advantage_estimator"]
        .registered()
        .properties(algo.advantage_estimator)
        .get("min_samples", 1)
    )
    if n < needed:
        raise UserError(
            f"--advantage_estimator {algo.advantage_estimator} compares the samples of one prompt: it needs "
            f"--n_samples_per_prompt {needed} or more, got {n}"
        )
    if algo.dynamic_filtering and n < 2:
        raise UserError(
            f"--dynamic_filtering judges groups of samples: it needs --n_samples_per_prompt 2 or more, got {n}"
        )


CRITIC_FLAGS = ("lambd", "critic_zero_stage", "critic_adam_offload")  # of other sections


def check_critic(config: PPOConfig) -> None:
    """Flags of the critic are refused where there is none."""
    if config.needs_critic:
        return
    values = values_of(config)
    for name, flag in flags_of(type(config)).items():
        if name == "value_head_prefix" and config.reward.models:
            continue  # a reward model has one too
        if (flag.section == "critic" or name in CRITIC_FLAGS) and values[name] != flag.default:
            raise UserError(
                f"--{name} is for a critic, and --advantage_estimator {config.algo.advantage_estimator} has none: "
                f"drop it, or take --advantage_estimator gae"
            )


def check_rewards(config: Any) -> None:
    reward, given = config.reward, len(config.reward.reward_weights)
    if given and given != reward.num_sources:
        raise UserError(
            f"--reward_weights has {given} number{'s' * (given > 1)} for {reward.num_sources} "
            f"reward{'s' * (reward.num_sources != 1)}: {len(reward.models)} of --reward_pretrain, "
            f"{int(bool(reward.remote_rm_url))} of --remote_rm_url, {len(reward.reward_func)} of --reward_func; give "
            f"one for each, in this order"
        )
    for url in reward.servers:
        parts = _split_url(url)
        if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
            shown = re.sub("//.*@", "//***@", url)  # a password may be why it is none
            raise UserError(f"--remote_rm_url {shown}: a reward server is http://host:port/path")
        secret = "a name or password" if parts.username or parts.password else _secret_parameter(parts.query)
        if secret:
            raise UserError(
                f"--remote_rm_url of {parts.hostname} has {secret} in it, which logs would show; put a bearer token "
                f"into the environment variable SPMDRL_RM_TOKEN"
            )
    if reward.servers and len(reward.servers) != len((reward.remote_rm_url or "").split(",")):
        raise UserError(
            f"--remote_rm_url {reward.remote_rm_url}: either servers or one Python file; give functions with "
            f"--reward_func"
        )
    if reward.remote_rm_timeout != 600 and not reward.servers:
        raise UserError("--remote_rm_timeout changes nothing without a server in --remote_rm_url")


def _split_url(url: str) -> SplitResult | None:
    """None for what is no URL, such as one with the port 99999."""
    try:
        parts = urlsplit(url)
        return parts if parts.port != 0 and url.isprintable() and " " not in url else None
    except ValueError:
        return None


def _secret_parameter(query: str) -> str | None:
    """The first parameter of a URL whose name says that it is not for everybody."""
    for name, _ in parse_qsl(query, keep_blank_values=True):
        if re.search("(?i)token|secret|passw|api_?key|signature|credential", name):
            return f"?{name}=..."
    return None


def check_kl(config: PPOConfig) -> None:
    algo = config.algo
    if algo.use_kl_loss and algo.init_kl_coef == 0:
        raise UserError("--use_kl_loss has no effect with --init_kl_coef 0; raise the one or drop the other")
    if algo.kl_target is not None and algo.init_kl_coef == 0:
        raise UserError("--kl_target adapts the KL weight from --init_kl_coef, which must then be above 0")
    reason = dict_of_strings(ALGOS / "kl.py", "KL_LOSS_REFUSED").get(algo.kl_estimator)
    if algo.use_kl_loss and reason:
        raise UserError(f"--use_kl_loss with --kl_estimator {algo.kl_estimator}: {reason}")


def check_old_log_probs(config: PPOConfig) -> None:
    """Engine log-probs are of the distribution that was sampled from, the trainer's of the whole one."""
    algo, rollout = config.algo, config.rollout
    cut = ("--top_p" if rollout.top_p < 1 else "--top_k") if rollout.is_cut else None
    if cut and algo.old_log_probs == "engine":
        raise UserError(
            f"--old_log_probs engine with {cut}: the ratio would be off by the probability that {cut} cuts"
        )
    if cut and algo.rollout_correction not in ("auto", "none"):
        raise UserError(
            f"--rollout_correction {algo.rollout_correction} with {cut}: the weights would be off by the probability "
            f"that {cut} cuts; leave one of them out"
        )
    if algo.old_log_probs == "engine" and algo.rollout_correction not in ("auto", "none"):
        raise UserError(
            f"--old_log_probs engine already takes the engine's log-probs as the behaviour policy: "
            f"--rollout_correction {algo.rollout_correction} has nothing left to correct, drop it"
        )


def check_unread_settings(config: PPOConfig) -> None:
    """A setting that the chosen function does not take would change nothing, so it is refused."""
    flags, values = flags_of(type(config)), values_of(config)
    for selector in ("policy_loss", "rollout_correction"):
        chosen = "tis" if values[selector] == "auto" else values[selector]
        takes = {
            name: flags[selector].registered().parameters(name) for name in flags[selector].choices if name != "auto"
        }
        for setting in values:
            readers = [name for name, parameters in takes.items() if setting in parameters]
            if readers and chosen not in readers and values[setting] != flags[setting].default:
                raise UserError(f"--{setting} is not read by --{selector} {chosen}, only by {', '.join(readers)}")


# A setting on the left changes nothing unless the flag on the right is given.
NEEDS = {
    "kl_horizon": "kl_target",
    "ema_beta": "enable_ema",
    **dict.fromkeys(("pretrain_data_probs", "pretrain_split", "pretrain_key", "ptx_coef"), "pretrain_data"),
    "overlong_penalty_factor": "overlong_buffer_len",
    **dict.fromkeys(("eval_split", "eval_temperature", "eval_n_samples_per_prompt", "eval_on_start"), "eval_dataset"),
    "dynamic_filtering_range": "dynamic_filtering",
    "dynamic_filtering_max_draws": "dynamic_filtering",
    "gradient_checkpointing_use_reentrant": "gradient_checkpointing",
    "allow_config_change": "load_checkpoint",
    **dict.fromkeys(("lora_alpha", "lora_dropout", "target_modules", "load_in_4bit", "share_backbone"), "lora_rank"),
}


POLYNOMIAL_END = 1e-7  # the learning rate of transformers' schedule


def check_needs(config: Any, needs: Mapping[str, str] = NEEDS) -> None:
    flags, values = flags_of(type(config)), values_of(config)
    for setting, needed in needs.items():
        if setting in flags and values[setting] != flags[setting].default and not values[needed]:
            raise UserError(f"--{setting} changes nothing without --{needed}; give both or neither")
    if values["min_lr_ratio"] != flags["min_lr_ratio"].default and "min_lr" not in values["lr_scheduler"]:
        raise UserError(
            f"--min_lr_ratio changes nothing with --lr_scheduler {values['lr_scheduler']}; drop one of them"
        )
    for name in ("actor_learning_rate", "critic_learning_rate", "learning_rate"):
        rate = values.get(name, 1.0)
        if values["lr_scheduler"] == "polynomial" and rate <= POLYNOMIAL_END:
            raise UserError(
                f"--lr_scheduler polynomial ends at {POLYNOMIAL_END:g}: --{name} must be above that, got {rate:g}"
            )


def check_template(config: Any) -> None:
    if config.data.input_template is not None and config.data.apply_chat_template:
        raise UserError("--input_template and --apply_chat_template both shape the prompt; give one of them")
    check_chat_template(config)


def check_chat_template(config: Any) -> None:
    if config.model.tokenizer_chat_template is not None and not config.data.apply_chat_template:
        raise UserError("--tokenizer_chat_template does nothing without --apply_chat_template; give both or neither")


def check_hardware(config: Any) -> None:
    deepspeed, model = config.deepspeed, config.model
    if deepspeed.adam_offload and deepspeed.zero_stage == 0:
        raise UserError("--adam_offload needs --zero_stage 1, 2 or 3, got 0")
    if config.lora.load_in_4bit and deepspeed.zero_stage == 3:
        raise UserError("--load_in_4bit with --zero_stage 3: packed weights are not sharded; take --zero_stage 2")
    if deepspeed.zpg > 1 and deepspeed.zero_stage != 3:
        raise UserError(f"--zpg {deepspeed.zpg} partitions ZeRO-3 weights: it needs --zero_stage 3")
    if model.attention == "flash_attention_2" and model.bf16 is False:
        raise UserError("--attention flash_attention_2 (--flash_attn) computes in bfloat16 only; drop it or --no_bf16")


def check_share_backbone(config: PPOConfig) -> None:
    """What is held once has one place and one ZeRO stage."""
    if not config.share_backbone:
        return
    if not config.needs_critic and not config.reward.models:
        raise UserError("--share_backbone: there is neither a critic nor a --reward_pretrain to share with; drop it")
    for name in ("critic_zero_stage", "ref_reward_zero_stage", "ref_reward_offload"):
        if getattr(config.deepspeed, name) != flags_of(type(config))[name].default:
            raise UserError(f"--{name} is for models of their own, and --share_backbone has one for all; drop it")


def check_role_stages(config: PPOConfig) -> None:
    deepspeed = config.deepspeed
    stage, offload = (
        name if getattr(deepspeed, name) is not None else name.removeprefix("critic_")
        for name in ("critic_zero_stage", "critic_adam_offload")
    )
    if getattr(deepspeed, offload) and getattr(deepspeed, stage) == 0:
        raise UserError(f"--{offload} needs --{stage} 1, 2 or 3, got 0")
    if config.lora.load_in_4bit and deepspeed.critic_zero_stage == 3:
        raise UserError("--load_in_4bit with --critic_zero_stage 3: packed weights are not sharded; take 2")


def check_anomaly(config: PPOConfig) -> None:
    saves = config.checkpoint.save_steps > 0 and not config.checkpoint.disable_ds_ckpt
    if config.anomaly.on_anomaly == "rollback" and not saves:
        raise UserError(
            "--on_anomaly rollback goes back to a checkpoint: give --save_steps, and leave --disable_ds_ckpt out"
        )


def check_evaluation(config: PPOConfig) -> None:
    evaluation = config.eval
    evaluates = evaluation.eval_steps > 0 or evaluation.eval_on_start
    if evaluation.eval_dataset is None and evaluates:
        raise UserError("--eval_steps evaluates on held-out prompts: give --eval_dataset, or leave --eval_steps out")
    if evaluation.eval_dataset is not None and not evaluates:
        raise UserError("--eval_dataset is read every --eval_steps steps: give --eval_steps too")
    if evaluation.eval_temperature == 0 and evaluation.eval_n_samples_per_prompt > 1:
        raise UserError(
            f"--eval_temperature 0 gives the same response {evaluation.eval_n_samples_per_prompt} times: "
            "add --eval_n_samples_per_prompt 1"
        )
