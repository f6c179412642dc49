"""The configs of the supervised trainers: cli/train_{sft,rm,dpo,kto,kd}.py, each put together from shared sections.

Defaults of a section that a config changes are those of OpenRLHF's script of the same name.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Literal

from spmdrl.config import supervised_checks as checks
from spmdrl.config.foreign import SUPERVISED, Foreign
from spmdrl.config.sections import (
    CheckpointConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    StoppingConfig,
    TrackingConfig,
    ZeroConfig,
)

DIALOGUE = "User: {}\nAssistant: "


# ---- sections -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class DatasetConfig:
    """Data."""

    dataset: str | None = None
    """Rows: .jsonl, .json, .parquet, .csv, a save_to_disk directory or a hub name; several separated by commas."""
    dataset_probs: str = "1.0"
    """Sampling probability of each source of --dataset, separated by commas."""
    train_split: str = "train"
    """Split of --dataset to train on, where a source has several."""
    eval_dataset: str | None = None
    """Held-out rows, in the columns of --dataset; left out: --eval_split of --dataset, where it has one."""
    eval_split: str = "test"
    """Split to evaluate on, where a source has several."""
    max_samples: int = 100_000_000
    """Use at most this many rows of each."""
    max_len: int = 2048
    """Most tokens of a sequence; longer ones are cut, and counted."""
    input_template: str | None = None
    """Text around each prompt, with {} where the prompt goes, such as 'User: {} Assistant: '."""
    apply_chat_template: bool = False
    """Render rows with the tokenizer's chat template."""
    packing_samples: bool = False
    """Join the sequences of a micro-batch to one without padding, which do not see one another; for flash-attn."""


@dataclass(frozen=True, kw_only=True)
class TextDataConfig(DatasetConfig):
    """Data."""

    input_template: str | None = DIALOGUE
    """Text around each prompt, with {} where the prompt goes; not used with --apply_chat_template, --pretrain_mode."""
    input_key: str = "input"
    """Column with the prompt or the whole text: text, a list of messages, or that list as JSON."""
    output_key: str | None = None
    """Column with the response; left out: the whole of a message list, or a text as it is, is in --input_key."""
    multiturn: bool = False
    """Learn every assistant turn of a list of messages, not the last one only."""
    pretrain_mode: bool = False
    """Learn every token of a plain text, without a template."""


@dataclass(frozen=True, kw_only=True)
class PairDataConfig(DatasetConfig):
    """Data."""

    max_len: int = 512
    prompt_key: str | None = None
    """Column with the prompt; left out: what --chosen_key and --rejected_key have in common."""
    chosen_key: str = "chosen"
    """Column with the better response: text, or a list of messages with or without the prompt."""
    rejected_key: str = "rejected"
    """Column with the worse response."""


@dataclass(frozen=True, kw_only=True)
class LabelledDataConfig(DatasetConfig):
    """Data."""

    input_template: str | None = DIALOGUE
    """Text around each prompt, with {} where the prompt goes; not used with --apply_chat_template."""
    input_key: str = "input"
    """Column with the prompt, or with a list of messages that ends with the response."""
    output_key: str | None = None
    """Column with the response; left out: --input_key ends with it."""
    label_key: str = "label"
    """Column that says whether the response is wanted: true or false, 1 or 0."""


@dataclass(frozen=True, kw_only=True)
class SupervisedOptimConfig(OptimizerConfig):
    """Optimisation."""

    train_batch_size: int = 128
    """Rows of one optimizer step, over all ranks."""
    micro_train_batch_size: int = 8
    """Rows of one forward and backward, per rank."""
    max_epochs: int = 1
    """Passes over the rows."""
    learning_rate: float = 5e-6
    """Peak learning rate."""


@dataclass(frozen=True, kw_only=True)
class HeldOutConfig:
    """Evaluation on held-out rows."""

    eval_steps: int = -1
    """Evaluate every this many optimizer steps and at the end; -1: after every epoch."""
    eval_on_start: bool = False
    """Evaluate before the first step too, as step 0."""


@dataclass(frozen=True, kw_only=True)
class RewardLossConfig:
    """Reward model."""

    loss: Literal["sigmoid", "logexp"] = "sigmoid"
    """Loss of a pair, of the difference between its scores; the two are the same function of it."""
    margin_loss: bool = False
    """Ask for a difference of at least the row's `margin`, a number in that column."""
    value_head_prefix: str = "score"
    """Name of the head in the checkpoint; score, value_head and v_head are found too."""


@dataclass(frozen=True, kw_only=True)
class DPOLossConfig:
    """DPO."""

    beta: float = 0.1
    """Weight of the KL to the reference model: less lets the policy go further from it."""
    ipo: bool = False
    """IPO's squared loss instead of the sigmoid's."""
    label_smoothing: float = 0.0
    """Share of pairs whose labels may be wrong (cDPO)."""
    nll_loss_coef: float = 0.0
    """Weight of the language-model loss of the chosen responses."""
    ref_pretrain: str | None = None
    """Reference model; left out: --pretrain. It scores all rows once, before training, and is then freed."""


@dataclass(frozen=True, kw_only=True)
class KTOLossConfig:
    """KTO."""

    beta: float = 0.01
    """Weight of the KL to the reference model: less lets the policy go further from it."""
    desirable_loss_weight: float = 1.0
    """Weight of wanted responses."""
    undesirable_loss_weight: float = 1.0
    """Weight of unwanted responses."""
    ref_pretrain: str | None = None
    """Reference model; left out: --pretrain. It scores all rows once, before training, and is then freed."""


@dataclass(frozen=True, kw_only=True)
class DistillationConfig:
    """Distillation."""

    teacher_model: str | None = None
    """Model to learn from: a Hugging Face directory or hub name with the tokenizer of --pretrain."""
    kd_coef: float = 0.4
    """Weight of the KL to the teacher; the language-model loss has the rest to 1."""
    teacher_offload: bool = False
    """Keep the teacher in host memory, shard by shard under --zero_stage 3."""


# ---- configs --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class SupervisedConfig:
    """What the supervised trainers share."""

    foreign: ClassVar[Foreign] = SUPERVISED
    program: ClassVar[str]

    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    data: DatasetConfig = field(default_factory=DatasetConfig)
    optim: SupervisedOptimConfig = field(default_factory=SupervisedOptimConfig)
    deepspeed: ZeroConfig = field(default_factory=ZeroConfig)
    eval: HeldOutConfig = field(default_factory=HeldOutConfig)
    stopping: StoppingConfig = field(default_factory=StoppingConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    seed: int = 42
    """Seed of data order and initialisation."""
    full_determinism: bool = False
    """Ask torch for deterministic kernels; slower."""

    def __post_init__(self) -> None:
        checks.check_flags(self)

    def validate(self, world_size: int) -> None:
        """Raise UserError where what the flags name does not exist or does not fit this many ranks."""
        checks.check_surroundings(self, world_size)

    @property
    def other_models(self) -> dict[str, str | None]:
        """Checkpoints besides --pretrain, by flag."""
        return {}

    @property
    def offloads_frozen_models(self) -> bool:
        """Whether models that are not trained rest in host memory."""
        return False


@dataclass(frozen=True, kw_only=True)
class SFTConfig(SupervisedConfig):
    """Fine-tune a causal LM on responses or plain texts. The same flags start one rank with python and many with
    torchrun, deepspeed or srun."""

    program: ClassVar[str] = "sft"

    data: TextDataConfig = field(default_factory=TextDataConfig)
    optim: SupervisedOptimConfig = field(default_factory=partial(SupervisedOptimConfig, max_epochs=2))
    tracking: TrackingConfig = field(default_factory=partial(TrackingConfig, wandb_project="spmdrl_train_sft"))
    checkpoint: CheckpointConfig = field(default_factory=partial(CheckpointConfig, ckpt_path="./ckpt/checkpoints_sft"))


@dataclass(frozen=True, kw_only=True)
class RMConfig(SupervisedConfig):
    """Train a reward model on pairs of responses. The same flags start one rank with python and many with torchrun,
    deepspeed or srun."""

    program: ClassVar[str] = "rm"

    data: PairDataConfig = field(default_factory=PairDataConfig)
    reward: RewardLossConfig = field(default_factory=RewardLossConfig)
    optim: SupervisedOptimConfig = field(
        default_factory=partial(SupervisedOptimConfig, micro_train_batch_size=1, learning_rate=9e-6)
    )
    tracking: TrackingConfig = field(default_factory=partial(TrackingConfig, wandb_project="spmdrl_train_rm"))
    checkpoint: CheckpointConfig = field(default_factory=partial(CheckpointConfig, ckpt_path="./ckpt/checkpoints_rm"))


@dataclass(frozen=True, kw_only=True)
class DPOConfig(SupervisedConfig):
    """Train a causal LM on pairs of responses, without a reward model. The same flags start one rank with python and
    many with torchrun, deepspeed or srun."""

    program: ClassVar[str] = "dpo"

    data: PairDataConfig = field(default_factory=PairDataConfig)
    dpo: DPOLossConfig = field(default_factory=DPOLossConfig)
    optim: SupervisedOptimConfig = field(default_factory=partial(SupervisedOptimConfig, learning_rate=1e-5))
    tracking: TrackingConfig = field(default_factory=partial(TrackingConfig, wandb_project="spmdrl_train_dpo"))
    checkpoint: CheckpointConfig = field(default_factory=partial(CheckpointConfig, ckpt_path="./ckpt/checkpoints_dpo"))

    @property
    def other_models(self) -> dict[str, str | None]:
        return {"ref_pretrain": self.dpo.ref_pretrain}


@dataclass(frozen=True, kw_only=True)
class KTOConfig(SupervisedConfig):
    """Train a causal LM on responses that are labelled wanted or unwanted. The same flags start one rank with python
    and many with torchrun, deepspeed or srun."""

    program: ClassVar[str] = "kto"

    data: LabelledDataConfig = field(default_factory=LabelledDataConfig)
    kto: KTOLossConfig = field(default_factory=KTOLossConfig)
    optim: SupervisedOptimConfig = field(default_factory=partial(SupervisedOptimConfig, learning_rate=1e-5))
    tracking: TrackingConfig = field(default_factory=partial(TrackingConfig, wandb_project="spmdrl_train_kto"))
    checkpoint: CheckpointConfig = field(default_factory=partial(CheckpointConfig, ckpt_path="./ckpt/checkpoints_kto"))

    @property
    def other_models(self) -> dict[str, str | None]:
        return {"ref_pretrain": self.kto.ref_pretrain}


@dataclass(frozen=True, kw_only=True)
class KDConfig(SupervisedConfig):
    """Train a causal LM on responses and on what a teacher model says of each of their tokens. The same flags start
    one rank with python and many with torchrun, deepspeed or srun."""

    program: ClassVar[str] = "kd"

    data: TextDataConfig = field(default_factory=partial(TextDataConfig, output_key="output"))
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    tracking: TrackingConfig = field(default_factory=partial(TrackingConfig, wandb_project="spmdrl_train_kd"))
    checkpoint: CheckpointConfig = field(default_factory=partial(CheckpointConfig, ckpt_path="./ckpt/checkpoints_kd"))

    @property
    def other_models(self) -> dict[str, str | None]:
        return {"teacher_model": self.distillation.teacher_model}

    @property
    def offloads_frozen_models(self) -> bool:
        return self.distillation.teacher_offload
