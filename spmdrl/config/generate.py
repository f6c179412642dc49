"""The flags of cli/generate.py. Names and defaults are those of OpenRLHF's batch_inference.py and of train_ppo.py."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from spmdrl.config import checks, preflight
from spmdrl.config.flags import flags_of, values_of
from spmdrl.config.foreign import NOT_YET, Foreign
from spmdrl.config.sections import (
    DeepSpeedConfig,
    LoadConfig,
    PromptDataConfig,
    RewardConfig,
    RolloutConfig,
    StoppingConfig,
)
from spmdrl.config.splits import check_splits
from spmdrl.errors import UserError

RANGES: dict[str, checks.Range] = {**checks.RANGES, "max_new_tokens": (lambda x: x >= 1, "at least 1")}
REWARD_FLAGS = "--reward_pretrain, --remote_rm_url or --reward_func"


@dataclass(frozen=True, kw_only=True)
class PromptColumnsConfig:
    """Prompts."""

    dataset: str | None = None
    """Prompts: .jsonl, .json, .parquet, .csv, a save_to_disk directory or a hub name; several separated by commas
    follow one another."""
    dataset_split: str = "train"
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
    max_samples: int = 100_000_000
    """Use at most this many rows, the first ones."""


@dataclass(frozen=True, kw_only=True)
class OutputConfig:
    """Output: JSON lines in the order of the data, each with all columns of its row."""

    output_path: str | None = None
    """File to write, .jsonl. It appears once it is whole; until then finished rounds are kept beside it, and the same
    command goes on from there."""
    post_processor: Literal["rs", "iter_dpo"] | None = None
    """What is kept of a prompt's responses: rs (rejection sampling) the best one, iter_dpo the best as chosen and the
    worst as rejected, unless they are equally good. Left out: every one, each in a line."""
    reward_threshold: float | None = None
    """With rs: leave out prompts whose best response has less reward than this."""
    output_key: str = "output"
    """Column for the response; that it ended by itself (stop) or was cut (length) is in output_finish_reason."""
    reward_key: str = "reward"
    """Column for its reward; with iter_dpo its name follows those of the two responses, as in chosen_reward."""
    chosen_key: str = "chosen"
    """Column for the better response of iter_dpo."""
    rejected_key: str = "rejected"
    """Column for the worse response of iter_dpo."""


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """Sampling responses."""

    engine: Literal["auto", "vllm", "hf"] = "auto"
    """What samples: vLLM inside this process or Hugging Face generate; auto takes vLLM where installed."""
    n_samples_per_prompt: int = 1
    """Responses sampled for each prompt."""
    rollout_batch_size: int = 512
    """Prompts of one round, over all ranks. A run that was stopped goes on after its last finished round."""
    micro_rollout_batch_size: int = 16
    """Samples of one forward of the hf engine and of reward models, per rank, or of one request to a reward server."""
    max_new_tokens: int = 1024
    """Most tokens of one response; longer ones are cut."""
    greedy_sampling: bool = False
    """Take the most likely token each time."""
    temperature: float = 1.0
    """Sampling temperature."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens with this much probability."""
    top_k: int = -1
    """Sample from the k most likely tokens; -1 is all of them."""
    stop: tuple[str, ...] = ()
    """Strings that end a response, such as --stop '</answer>' 'User:'."""
    vllm_tensor_parallel_size: int = 1
    """Ranks that share one vLLM engine."""
    vllm_gpu_memory_utilization: float = 0.9
    """Share of the device's memory that vLLM may take; leave room for reward models."""
    vllm_kv_cache_gb: int | None = None
    """KV cache of each engine in GiB on machines without a GPU (vLLM's VLLM_CPU_KVCACHE_SPACE)."""
    enable_prefix_caching: bool = False
    """Let vLLM share the KV cache of equal prompt beginnings."""
    enforce_eager: bool = False
    """Run vLLM without CUDA graphs: faster start, slower sampling."""


@dataclass(frozen=True, kw_only=True)
class ResponseRewardConfig(RewardConfig):
    """Reward, which --post_processor needs; what several sources give is added up."""

    remote_rm_timeout: float = 600.0
    """Seconds that reward servers may take for the samples of one round, tries and waits included."""
    normalize_reward: bool = False
    """Subtract the mean and divide by the standard deviation that a reward model has in its config."""


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """Sample responses to the prompts of a data set, and keep all, the best, or the best against the worst. The same
    flags start one rank with python and many with torchrun, deepspeed or srun."""

    foreign: ClassVar[Foreign] = Foreign(
        not_yet={
            "use_ms": NOT_YET["use_ms"],
            "repetition_penalty": "tokens are sampled from the model's own distribution; drop it",
            **dict.fromkeys(
                ("enable_csft", "csft_prompt", "reward_template"), "prompts are not conditioned on a reward; drop it"
            ),
        },
        refused={
            "eval_task": "rewards are asked for where a flag names a source of them; drop it",
            "iter": "all rounds are done, and a stopped run goes on; take fewer rows with --max_samples",
            "dataset_probs": "every row of every source is used, one source after the other; drop it",
            "max_num_seqs": "--rollout_batch_size and vLLM's memory bound how many are sampled at a time; drop it",
            "max_len": "--prompt_max_len and --max_new_tokens bound a sequence; drop it",
        },
        other_names={
            "best_of_n": "n_samples_per_prompt",
            "tp_size": "vllm_tensor_parallel_size",
            "micro_batch_size": "micro_rollout_batch_size",
            "generate_max_len": "max_new_tokens",
            "prompt_data": "dataset",
            "prompt_split": "dataset_split",
            "save_path": "output_path",
        },
    )

    model: LoadConfig = field(default_factory=LoadConfig)
    data: PromptColumnsConfig = field(default_factory=PromptColumnsConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    reward: ResponseRewardConfig = field(default_factory=ResponseRewardConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
    stopping: StoppingConfig = field(default_factory=StoppingConfig)
    value_head_prefix: str = "score"
    """Name of the head in reward models; score, value_head and v_head are found too."""
    zero_stage: int = 0
    """3 shards reward models over the ranks, else each rank holds them whole."""
    seed: int = 1234
    """Seed of sampling. A response follows from it, its row and its number, whatever the number of ranks."""
    local_rank: int = -1
    """Set by the deepspeed launcher."""

    def __post_init__(self) -> None:
        checks.check_ranges(self, RANGES)
        checks.check_rewards(self)
        checks.check_template(self)
        check_sampling(self.sampling)
        check_post_processor(self)

    def validate(self, world_size: int) -> None:
        """Raise UserError where what the flags name does not exist or does not fit this many ranks."""
        check_surroundings(self, world_size)

    @property
    def prompts(self) -> PromptDataConfig:
        return PromptDataConfig(**_shared(PromptDataConfig, self.data))

    @property
    def rollout(self) -> RolloutConfig:
        sampling = self.sampling
        temperature = 0.0 if sampling.greedy_sampling else sampling.temperature
        own = {"generate_max_len": sampling.max_new_tokens, "temperature": temperature}
        return RolloutConfig(**_shared(RolloutConfig, sampling) | own)

    @property
    def deepspeed(self) -> DeepSpeedConfig:
        return DeepSpeedConfig(zero_stage=self.zero_stage, local_rank=self.local_rank)

    @property
    def max_total_len(self) -> int:
        """Most tokens of prompt and response together."""
        return self.data.prompt_max_len + self.sampling.max_new_tokens

    @property
    def new_columns(self) -> tuple[str, ...]:
        """What is added to each row."""
        output = self.output
        if output.post_processor == "iter_dpo":
            keys = (output.chosen_key, output.rejected_key)
            return (*keys, *(f"{key}_{output.reward_key}" for key in keys))
        reward = (output.reward_key,) if self.reward.num_sources else ()
        return (output.output_key, *reward, f"{output.output_key}_finish_reason")


def _shared(cls: type, section: Any) -> dict[str, Any]:
    """The values of `section` that `cls` has flags of the same name for."""
    return {name: value for name, value in values_of(section).items() if name in flags_of(cls)}


def check_sampling(sampling: SamplingConfig) -> None:
    if not sampling.greedy_sampling:
        return
    defaults = SamplingConfig()
    for name in ("temperature", "top_p", "top_k"):
        if getattr(sampling, name) != getattr(defaults, name):
            raise UserError(f"--{name} changes nothing with --greedy_sampling; drop one of them")
    if sampling.n_samples_per_prompt > 1:
        raise UserError(
            f"--greedy_sampling gives the same response {sampling.n_samples_per_prompt} times: drop it, or "
            f"--n_samples_per_prompt"
        )


def check_post_processor(config: GenerateConfig) -> None:
    output, n = config.output, config.sampling.n_samples_per_prompt
    if output.reward_threshold is not None and output.post_processor != "rs":
        raise UserError("--reward_threshold changes nothing without --post_processor rs; give both or neither")
    if config.reward.normalize_reward and config.reward.num_sources > len(config.reward.models):
        raise UserError("--normalize_reward is for the models of --reward_pretrain: weigh others by --reward_weights")
    if output.post_processor is not None:
        if not config.reward.num_sources:
            raise UserError(f"--post_processor {output.post_processor} compares rewards: give {REWARD_FLAGS}")
        if n == 1 and output.reward_threshold is None:
            raise UserError(
                f"--post_processor {output.post_processor} compares the responses to one prompt: it needs "
                f"--n_samples_per_prompt 2 or more, got 1"
            )
    if len(set(config.new_columns)) < len(config.new_columns):
        raise UserError(f"two of the columns {', '.join(config.new_columns)} have the same name: change a --..._key")
    read = {"output_key"} if output.post_processor == "iter_dpo" else {"chosen_key", "rejected_key"}
    for name in sorted(read):
        if values_of(config)[name] != flags_of(GenerateConfig)[name].default:
            raise UserError(f"--{name} names no column with --post_processor {output.post_processor}; drop it")


def check_surroundings(config: GenerateConfig, world_size: int) -> None:
    model, output_path = config.model.pretrain, config.output.output_path
    for flag, value, what in (
        ("pretrain", model, "the Hugging Face directory or hub name of the model to sample from"),
        ("dataset", config.data.dataset, "a file, directory or hub name with prompts"),
        ("output_path", output_path, "the .jsonl file to write"),
    ):
        if not value:
            raise UserError(f"--{flag} is missing: {what}")
    preflight.check_packages(config)
    preflight.check_engine(config)
    preflight.check_models({"pretrain": str(model)})
    preflight.check_sources({"dataset": config.data.dataset})
    check_splits(config)
    preflight.check_reward_sources(config.reward, config.value_head_prefix)
    check_output(Path(str(output_path)).expanduser())
    sources = [("dataset", source.strip()) for source in str(config.data.dataset).split(",")]
    preflight.check_apart("output_path", str(output_path), [str(output_path)], sources)
    preflight.check_ranks(config, world_size)
    preflight.check_causal_lm("pretrain", str(model))
    if model_config := preflight.read_model_config("pretrain", str(model)):
        check_positions(config, preflight.model_positions(model_config))
        preflight.check_heads(config, model_config, world_size)


def check_output(path: Path) -> None:
    if path.is_dir():
        raise UserError(f"--output_path {path} is a directory: give a file in it")
    if path.exists() and not unfinished(path).exists():
        raise UserError(f"--output_path {path} is there already: remove it, or give another")
    preflight.check_save_path(str(path.parent), "output_path")


def unfinished(path: Path) -> Path:
    """Where the rounds of a run are kept until its file is whole."""
    return path.with_name(path.name + ".partial")


def check_positions(config: GenerateConfig, positions: int | None) -> None:
    if positions is None or config.max_total_len <= positions:
        return
    room = positions - config.data.prompt_max_len
    remedy = f"at most --max_new_tokens {room}" if room > 0 else f"lower --prompt_max_len below {positions}"
    raise UserError(
        f"--prompt_max_len {config.data.prompt_max_len} + --max_new_tokens {config.sampling.max_new_tokens} is more "
        f"than the {positions} positions of --pretrain {config.model.pretrain}; {remedy}"
    )
