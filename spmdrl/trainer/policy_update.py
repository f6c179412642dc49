"""One optimizer step of the policy."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from spmdrl.algos.corrections import CORRECTIONS, mismatch_max, mismatch_metrics
from spmdrl.algos.kl import KL_ESTIMATORS
from spmdrl.algos.losses import AGGREGATION_OF, AGGREGATIONS, POLICY_LOSSES, BatchCounts, bind
from spmdrl.algos.tensor_ops import log_ratio, masked_sum
from spmdrl.config import AlgoConfig, OptimConfig
from spmdrl.distributed.average import WeightAverage
from spmdrl.distributed.strategy import Strategy
from spmdrl.experience import Experience, Sample
from spmdrl.trainer.anomalies import Guardrails
from spmdrl.trainer.ptx import PtxLoss
from spmdrl.trainer.update import LossPart, Metrics, optimizer_step


class PolicyUpdate:
    """The policy loss with its KL and entropy terms, chosen once from the configuration; `ptx` mixes in texts,
    `average` takes in the weights after each step.

    `max_tokens` is the constant length of the aggregation that has one.
    """

    def __init__(
        self,
        strategy: Strategy,
        algo: AlgoConfig,
        optim: OptimConfig,
        *,
        max_tokens: int,
        correction: str,
        ptx: PtxLoss | None = None,
        average: WeightAverage | None = None,
        guard: Guardrails | None = None,
    ):
        self.strategy, self.ptx, self.average, self.guard = strategy, ptx, average, guard
        self.micro_batch_size = optim.micro_train_batch_size
        self.max_tokens = max_tokens
        self.policy_loss: Callable = bind(POLICY_LOSSES[algo.policy_loss], algo)
        aggregation = algo.loss_aggregation
        if aggregation == "auto":
            aggregation = AGGREGATION_OF.get(algo.policy_loss, "token-mean")
        self.aggregate: Callable = AGGREGATIONS[aggregation]
        self.correct: Callable = bind(CORRECTIONS[correction], algo)
        self.kl: Callable = KL_ESTIMATORS[algo.kl_estimator]
        self.use_kl_loss = algo.use_kl_loss
        self.entropy_coef = algo.entropy_coef
        self.old_from_engine = algo.old_log_probs == "engine"

    def optimizer_step(self, engine: Any, samples: Sequence[Sample], *, kl_coef: float) -> dict[str, float]:
        """Train on `samples`, the whole optimizer step's, of which every rank takes its micro-batches.

        Returns this rank's metrics and the gradient norm.
        """
        parts = [LossPart(samples, partial(self.loss, kl_coef=kl_coef))]
        if self.ptx is not None:
            parts.append(self.ptx.part(len(samples)))
        report = optimizer_step(
            self.strategy,
            engine,
            parts,
            micro_batch_size=self.micro_batch_size,
            max_tokens=self.max_tokens,
            guard=self.guard,
        )
        if report and self.average is not None:
            self.average.update()
        return report

    def loss(self, engine: Any, exp: Experience, counts: BatchCounts, *, kl_coef: float) -> tuple[Tensor, Metrics]:
        """This micro-batch's share of the loss (a scalar), and its metrics."""
        mask = exp.action_mask
        log_probs, entropy = engine(exp.sequences, mask, with_entropy=True)
        old = self._behaviour_log_probs(exp, log_probs)
        per_token, metrics = self.policy_loss(log_probs, old, exp.advantages, mask)
        sums: Metrics = {}
        if exp.rollout_log_probs is not None and not self.old_from_engine:
            weights = self.correct(old, exp.rollout_log_probs, mask)
            per_token = per_token * weights
            metrics |= mismatch_metrics(old, exp.rollout_log_probs, mask, weights)
            sums["max/mismatch/max_abs_diff"] = mismatch_max(old, exp.rollout_log_probs, mask)
        policy_loss = self.aggregate(per_token, mask, counts)
        loss = policy_loss
        if self.use_kl_loss and exp.ref_log_probs is not None:
            kl = self.kl(log_probs, exp.ref_log_probs, mask)
            loss = loss + kl_coef * self.aggregate(kl, mask, counts)
        if self.entropy_coef:
            loss = loss - self.entropy_coef * self.aggregate(entropy, mask, counts)
        metrics["policy/entropy"] = entropy.detach()
        metrics |= self._kl_metrics(log_probs.detach(), exp, mask)
        sums |= {f"sum/{name}": masked_sum(value.detach(), mask) for name, value in metrics.items()}
        sums["max/policy/ratio_dev"] = log_ratio(log_probs, old, mask).detach().exp().sub(1).abs().max()
        sums["step/policy/loss"], sums["step/policy/pg_loss"] = loss.detach(), policy_loss.detach()
        return loss, sums

    def _behaviour_log_probs(self, exp: Experience, log_probs: Tensor) -> Tensor:
        """The policy that the ratio is taken against; with one optimizer step a rollout it is the current one."""
        if self.old_from_engine:
            assert exp.rollout_log_probs is not None, "--old_log_probs engine without log-probs of the engine"
            return exp.rollout_log_probs
        return log_probs.detach() if exp.log_probs is None else exp.log_probs

    def _kl_metrics(self, log_probs: Tensor, exp: Experience, mask: Tensor) -> dict[str, Tensor]:
        """KL to the reference: the estimate that is trained on, and k1 and k3 always.

        In the reward it is the KL of the policy that sampled.
        """
        if exp.ref_log_probs is None:
            return {}
        if not self.use_kl_loss and exp.log_probs is not None:
            log_probs = exp.log_probs
        estimates = {"policy/kl": self.kl, "policy/kl_k1": KL_ESTIMATORS["k1"], "policy/kl_k3": KL_ESTIMATORS["k3"]}
        return {name: kl(log_probs, exp.ref_log_probs, mask) for name, kl in estimates.items()}
