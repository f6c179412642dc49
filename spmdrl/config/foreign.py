"""Flags of OpenRLHF's scripts and of train_ppo.py's Ray twin that are no flags here, each with what to do instead."""

from dataclasses import dataclass

_PLACEMENT = (
    "every rank holds a shard of every model; choose the ranks with the launcher (torchrun --nproc_per_node N)"
)
_RING = "a sequence stays on one rank; shorten --prompt_max_len or --generate_max_len"

# Not supported yet: the flag means something here, and code for it is still to come.
NOT_YET: dict[str, str] = {
    "torch_compile": "models run uncompiled; drop it",
    "use_liger_kernel": "the LM head already runs in chunks; drop it",
    "aux_loss_coef": "mixture-of-experts models train without a balancing loss; drop it",
    "packing_samples": "samples are padded per micro-batch; drop it",
    "ring_attn_size": _RING,
    "ring_head_stride": _RING,
    "use_ms": "download model and data from ModelScope first and give their paths",
}

# Never: placement of a Ray cluster, and switches of what is always so here.
REFUSED: dict[str, str] = {
    **{
        f"{role}_{what}": _PLACEMENT
        for role in ("actor", "critic", "ref", "reward")
        for what in ("num_nodes", "num_gpus_per_node")
    },
    "colocate_all_models": "always so here; drop it",
    "colocate_actor_ref": "always so here; drop it",
    "colocate_critic_reward": "always so here; drop it",
    "vllm_num_engines": "every --vllm_tensor_parallel_size ranks share one engine in their own processes; drop it",
    "vllm_sync_backend": "weights reach the engine inside the process; drop it",
    "vllm_sync_with_ray": "weights reach the engine inside the process, without Ray; drop it",
    "deepspeed_enable_sleep": "--vllm_enable_sleep covers both sides; use that",
    "actor_init_on_gpu": "where weights are first loaded follows from the device and --zero_stage; drop it",
    "perf": "seconds and tokens/s of each phase are always logged; drop it",
}

# Another spelling of a flag here, with the value it stands for.
ACCEPTED_ALIASES: dict[str, tuple[str, str]] = {"flash_attn": ("attention", "flash_attention_2")}

# What TRL and verl call a flag here; named in the error of an unknown flag.
OTHER_NAMES: dict[str, str] = {
    "model_name_or_path": "pretrain",
    "dataset_name": "prompt_data",
    "num_generations": "n_samples_per_prompt",
    "max_completion_length": "generate_max_len",
    "max_prompt_length": "prompt_max_len",
    "learning_rate": "actor_learning_rate",
    "per_device_train_batch_size": "micro_train_batch_size",
    "num_train_epochs": "num_episodes",
    "num_iterations": "max_epochs",
    "beta": "init_kl_coef",
    "epsilon": "eps_clip",
    "epsilon_high": "eps_clip_low_high",
    "loss_type": "loss_aggregation",
    "max_grad_norm": "max_norm",
    "weight_decay": "l2",
    "output_dir": "save_path",
    "report_to": "use_wandb",
    "mask_truncated_completions": "mask_truncated",
    "attn_implementation": "attention",
}


@dataclass(frozen=True)
class Foreign:
    """What a config class has instead of the flags that it does not have."""

    not_yet: dict[str, str]
    refused: dict[str, str]
    other_names: dict[str, str]


PPO = Foreign(NOT_YET, REFUSED, OTHER_NAMES)

_SHARED_NAMES = ("torch_compile", "use_liger_kernel", "aux_loss_coef", "use_ms")
SUPERVISED = Foreign(
    not_yet={
        **{name: NOT_YET[name] for name in NOT_YET if name in _SHARED_NAMES},
        **dict.fromkeys(("ring_attn_size", "ring_head_stride"), "a sequence stays on one rank; shorten --max_len"),
    },
    refused={
        "compute_fp32_loss": "scores and losses are always fp32; drop it",
        "ref_offload": "the reference model scores all rows before training and is then freed; drop it",
    },
    other_names={
        "model_name_or_path": "pretrain",
        "dataset_name": "dataset",
        "max_length": "max_len",
        "max_seq_length": "max_len",
        "per_device_train_batch_size": "micro_train_batch_size",
        "num_train_epochs": "max_epochs",
        "packing": "packing_samples",
        "max_grad_norm": "max_norm",
        "weight_decay": "l2",
        "output_dir": "save_path",
        "report_to": "use_wandb",
        "attn_implementation": "attention",
    },
)
