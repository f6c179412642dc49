"""What may change between a run and the one that resumes it."""

from collections.abc import Iterable, Mapping
from typing import Any

# Flags of what an evaluation measures.
EVALUATION = {"eval_dataset", "eval_split", "eval_temperature", "eval_n_samples_per_prompt"}
# Flags that change nothing about what is learned, or no more than rounding does, as other micro-batches or ranks do.
HARMLESS = {
    # where output goes and how often
    *("save_path", "output_path", "logging_steps"),
    *("use_wandb", "wandb_org", "wandb_group", "wandb_project", "wandb_run_name"),
    *("use_tensorboard", "save_value_network"),
    *("save_steps", "save_dtype", "save_hf_ckpt", "disable_ds_ckpt", "ckpt_path", "max_ckpt_num", "max_ckpt_mem"),
    *("eval_steps", "eval_on_start", *EVALUATION),
    # where tensors lie and how work is cut up
    *("zero_stage", "critic_zero_stage", "ref_reward_zero_stage", "zpg", "overlap_comm"),
    *("adam_offload", "critic_adam_offload", "ref_reward_offload", "teacher_offload"),
    *("micro_train_batch_size", "micro_rollout_batch_size", "sync_bucket_mb", "packing_samples"),
    *("gradient_checkpointing", "gradient_checkpointing_use_reentrant", "attention", "full_determinism"),
    *("vllm_tensor_parallel_size", "vllm_gpu_memory_utilization", "vllm_kv_cache_gb", "vllm_enable_sleep"),
    *("enable_prefix_caching", "enforce_eager", "verify_weight_sync", "remote_rm_timeout"),
    # what only guards the run, or is set by launchers
    *("phase_timeout", "time_limit_margin_s", "anomaly_ignore", "trust_remote_code"),
    *("on_anomaly", "anomaly_spike_factor", "anomaly_min_entropy"),
}
UNMENTIONED = {"load_checkpoint", "allow_config_change", "local_rank"}
# A schedule over a fixed number of steps changes with the number of steps.
LENGTHS = {"num_episodes"}
# Harmless ones, of which a run that is finished has done what they were and not what they are now.
OUTCOME = {*LENGTHS, "save_value_network", "save_dtype"}
OPEN_ENDED_SCHEDULES = {"constant"}


def compare(saved: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """What differs between two descriptions of a run, as (changes that alter what is learned, harmless ones).

    A description has `program`, the name of the config's class, `flags`, name → value, and `contents`, name of a flag
    → fingerprint of what it names. A flag with a fingerprint on both sides is compared by that and may have moved; one
    that only one side knows is of another version and not compared.
    """
    if saved["program"] != now["program"]:
        return [f"it is of another program, whose flags are a {saved['program']}"], []
    contents = saved["contents"].keys() & now["contents"].keys()
    refused = [
        f"--{name} has other contents" for name in sorted(contents) if saved["contents"][name] != now["contents"][name]
    ]
    accepted = []
    for name, value, other in _differing(saved["flags"], now["flags"]):
        if name in contents:
            continue
        is_harmless = name in HARMLESS or (name in LENGTHS and _is_open_ended(saved["flags"], now["flags"]))
        (accepted if is_harmless else refused).append(f"--{name} {_shown(value)} -> {_shown(other)}")
    return refused, accepted


def asks_for_more(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What a run that is finished, `saved`, has not done of what it would do now."""
    refused, _ = compare(saved, now)
    if refused:
        return refused
    differing = _differing(saved["flags"], now["flags"])
    return [f"--{name} {_shown(value)} -> {_shown(other)}" for name, value, other in differing if name in OUTCOME]


def judges_otherwise(saved: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether the evaluations of two runs, given by their descriptions, cannot be compared."""
    return any(name in EVALUATION for name, _, _ in _differing(saved["flags"], now["flags"]))


def _differing(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterable[tuple[str, Any, Any]]:
    for name in now:
        if name in saved and saved[name] != now[name] and name not in UNMENTIONED:
            yield name, saved[name], now[name]


def _is_open_ended(*sides: Mapping[str, Any]) -> bool:
    return all(flags.get("lr_scheduler") in OPEN_ENDED_SCHEDULES for flags in sides)


def _shown(value: Any) -> str:
    return (" ".join(map(str, value)) or "none") if isinstance(value, list) else str(value)
