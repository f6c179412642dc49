"""The roles and the sampling engine, from the configuration."""

import importlib.util
import os
import random
from typing import Any

import numpy
import torch

from spmdrl.config import BatchSizes, ModelConfig, PPOConfig
from spmdrl.distributed import comm
from spmdrl.distributed.strategy import Strategy
from spmdrl.errors import UserError
from spmdrl.models.actor import Actor
from spmdrl.models.loading import checkpoint_weight_names, load_causal_lm
from spmdrl.models.value_head import load_value_model
from spmdrl.rollout.engine import RolloutEngine


def seed_everything(seed: int, full_determinism: bool) -> None:
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if full_determinism:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def build_actor(config: PPOConfig, strategy: Strategy, counts: BatchSizes) -> Any:
    with strategy.loading():
        model = load_causal_lm(config.model, dtype=strategy.dtype)
    enable_checkpointing(model, config.model)
    return strategy.trainable(
        Actor(model, temperature=config.rollout.temperature),
        learning_rate=config.optim.actor_learning_rate,
        total_steps=counts.actor_optimizer_steps,
        warmup_steps=counts.warmup_steps,
    )


def build_ref_model(config: PPOConfig, strategy: Strategy) -> Any:
    """The frozen copy of --pretrain that the KL is taken to; None without a KL."""
    if config.algo.init_kl_coef == 0:
        return None
    with strategy.loading():
        model = load_causal_lm(config.model, dtype=strategy.dtype)
    return strategy.frozen(Actor(model, temperature=config.rollout.temperature))


def build_critic(config: PPOConfig, strategy: Strategy, counts: BatchSizes, *, num_tokens: int) -> Any:
    """The critic for the `num_tokens` ids of the tokenizer; None for an estimator that needs none."""
    if not config.needs_critic:
        return None
    flag = "--critic_pretrain" if config.critic.critic_pretrain else "--pretrain"
    name = config.critic.critic_pretrain or str(config.model.pretrain)
    with strategy.loading():
        critic = load_value_model(
            name,
            config.model,
            flag=flag,
            value_head_prefix=config.critic.value_head_prefix,
            dtype=strategy.dtype,
            seed=config.seed,
        )
    vocab_size = critic.model.config.get_text_config().vocab_size
    if vocab_size < num_tokens:
        raise UserError(
            f"{flag} {name} knows {vocab_size} tokens, the tokenizer of --pretrain {num_tokens}: take a critic of the "
            f"same family"
        )
    if critic.has_new_head:
        comm.say(f"critic: {name} has no value head, a new one is initialised")
    enable_checkpointing(critic.model, config.model)
    return strategy.trainable(
        critic,
        learning_rate=config.critic.critic_learning_rate,
        total_steps=counts.total_optimizer_steps,
        warmup_steps=counts.critic_warmup_steps,
    )


def enable_checkpointing(model: Any, config: ModelConfig) -> None:
    if config.gradient_checkpointing:
        options = {"use_reentrant": config.gradient_checkpointing_use_reentrant}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


def build_engine(config: PPOConfig, tokenizer: Any, *, dtype: torch.dtype) -> RolloutEngine:
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
        weight_names=checkpoint_weight_names(model),
        trust_remote_code=model.trust_remote_code,
    )
    engine.sleep()
    return engine
