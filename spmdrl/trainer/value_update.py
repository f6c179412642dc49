"""One optimizer step of the critic."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from spmdrl.algos.losses import BatchCounts, bind, token_mean, value_loss
from spmdrl.algos.tensor_ops import masked_sum
from spmdrl.config import CriticConfig, OptimConfig
from spmdrl.distributed.strategy import Strategy
from spmdrl.experience import Experience, Sample
from spmdrl.trainer.anomalies import Guardrails
from spmdrl.trainer.update import LossPart, Metrics, optimizer_step


class ValueUpdate:
    """The value loss, every token of the optimizer step weighing the same."""

    def __init__(self, strategy: Strategy, critic: CriticConfig, optim: OptimConfig, guard: Guardrails | None = None):
        self.strategy, self.guard = strategy, guard
        self.micro_batch_size = optim.micro_train_batch_size
        self.value_loss: Callable = bind(value_loss, critic)

    def optimizer_step(self, engine: Any, samples: Sequence[Sample]) -> dict[str, float]:
        """Train on `samples`, the whole optimizer step's; returns this rank's metrics and the gradient norm."""
        parts, size = [LossPart(samples, self.loss)], self.micro_batch_size
        return optimizer_step(self.strategy, engine, parts, micro_batch_size=size, guard=self.guard, role="critic")

    def loss(self, engine: Any, exp: Experience, counts: BatchCounts) -> tuple[Tensor, Metrics]:
        """This micro-batch's share of the loss, and its metrics."""
        mask = exp.action_mask
        per_token, metrics = self.value_loss(engine(exp.sequences, mask), exp.values, exp.returns, mask)
        loss = token_mean(per_token, mask, counts)
        sums = {f"sum/{name}": masked_sum(value.detach(), mask) for name, value in metrics.items()}
        return loss, {**sums, "step/critic/loss": loss.detach()}


def value_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Of the values at collection, over the trained tokens of all ranks' `samples`.

    critic/explained_variance is 1 - Var(return - value) / Var(return): 1 for a critic that knows the returns, 0 for
    one that says the same everywhere, less for one that misleads. Left out where returns differ by rounding alone.
    """
    values = torch.cat([_on_mask(s.values, s) for s in samples])
    returns = torch.cat([_on_mask(s.returns, s) for s in samples])
    if not len(values):
        return {}
    metrics = {"critic/value_mean": float(values.mean()), "critic/return_mean": float(returns.mean())}
    variance = float(returns.var(correction=0))
    if variance > (1e-6 * float(returns.abs().max())) ** 2:
        metrics["critic/explained_variance"] = 1 - float((returns - values).var(correction=0)) / variance
    return metrics


def _on_mask(field: Tensor | None, sample: Sample) -> Tensor:
    assert field is not None, f"sample {sample.index} of group {sample.group_id} was not scored by the critic"
    return field[sample.action_mask].double()
