"""What the batch flags come to: steps, passes, the horizon of the learning rate, and prompts left out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spmdrl.errors import UserError

if TYPE_CHECKING:
    from spmdrl.config.ppo import PPOConfig


@dataclass(frozen=True)
class BatchSizes:
    """Counts over all ranks, but for micro_batches_per_rank."""

    num_prompts: int
    num_dropped: int  # prompts of each episode that do not fill a step
    steps_per_episode: int
    total_steps: int
    samples_per_step: int
    optimizer_steps_per_step: int
    total_optimizer_steps: int
    frozen_optimizer_steps: int  # the first ones, in which the critic trains alone
    warmup_steps: int  # optimizer steps of the actor
    critic_warmup_steps: int
    micro_batches_per_rank: int  # forwards and backwards of one optimizer step; the same number on every rank

    @property
    def actor_optimizer_steps(self) -> int:
        return self.total_optimizer_steps - self.frozen_optimizer_steps


def sizes(config: PPOConfig, world_size: int, num_prompts: int) -> BatchSizes:
    """Raises UserError when the prompts do not fill a single step."""
    batch, optim = config.rollout.rollout_batch_size, config.optim
    steps_per_episode, num_dropped = divmod(num_prompts, batch)
    if steps_per_episode == 0:
        raise UserError(
            f"--rollout_batch_size {batch} is more than the {num_prompts} prompts of --prompt_data: no step would be "
            f"full; at most {num_prompts} here"
        )
    optimizer_steps_per_step = config.samples_per_step // optim.train_batch_size * optim.max_epochs
    total_steps = steps_per_episode * optim.num_episodes
    total_optimizer_steps = total_steps * optimizer_steps_per_step
    num_frozen = max(config.critic.freezing_actor_steps, 0)
    if num_frozen >= total_steps:
        raise UserError(
            f"--freezing_actor_steps {num_frozen} would never train the actor: the run has "
            f"{_count(total_steps, 'step')}"
        )
    frozen_optimizer_steps = num_frozen * optimizer_steps_per_step
    return BatchSizes(
        num_prompts=num_prompts,
        num_dropped=num_dropped,
        steps_per_episode=steps_per_episode,
        total_steps=total_steps,
        samples_per_step=config.samples_per_step,
        optimizer_steps_per_step=optimizer_steps_per_step,
        total_optimizer_steps=total_optimizer_steps,
        frozen_optimizer_steps=frozen_optimizer_steps,
        warmup_steps=warmup_steps(total_optimizer_steps - frozen_optimizer_steps, optim.lr_warmup_ratio),
        critic_warmup_steps=warmup_steps(total_optimizer_steps, optim.lr_warmup_ratio),
        micro_batches_per_rank=math.ceil(
            math.ceil(optim.train_batch_size / world_size) / optim.micro_train_batch_size
        ),
    )


def warmup_steps(num_steps: int, lr_warmup_ratio: float) -> int:
    """Over which the learning rate rises from 0: never all of them, or a run of one step would learn nothing."""
    return min(math.ceil(num_steps * lr_warmup_ratio), max(num_steps - 1, 0))


def describe_sizes(config: PPOConfig, world_size: int, counts: BatchSizes) -> list[str]:
    """Lines for the start of a run."""
    rollout, optim = config.rollout, config.optim
    share, more = divmod(optim.train_batch_size, world_size)
    shares = f"{share} or {share + 1} samples" if more else f"{share} samples"
    uneven = "; ranks with fewer samples fill up with passes of no weight" if more else ""
    dropped = (
        f"; {counts.num_dropped} of an episode's {counts.num_prompts} prompts are dropped, they do not fill a step"
        if counts.num_dropped
        else ""
    )
    at_most = "at most " if config.algo.dynamic_filtering else ""
    lines = [
        f"step: {rollout.rollout_batch_size} prompts x {rollout.n_samples_per_prompt} samples = "
        f"{counts.samples_per_step} samples, over {_count(world_size, 'rank')}",
        f"training: {_count(counts.optimizer_steps_per_step, 'optimizer step')} a step of {optim.train_batch_size} "
        f"samples ({_count(optim.max_epochs, 'epoch')}), each {_count(counts.micro_batches_per_rank, 'micro-batch')} "
        f"of up to {optim.micro_train_batch_size} on every rank for its {shares}{uneven}",
        f"run: {at_most}{counts.total_steps} steps ({_count(optim.num_episodes, 'episode')} of "
        f"{counts.steps_per_episode}), {counts.total_optimizer_steps} optimizer steps{dropped}",
        f"learning rate: up to {optim.actor_learning_rate:g} in {counts.warmup_steps} optimizer steps, then "
        f"{optim.lr_scheduler} over the other {counts.actor_optimizer_steps - counts.warmup_steps}",
    ]
    if config.needs_critic:
        alone = max(config.critic.freezing_actor_steps, 0)
        lines.append(
            f"critic: learning rate up to {config.critic.critic_learning_rate:g} in {counts.critic_warmup_steps} of "
            f"{counts.total_optimizer_steps} optimizer steps"
            + (f"; it trains alone for the first {_count(alone, 'step')}" if alone else "")
        )
    return lines


def _count(number: int, noun: str) -> str:
    plural = noun + ("es" if noun.endswith("ch") and noun != "epoch" else "s")
    return f"{number} {noun if number == 1 else plural}"
