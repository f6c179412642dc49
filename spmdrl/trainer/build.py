"""The roles and the sampling engine, from the configuration."""

import importlib.util
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from spmdrl.config import BatchSizes, ModelConfig, PPOConfig, RewardConfig
from spmdrl.config.generate import GenerateConfig
from spmdrl.config.preflight import model_positions
from spmdrl.config.supervised import SupervisedConfig
from spmdrl.distributed import comm
from spmdrl.distributed.strategy import Strategy, compute_dtype, unwrap
from spmdrl.errors import UserError, first_line
from spmdrl.models.actor import Actor
from spmdrl.models.backbone import Backbone
from spmdrl.models.loading import CheckpointWeights, attention_kernel, load_causal_lm
from spmdrl.models.lora import WithoutLora, add_lora, quantization
from spmdrl.models.packing import layout_for
from spmdrl.models.tokenizer import check_same_ids, load_tokenizer
from spmdrl.models.value_head import RewardModel, ValueModel, load_reward_model, load_value_model
from spmdrl.rewards.combined import source_names
from spmdrl.rewards.model import ModelReward, make_encoder, score_sequences
from spmdrl.rollout.engine import RolloutEngine
from spmdrl.trainer.forward_check import check_forward


def seed_everything(seed: int, full_determinism: bool) -> None:
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if full_determinism:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def device_dtype(config: PPOConfig | SupervisedConfig | GenerateConfig) -> torch.dtype:
    """The number format of models. Raises UserError where the device cannot do what flags ask of it, to be called
    before rows are read."""
    dtype = compute_dtype(config.model.bf16)
    attention_kernel(config.model.attention, dtype)
    if not isinstance(config, GenerateConfig):
        quantization(config.lora, dtype)
    return dtype


def load_backbone(config: PPOConfig, strategy: Strategy) -> Backbone | None:
    """What --share_backbone shares; None without."""
    return Backbone(_load_policy(config, strategy)) if config.share_backbone else None


def _load_policy(config: PPOConfig, strategy: Strategy) -> Any:
    with strategy.loading():
        return load_causal_lm(config.model, dtype=strategy.dtype, **quantization(config.lora, strategy.dtype))


def build_actor(config: PPOConfig, strategy: Strategy, counts: BatchSizes, backbone: Backbone | None) -> Any:
    model = _load_policy(config, strategy) if backbone is None else backbone.causal_lm()
    add_lora(model, config.lora, seed=config.seed)
    enable_checkpointing(model, config.model)
    engine = strategy.trainable(
        Actor(model, temperature=config.rollout.temperature, layout=layout_for(model)),
        learning_rate=config.optim.actor_learning_rate,
        total_steps=counts.actor_optimizer_steps,
        warmup_steps=counts.warmup_steps,
    )
    check_forward(engine, f"--pretrain {config.model.pretrain}")
    return engine


def build_ref_model(config: PPOConfig, strategy: Strategy, actor: Any) -> Any:
    """The frozen --pretrain that the KL is taken to: a copy, or with LoRA the actor's own. None without a KL."""
    if config.algo.init_kl_coef == 0:
        return None
    if config.lora.lora_rank:
        return WithoutLora(actor)
    strategy = strategy.for_role(zero_stage=config.deepspeed.ref_reward_zero_stage)
    with strategy.loading(frozen=True):
        model = load_causal_lm(config.model, dtype=strategy.dtype)
    layout = unwrap(actor).layout  # which check_forward has seen to
    return strategy.frozen(Actor(model, temperature=config.rollout.temperature, layout=layout))


class Given(NamedTuple):
    """A checkpoint, and the flag that names it."""

    flag: str
    name: str


def build_reward_models(
    config: PPOConfig | GenerateConfig,
    strategy: Strategy,
    tokenizer: Any,
    *,
    value_head_prefix: str,
    backbone: Backbone | None = None,
) -> dict[str, ModelReward]:
    """The models of --reward_pretrain by the names that logs have for them, for responses in `tokenizer`'s ids."""
    prefix = value_head_prefix
    models = [
        _build_reward_model(name, config, strategy, tokenizer, prefix, backbone) for name in config.reward.models
    ]
    return dict(zip(source_names(config.reward), models, strict=False))


def _build_reward_model(
    name: str,
    config: PPOConfig | GenerateConfig,
    strategy: Strategy,
    tokenizer: Any,
    value_head_prefix: str,
    backbone: Backbone | None,
) -> ModelReward:
    flag, strategy = "--reward_pretrain", strategy.for_role(zero_stage=config.deepspeed.ref_reward_zero_stage)
    own = load_tokenizer(replace(config.model, pretrain=name, tokenizer_chat_template=None), flag=flag)
    encode, how = make_encoder(tokenizer, own, apply_chat_template=config.data.apply_chat_template)
    if backbone is not None:
        model = RewardModel(backbone.load_classifier(name, source=f"{flag} {name}"))
    else:
        with strategy.loading(frozen=True):
            model = load_reward_model(
                name, config.model, flag=flag, value_head_prefix=value_head_prefix, dtype=strategy.dtype
            )
    positions = model_positions(model.model.config.get_text_config().to_dict())
    same_ids = own.get_vocab() == tokenizer.get_vocab()
    if same_ids and positions is not None and positions < config.max_total_len:
        raise UserError(
            f"{flag} {name} has {positions} positions, prompt and response up to {config.max_total_len} tokens: lower "
            f"--generate_max_len or --prompt_max_len"
        )
    normalization = model.normalization if config.reward.normalize_reward else None
    where = f"reward model {name}"
    comm.say(f"{where}: {how}{_describe_normalization(normalization, config.reward)}")
    model.layout = layout_for(model.model)
    engine = strategy.frozen(model)
    with strategy.on_device(engine):
        check_forward(engine, f"{flag} {name}")

    size = config.rollout.micro_rollout_batch_size

    def score(sequences: Sequence[Tensor], prompts: Sequence[str]) -> Tensor:
        with strategy.on_device(engine):
            return score_sequences(engine, sequences, micro_batch_size=size, prompts=prompts)

    return ModelReward(where, score, encode, normalization=normalization, max_len=positions, knows_policy_ids=same_ids)


def _describe_normalization(normalization: tuple[float, float] | None, config: RewardConfig) -> str:
    if normalization is not None:
        return "; scores are normalised by mean {:.4g} and std {:.4g} of its config".format(*normalization)
    return "; its config has no mean and std: rewards are normalised by their own" if config.normalize_reward else ""


def critic_checkpoint(config: PPOConfig, reward_models: Mapping[str, ModelReward]) -> Given:
    """What the critic starts from: --critic_pretrain, else like OpenRLHF's the first reward model, if it has the
    policy's ids, else --pretrain."""
    if config.critic.critic_pretrain:
        return Given("--critic_pretrain", config.critic.critic_pretrain)
    first = next(iter(reward_models.values()), None)
    if first is not None and first.knows_policy_ids:
        return Given("--reward_pretrain", config.reward.models[0])
    return Given("--pretrain", str(config.model.pretrain))


def build_critic(
    config: PPOConfig,
    strategy: Strategy,
    counts: BatchSizes,
    start: Given,
    backbone: Backbone | None,
    *,
    tokenizer: Any,
) -> Any:
    """The critic for the ids of `tokenizer`, from `start`; None for an estimator that needs none."""
    if not config.needs_critic:
        return None
    (flag, name), own = start, config.deepspeed
    strategy = strategy.for_role(zero_stage=own.critic_zero_stage, adam_offload=own.critic_adam_offload)
    comm.say(f"critic: starts from {flag} {name}")
    check_same_ids(tokenizer, config.model, name, flag)
    critic = _load_critic(config, strategy, start) if backbone is None else _share_critic(config, backbone, start)
    vocab_size, num_tokens = critic.model.config.get_text_config().vocab_size, len(tokenizer)
    if vocab_size < num_tokens:
        raise UserError(
            f"{flag} {name} knows {vocab_size} tokens, the tokenizer of --pretrain {num_tokens}: take a critic of the "
            f"same family"
        )
    if critic.has_new_head:
        comm.say(f"critic: {name} has no value head, a new one is initialised")
    enable_checkpointing(critic.model, config.model)
    critic.layout = layout_for(critic.model)
    engine = strategy.trainable(
        critic,
        learning_rate=config.critic.critic_learning_rate,
        total_steps=counts.total_optimizer_steps,
        warmup_steps=counts.critic_warmup_steps,
    )
    check_forward(engine, f"{flag} {name}")
    return engine


def _load_critic(config: PPOConfig, strategy: Strategy, start: Given) -> ValueModel:
    with strategy.loading():
        critic = load_value_model(
            start.name,
            config.model,
            flag=start.flag,
            value_head_prefix=config.critic.value_head_prefix,
            dtype=strategy.dtype,
            seed=config.seed,
            **quantization(config.lora, strategy.dtype),
        )
    add_lora(critic.model, config.lora, seed=config.seed)
    return critic


def _share_critic(config: PPOConfig, backbone: Backbone, start: Given) -> ValueModel:
    if start.name == str(config.model.pretrain):
        return ValueModel(backbone.new_classifier(config.lora, seed=config.seed), has_new_head=True)
    return ValueModel(backbone.load_classifier(start.name, source=f"{start.flag} {start.name}"))


def enable_checkpointing(model: Any, config: ModelConfig) -> None:
    if config.gradient_checkpointing:
        options = {"use_reentrant": config.gradient_checkpointing_use_reentrant}
        try:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        except ValueError as error:  # of an architecture that does not know how
            raise UserError(f"--gradient_checkpointing: {first_line(error)} Drop it") from error
        if config.gradient_checkpointing_use_reentrant:
            model.enable_input_require_grads()  # else nothing behind frozen embeddings has a gradient


def build_engine(config: PPOConfig | GenerateConfig, tokenizer: Any, *, dtype: torch.dtype) -> RolloutEngine:
    """The engine of --engine; built before the models, so that vLLM measures a device that is still free."""
    rollout, model = config.rollout, config.model
    has_vllm = importlib.util.find_spec("vllm") is not None
    if rollout.engine == "vllm" and not has_vllm:
        raise UserError("--engine vllm: vLLM is not installed: pip install vllm, or use --engine hf")
    if rollout.engine == "hf" or not has_vllm:
        from spmdrl.rollout.hf_engine import HFEngine

        if rollout.engine == "auto":
            comm.say("vLLM is not installed: sampling with Hugging Face generate, which is several times slower")
        size = rollout.micro_rollout_batch_size
        return HFEngine(load_causal_lm(model, dtype=dtype), tokenizer, device=comm.device(), batch_size=size)
    from spmdrl.rollout.vllm_engine import VLLMEngine

    share = -(-rollout.rollout_batch_size // comm.world_size()) * rollout.vllm_tensor_parallel_size
    engine = VLLMEngine(
        str(model.pretrain),
        rollout,
        dtype=dtype,
        max_len=config.max_total_len,
        max_samples=share * rollout.n_samples_per_prompt,
        weights=CheckpointWeights(model),
        trust_remote_code=model.trust_remote_code,
    )
    if comm.device().type == "cuda" and isinstance(config, PPOConfig) and not rollout.vllm_enable_sleep:
        kept = f"{rollout.vllm_gpu_memory_utilization:g} of the GPU (--vllm_gpu_memory_utilization)"
        comm.say(f"vLLM keeps {kept} while training too; with --vllm_enable_sleep it gives that back")
    engine.sleep()
    return engine
