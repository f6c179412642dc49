"""The config of cli/train_ppo.py."""

from dataclasses import dataclass, field

from spmdrl.config import checks, preflight
from spmdrl.config.flags import flags_of
from spmdrl.config.sections import (
    AlgoConfig,
    AnomalyConfig,
    CheckpointConfig,
    CriticConfig,
    DeepSpeedConfig,
    EvalConfig,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    PromptDataConfig,
    PtxConfig,
    RewardConfig,
    RolloutConfig,
    StoppingConfig,
    TrackingConfig,
)


@dataclass(frozen=True, kw_only=True)
class PPOConfig:
    """Train a causal LM by reinforcement learning. The same flags start one rank with python and many with torchrun,
    deepspeed or srun."""

    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    data: PromptDataConfig = field(default_factory=PromptDataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    ptx: PtxConfig = field(default_factory=PtxConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    deepspeed: DeepSpeedConfig = field(default_factory=DeepSpeedConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    anomaly: AnomalyConfig = field(default_factory=AnomalyConfig)
    stopping: StoppingConfig = field(default_factory=StoppingConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    share_backbone: bool = False
    """Policy, critic and reward models are adapters (--lora_rank) and heads on one frozen --pretrain, which is held
    once and is the reference model. --critic_pretrain (unless it is --pretrain) and --reward_pretrain are adapters."""
    seed: int = 42
    """Seed of data order, sampling and initialisation."""
    full_determinism: bool = False
    """Ask torch for deterministic kernels; slower."""

    def __post_init__(self) -> None:
        checks.check_flags(self)

    def validate(self, world_size: int) -> None:
        """Raise UserError where what the flags name does not exist or does not fit this many ranks."""
        preflight.check_surroundings(self, world_size)

    @property
    def max_total_len(self) -> int:
        """Most tokens of prompt and response together."""
        return self.rollout.max_len or self.data.prompt_max_len + self.rollout.generate_max_len

    @property
    def samples_per_step(self) -> int:
        return self.rollout.rollout_batch_size * self.rollout.n_samples_per_prompt

    @property
    def needs_critic(self) -> bool:
        registry = flags_of(type(self))["advantage_estimator"].registered()
        return bool(registry.properties(self.algo.advantage_estimator).get("needs_critic"))

    def correction_for(self, engine_is_trainer: bool) -> str:
        """--rollout_correction with auto resolved: tis, or none where there is nothing it could correct rightly.

        engine_is_trainer: the engine samples from the trainer's own forward, so that both agree.
        """
        algo = self.algo
        if algo.rollout_correction != "auto":
            return algo.rollout_correction
        return "none" if engine_is_trainer or self.rollout.is_cut or algo.old_log_probs == "engine" else "tis"
