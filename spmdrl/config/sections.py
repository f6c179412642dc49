"""Every flag of `cli/train_ppo.py`: field name = flag name, its type, default and, below it, its help.

One frozen dataclass per reader, so that a component is handed its own section and nothing else. Checks of one flag
against another are in checks.py; this file only declares. Settings of a function in spmdrl/algos have the name of its
keyword-only parameter.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from spmdrl.config.registry import Registry


@dataclass(frozen=True, kw_only=True)
class LoadConfig:
    """Model and tokenizer."""

    pretrain: str | None = None
    """Model: a Hugging Face directory or hub name."""
    bf16: bool | None = None
    """Compute in bfloat16. Left out: bfloat16 where the device computes in it, otherwise fp32."""
    attention: Literal["auto", "flash_attention_2", "sdpa", "eager"] = "auto"
    """Attention kernel; auto takes flash_attention_2 where installed, otherwise sdpa."""
    trust_remote_code: bool = False
    """Run model code that a checkpoint brings along."""
    disable_fast_tokenizer: bool = False
    """Use the slow (Python) tokenizer."""
    tokenizer_chat_template: str | None = None
    """Chat template (Jinja text, or a file with it) that replaces the tokenizer's own."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig(LoadConfig):
    """Model and tokenizer."""

    pretrain: str | None = None
    """Policy to start from: a Hugging Face directory or hub name. The reference model is a frozen copy of it."""
    bf16: bool | None = None
    """Train and score in bfloat16. Left out: bfloat16 where the device computes in it, otherwise fp32."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more compute."""
    gradient_checkpointing_use_reentrant: bool = False
    """Use torch's older reentrant checkpointing."""


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """LoRA: train small matrices beside frozen weights, of the policy and of the critic."""

    lora_rank: int = 0
    """Rank of the trainable matrices; 0 trains all weights. The reference model is then the frozen weights alone."""
    lora_alpha: int = 16
    """What the matrices add is multiplied by this / --lora_rank."""
    lora_dropout: float = 0.0
    """Dropout in front of the matrices while they train; the policy ratio is noisy with it."""
    target_modules: tuple[str, ...] = ("all-linear",)
    """Names of the linear layers that get matrices, such as q_proj v_proj; all-linear is all but the head."""
    load_in_4bit: bool = False
    """Keep the frozen weights of what is trained in 4 bits (QLoRA); needs a GPU and bitsandbytes."""


@dataclass(frozen=True, kw_only=True)
class PromptDataConfig:
    """Prompts."""

    prompt_data: str | None = None
    """Prompts: .jsonl, .json, .parquet, .csv, a save_to_disk directory or a hub name; several separated by commas."""
    prompt_data_probs: str = "1.0"
    """Sampling probability of each source of --prompt_data, separated by commas."""
    prompt_split: str = "train"
    """Split to read where a source has several."""
    input_key: str = "input"
    """Column with the prompt: text, a list of messages, or that list as JSON."""
    label_key: str | None = None
    """Column handed to the reward function as labels, unchanged."""
    input_template: str | None = None
    """Text around each prompt, with {} where the prompt goes, such as 'User: {} Assistant: '."""
    apply_chat_template: bool = False
    """Render prompts with the tokenizer's chat template."""
    prompt_max_len: int = 1024
    """Prompts of more tokens than this are left out and counted."""
    max_samples: int = 1_000_000
    """Use at most this many prompts."""


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Rollout: sampling responses."""

    engine: Literal["auto", "vllm", "hf"] = "auto"
    """What samples: vLLM inside this process or Hugging Face generate; auto takes vLLM where installed."""
    rollout_batch_size: int = 512
    """Prompts of one step, over all ranks."""
    n_samples_per_prompt: int = 1
    """Responses sampled for each prompt; they form the group of the group estimators."""
    micro_rollout_batch_size: int = 8
    """Samples of one scoring forward (log-probs, reference, values, reward model), per rank, and of one request to a
    reward server."""
    generate_max_len: int = 1024
    """Most tokens of one response; longer ones are cut and counted as truncated."""
    generate_min_len: int = 1
    """Fewest tokens of one response."""
    max_len: int | None = None
    """Most tokens of prompt and response together; left out: --prompt_max_len + --generate_max_len."""
    temperature: float = 1.0
    """Sampling temperature; the trainer's log-probs use the same one."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens with this much probability; below 1 biases the policy ratio."""
    top_k: int = -1
    """Sample from the k most likely tokens; -1 is all of them."""
    stop: tuple[str, ...] = ()
    """Strings that end a response, such as --stop '</answer>' 'User:'."""
    vllm_tensor_parallel_size: int = 1
    """Ranks that share one vLLM engine."""
    vllm_gpu_memory_utilization: float = 0.9
    """Share of the device's memory that vLLM may take while it is awake."""
    vllm_kv_cache_gb: int | None = None
    """KV cache of each engine in GiB on machines without a GPU (vLLM's VLLM_CPU_KVCACHE_SPACE)."""
    vllm_enable_sleep: bool = False
    """Put the engine to sleep while training, so that its memory is free."""
    enable_prefix_caching: bool = False
    """Let vLLM share the KV cache of equal prompt beginnings; reset after each weight sync."""
    enforce_eager: bool = False
    """Run vLLM without CUDA graphs: faster start, slower sampling."""
    sync_bucket_mb: int = 512
    """Weights go to the engine in buckets of at most this many MiB."""
    verify_weight_sync: bool = False
    """After each sync compare the engine's log-probs with the trainer's on a probe, and stop if they disagree."""

    @property
    def is_cut(self) -> bool:
        """Whether tokens are sampled from less than the whole distribution."""
        return self.top_p < 1 or self.top_k > 0


@dataclass(frozen=True, kw_only=True)
class AlgoConfig:
    """Algorithm: advantages, loss, KL."""

    advantage_estimator: Annotated[str, Registry("advantages.py", "ESTIMATORS")] = "gae"
    """How advantages are estimated."""
    gamma: float = 1.0
    """Discount of later token rewards."""
    lambd: float = 0.95
    """GAE's lambda: 1 is low bias, less is low variance."""
    no_advantage_std_norm: bool = False
    """Centre whitened advantages without dividing by their standard deviation."""
    policy_loss: Annotated[str, Registry("losses.py", "POLICY_LOSSES")] = "ppo"
    """Policy loss."""
    loss_aggregation: Annotated[str, Registry("losses.py", "AGGREGATIONS", extra=("auto",))] = "auto"
    """How token losses become one number, by counts of the whole optimizer step; auto is what the paper of the
    --policy_loss states, token-mean for ppo."""
    eps_clip: float = 0.2
    """The policy ratio is clipped to 1 - eps_clip .. 1 + eps_clip."""
    eps_clip_low_high: tuple[float, float] | None = None
    """Different clip widths below and above 1 (clip-higher), such as 0.2 0.28; replaces --eps_clip."""
    dual_clip: float | None = None
    """Bound on the ratio where the advantage is negative (dual clip), more than 1."""
    sapo_tau_pos: float = 1.0
    """SAPO's temperature where the advantage is positive."""
    sapo_tau_neg: float = 1.05
    """SAPO's temperature where the advantage is negative."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus; at 0 entropy is logged only."""
    init_kl_coef: float = 0.01
    """Weight of the KL to the reference model; at 0 there is no reference model."""
    kl_estimator: Annotated[str, Registry("kl.py", "KL_ESTIMATORS")] = "k1"
    """Estimator of the KL."""
    use_kl_loss: bool = False
    """Put the KL in the loss instead of in the reward."""
    kl_target: float | None = None
    """Adapt the KL weight so that the KL stays near this value."""
    kl_horizon: int = 10_000
    """Samples over which --kl_target adapts the KL weight."""
    old_log_probs: Literal["trainer", "engine"] = "trainer"
    """Where the behaviour policy's log-probs come from: the trainer's own forward, or the engine's samples."""
    rollout_correction: Annotated[str, Registry("corrections.py", "CORRECTIONS", extra=("auto",))] = "auto"
    """Weights against engine and trainer disagreeing on the probability of a token; auto is tis with vLLM and none
    with hf, which samples from the trainer's own forward, or where --top_p or --top_k cut the distribution."""
    rollout_correction_range: tuple[float, float] | None = None
    """Range of the ratio of trainer to engine probability that --rollout_correction keeps; left out: that of the
    correction, 0 2 for tis."""
    rollout_token_cap: float | None = 2.0
    """Largest token weight of seq-mask-tis; None for no cap."""
    reward_clip_range: tuple[float, float] = (-10.0, 10.0)
    """Rewards are clipped to this range before the KL enters."""
    mask_truncated: bool = False
    """Leave truncated samples out of the loss."""
    overlong_buffer_len: int | None = None
    """DAPO's penalty for long responses starts this many tokens before --generate_max_len."""
    overlong_penalty_factor: float = 1.0
    """Largest overlong penalty."""
    stop_properly_penalty_coef: float | None = None
    """Multiply the reward of truncated samples by this."""
    dynamic_filtering: bool = False
    """Drop groups whose mean reward is not inside --dynamic_filtering_range and draw more prompts in their place."""
    dynamic_filtering_range: tuple[float, float] = (0.0, 1.0)
    """Open range of group mean rewards that --dynamic_filtering keeps."""
    dynamic_filtering_max_draws: int = 10
    """Rollouts that --dynamic_filtering may draw for one step before it gives up with a message."""


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """Critic, for --advantage_estimator gae."""

    critic_pretrain: str | None = None
    """Critic to start from, a causal LM with or without a scalar head; left out: --pretrain."""
    value_head_prefix: str = "score"
    """Name of the critic's head in its checkpoint; score, value_head and v_head are found too."""
    critic_learning_rate: float = 9e-6
    """Peak learning rate of the critic."""
    value_clip: float | None = 0.2
    """Values are clipped to this far from those at collection; None for no clip."""
    freezing_actor_steps: int = -1
    """The critic trains alone for this many steps."""
    save_value_network: bool = False
    """Save the critic too, in --save_path/critic."""


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """Reward: at least one of the first three; what several give is added up."""

    reward_pretrain: str | None = None
    """Reward model: a checkpoint with a scalar head, directory or hub name; several separated by commas."""
    remote_rm_url: str | None = None
    """Reward server, http://host:port/path; samples are dealt to several separated by commas. Or a Python file that
    defines reward_func(queries, prompts, labels, **columns)."""
    reward_func: tuple[str, ...] = ()
    """The same with the function's name: path.py:name, one or several."""
    reward_weights: tuple[float, ...] = ()
    """Weight of each model of --reward_pretrain, then of --remote_rm_url, then of each function; left out: 1."""
    remote_rm_timeout: float = 600.0
    """Seconds that reward servers may take for the samples of one step, tries and waits included."""
    normalize_reward: bool = False
    """Subtract a mean and divide by a standard deviation, before penalties: those that a reward model has in its
    config, for its scores; for any other reward those of all rewards so far."""

    @property
    def models(self) -> tuple[str, ...]:
        return _split(self.reward_pretrain)

    @property
    def servers(self) -> tuple[str, ...]:
        return tuple(url for url in _split(self.remote_rm_url) if "://" in url)

    @property
    def functions(self) -> tuple[str, ...]:
        """Of both flags, path.py or path.py:name."""
        remote = self.remote_rm_url if self.remote_rm_url and not self.servers else None
        return ((remote,) if remote else ()) + self.reward_func

    @property
    def num_sources(self) -> int:
        """Models, functions, and all servers as one."""
        return len(self.models) + bool(self.servers) + len(self.functions)


def _split(names: str | None) -> tuple[str, ...]:
    return tuple(name.strip() for name in (names or "").split(",") if name.strip())


@dataclass(frozen=True, kw_only=True)
class PtxConfig:
    """Texts whose language-model loss is mixed into the policy's."""

    pretrain_data: str | None = None
    """Texts, as many in each optimizer step as samples; same kinds of sources as --prompt_data."""
    pretrain_data_probs: str = "1.0"
    """Sampling probability of each source of --pretrain_data, separated by commas."""
    pretrain_split: str = "train"
    """Split to read where a source has several."""
    pretrain_key: str | None = None
    """Column with the text; left out: --input_key."""
    ptx_coef: float = 0.05
    """Weight of the language-model loss."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimisation."""

    train_batch_size: int = 128
    """Samples of one optimizer step, over all ranks."""
    micro_train_batch_size: int = 4
    """Samples of one forward and backward, per rank."""
    max_epochs: int = 1
    """Passes over the samples of one rollout."""
    lr_scheduler: Literal[
        "cosine_with_min_lr",
        "cosine_warmup_with_min_lr",
        "cosine",
        "cosine_with_restarts",
        "linear",
        "polynomial",
        "constant",
        "constant_with_warmup",
        "inverse_sqrt",
    ] = "cosine_with_min_lr"
    """Learning-rate schedule, by its name in transformers; those that need more settings are left out."""
    lr_warmup_ratio: float = 0.03
    """Share of all optimizer steps over which the learning rate rises."""
    min_lr_ratio: float = 0.1
    """Where the two schedules with_min_lr end, as a share of the peak."""
    max_norm: float = 1.0
    """Gradients are clipped to this norm."""
    l2: float = 0.0
    """Weight decay."""
    adam_betas: tuple[float, float] = (0.9, 0.95)
    """Adam's two decay rates."""


@dataclass(frozen=True, kw_only=True)
class OptimConfig(OptimizerConfig):
    """Optimisation."""

    num_episodes: int = 1
    """Passes over the prompts."""
    actor_learning_rate: float = 1e-6
    """Peak learning rate of the policy."""
    enable_ema: bool = False
    """Keep a moving average of the policy's weights too, in fp32 in host memory, and save it in --save_path/ema."""
    ema_beta: float = 0.992
    """Share of the moving average that stays at each optimizer step; the rest comes from the new weights."""


@dataclass(frozen=True, kw_only=True)
class ZeroConfig:
    """DeepSpeed."""

    local_rank: int = -1
    """Set by the deepspeed launcher."""
    zero_stage: int = 2
    """0 replicates, 1 shards optimizer states, 2 gradients too, 3 weights too."""
    adam_offload: bool = False
    """Keep optimizer states and their update in host memory."""
    zpg: int = 1
    """ZeRO++ secondary weight partition: ranks that share one (usually those of a node); 1 is off."""
    overlap_comm: bool = False
    """Overlap gradient reduction with the backward pass."""
    grad_accum_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Number format in which gradients are accumulated; left out: DeepSpeed's choice."""


@dataclass(frozen=True, kw_only=True)
class DeepSpeedConfig(ZeroConfig):
    """DeepSpeed."""

    critic_zero_stage: int | None = None
    """ZeRO stage of the critic; left out: --zero_stage."""
    critic_adam_offload: bool | None = None
    """--adam_offload of the critic; left out: as --adam_offload says."""
    ref_reward_zero_stage: int | None = None
    """ZeRO stage of reference and reward models: with 3 each rank holds a share, else all; left out: --zero_stage."""
    ref_reward_offload: bool = False
    """Keep reference and reward models in host memory while they are not scoring."""


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluation on held-out prompts, rewarded as the training prompts are."""

    eval_steps: int = -1
    """Evaluate every this many steps and after the last one; -1: never."""
    eval_dataset: str | None = None
    """Held-out prompts, in the columns of --prompt_data; several sources separated by commas follow one another."""
    eval_split: str = "test"
    """Split to read where a source has several."""
    eval_temperature: float = 0.6
    """Sampling temperature of the evaluation; 0 takes the most likely token."""
    eval_n_samples_per_prompt: int = 4
    """Responses to each held-out prompt; eval/pass@N is the mean of the best reward of the N."""
    eval_on_start: bool = False
    """Evaluate before the first step too, as step 0."""


AnomalyKind = Literal["nonfinite", "grad_spike", "kl_spike", "entropy_collapse", "all_truncated", "all_flat"]


@dataclass(frozen=True, kw_only=True)
class AnomalyConfig:
    """Guardrails: what happens when training goes wrong. Each case is counted as anomaly/..."""

    on_anomaly: Literal["auto", "warn", "skip", "stop", "rollback"] = "auto"
    """warn: one line. skip: leave the optimizer step, or the rollout, out. stop: save and end. rollback: go on from
    the newest checkpoint with other samples. auto: stop at NaN and infinities, warn of the rest. Weights never take a
    step that is not finite."""
    anomaly_ignore: tuple[AnomalyKind, ...] = ()
    """Cases that are only counted."""
    anomaly_spike_factor: float = 10.0
    """A gradient norm or KL is a spike above this many times the median of the last 50; norms that are not clipped and
    a KL below 0.1 never are."""
    anomaly_min_entropy: float = 1e-3
    """Entropy per sampled token, in nats, below which the policy has collapsed."""


@dataclass(frozen=True, kw_only=True)
class TrackingConfig:
    """Logging."""

    logging_steps: int = 1
    """Log every this many steps."""
    use_wandb: str | None = field(default=None, repr=False, metadata={"public": ("true", "1", "offline")})
    """Log to Weights & Biases: True where an API key is configured, offline, or the key, which is never saved."""
    wandb_org: str | None = None
    """W&B entity."""
    wandb_group: str | None = None
    """W&B group."""
    wandb_project: str = "spmdrl_train_ppo"
    """W&B project."""
    wandb_run_name: str | None = None
    """W&B run name; left out: the program, such as ppo, and the date."""
    use_tensorboard: str | None = None
    """Directory for TensorBoard logs."""


@dataclass(frozen=True, kw_only=True)
class StoppingConfig:
    """Time limits."""

    phase_timeout: int = 1800
    """Seconds without progress on any rank after which the run ends and shows where each rank is; 0 never."""
    time_limit_margin_s: int = 120
    """Save and stop this many seconds before the job's end, where SLURM_JOB_END_TIME tells it, but no earlier than at
    three quarters of its time; 0 not at all."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Output."""

    save_path: str = "./ckpt"
    """Directory for the trained model, metrics, samples and the resolved config."""
    save_steps: int = -1
    """Save a checkpoint every this many steps; -1: only when the run is asked to stop. It goes on with
    --load_checkpoint, on another number of ranks or under another --zero_stage too."""
    save_dtype: Literal["auto", "fp32"] = "auto"
    """Of saved models. auto: what was computed in. fp32: twice the size of bf16, with the optimizer's own weights,
    which hold updates that are too small for bf16; small learning rates and short runs make such."""
    save_hf_ckpt: bool = False
    """Save the model in Hugging Face form too, in the checkpoint's folder hf."""
    disable_ds_ckpt: bool = False
    """Of --save_steps, save only the model in Hugging Face form, which nothing can go on from."""
    ckpt_path: str = "./ckpt/checkpoints_ppo"
    """Directory of the checkpoints; all nodes must see it."""
    max_ckpt_num: int = 3
    """Keep this many checkpoints of the run; older ones are removed once a newer one is whole."""
    max_ckpt_mem: int = 100_000_000
    """Keep at most this many GB of checkpoints of the run, and always the newest."""
    load_checkpoint: bool = False
    """Go on from the newest whole checkpoint in --ckpt_path; without one, start from the beginning."""
    allow_config_change: bool = False
    """Go on with --load_checkpoint although flags, data or models have changed in a way that changes the result."""
