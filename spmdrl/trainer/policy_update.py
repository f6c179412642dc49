"""One optimizer step of the policy: the loss of a micro-batch, and its place among all ranks' micro-batches."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from spmdrl.algos.corrections import CORRECTIONS, effective_sample_size, mismatch_max, mismatch_metrics
from spmdrl.algos.kl import KL_ESTIMATORS
from spmdrl.algos.losses import AGGREGATION_OF, AGGREGATIONS, POLICY_LOSSES, BatchCounts, bind
from spmdrl.algos.tensor_ops import log_ratio, masked_sum
from spmdrl.config import AlgoConfig, OptimConfig
from spmdrl.data.batching import plan_micro_batches
from spmdrl.distributed import comm
from spmdrl.distributed.strategy import Strategy
from spmdrl.experience import Experience, Sample, collate


class PolicyUpdate:
    """The policy loss with its KL and entropy terms, chosen once from the configuration.

    `max_tokens` is the constant length of the aggregation that has one.
    """

    def __init__(self, strategy: Strategy, algo: AlgoConfig, optim: OptimConfig, *, max_tokens: int, correction: str):
        self.strategy = strategy
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

        Returns sums over this rank's tokens (`sum/...`), maxima (`max/...`) and the gradient norm. The update does
        not depend on how the samples are dealt: every term is divided by the counts of the whole step.
        """
        counts = BatchCounts(
            num_tokens=sum(s.response_length for s in samples),
            num_sequences=sum(s.response_length > 0 for s in samples),
            max_tokens=self.max_tokens,
        )
        plan = plan_micro_batches(
            [s.num_tokens for s in samples], num_ranks=comm.world_size(), micro_batch_size=self.micro_batch_size
        )
        sums: dict[str, Tensor] = {}
        for batch in plan[comm.rank()]:
            exp = collate([samples[i] for i in batch], like=samples[0]).to(comm.device())
            loss, metrics = self.loss(engine, exp, counts, kl_coef=kl_coef)
            self.strategy.backward(engine, loss)
            for name, value in metrics.items():
                seen = sums.get(name)
                sums[name] = value if seen is None else torch.max(seen, value) if name[:4] == "max/" else seen + value
        grad_norm = self.strategy.step(engine)
        return {name: float(value) for name, value in sums.items()} | {"grad_norm": grad_norm}

    def loss(self, engine: Any, exp: Experience, counts: BatchCounts, *, kl_coef: float) -> tuple[Tensor, dict]:
        """This micro-batch's share of the loss (a scalar), and its metrics as sums over its tokens."""
        mask = exp.action_mask
        log_probs, entropy = engine(exp.sequences, mask, with_entropy=True)
        old = self._behaviour_log_probs(exp, log_probs)
        per_token, metrics = self.policy_loss(log_probs, old, exp.advantages, mask)
        if exp.rollout_log_probs is not None and not self.old_from_engine:
            weights = self.correct(old, exp.rollout_log_probs, mask)
            per_token = per_token * weights
            metrics |= mismatch_metrics(old, exp.rollout_log_probs, mask, weights)
            metrics["max/mismatch/max_abs_diff"] = mismatch_max(old, exp.rollout_log_probs, mask)
        policy_loss = self.aggregate(per_token, mask, counts)
        loss = policy_loss
        if self.use_kl_loss and exp.ref_log_probs is not None:
            kl = self.kl(log_probs, exp.ref_log_probs, mask)
            loss = loss + kl_coef * self.aggregate(kl, mask, counts)
        if self.entropy_coef:
            loss = loss - self.entropy_coef * self.aggregate(entropy, mask, counts)
        metrics["policy/entropy"] = entropy.detach()
        metrics |= self._kl_metrics(log_probs.detach(), exp, mask)
        sums = {
            name if name[:4] == "max/" else f"sum/{name}": value
            if value.ndim == 0
            else masked_sum(value.detach(), mask)
            for name, value in metrics.items()
        }
        sums["max/policy/ratio_dev"] = log_ratio(log_probs, old, mask).detach().exp().sub(1).abs().max()
        sums["loss"], sums["policy_loss"] = loss.detach(), policy_loss.detach()
        return loss, sums

    def _behaviour_log_probs(self, exp: Experience, log_probs: Tensor) -> Tensor:
        """The policy that the ratio is taken against; with one optimizer step a rollout it is the current one."""
        if self.old_from_engine:
            assert exp.rollout_log_probs is not None, "--old_log_probs engine without log-probs of the engine"
            return exp.rollout_log_probs
        return log_probs.detach() if exp.log_probs is None else exp.log_probs

    def _kl_metrics(self, log_probs: Tensor, exp: Experience, mask: Tensor) -> dict[str, Tensor]:
        """KL to the reference: the estimate that is trained on, and k1 and k3 always. In the reward it is the KL of the
        policy that sampled."""
        if exp.ref_log_probs is None:
            return {}
        if not self.use_kl_loss and exp.log_probs is not None:
            log_probs = exp.log_probs
        estimates = {"policy/kl": self.kl, "policy/kl_k1": KL_ESTIMATORS["k1"], "policy/kl_k3": KL_ESTIMATORS["k3"]}
        return {name: kl(log_probs, exp.ref_log_probs, mask) for name, kl in estimates.items()}


class UpdateMetrics:
    """Adds up what the optimizer steps of one rollout report, over steps and ranks."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.num_tokens = 0

    def add(self, report: dict[str, float], num_tokens: int) -> None:
        self.steps.append(report)
        self.num_tokens += num_tokens

    def reduce(self) -> dict[str, float]:
        """Means over all tokens of all ranks; losses and gradient norms averaged over optimizer steps. A collective."""
        names = sorted({name for report in self.steps for name in report})
        totals = {name: sum(r.get(name, 0.0) for r in self.steps) for name in names if name[:4] != "max/"}
        summed = [name for name in totals if name != "grad_norm"]
        reduced = comm.all_reduce_sum(torch.tensor([totals[name] for name in summed], dtype=torch.float64)).tolist()
        over_ranks = dict(zip(summed, reduced, strict=True))
        out = {n[4:]: v / max(self.num_tokens, 1) for n, v in over_ranks.items() if n[:4] == "sum/"}
        out["policy/loss"] = over_ranks["loss"] / len(self.steps)
        out["policy/pg_loss"] = over_ranks["policy_loss"] / len(self.steps)
        out["policy/grad_norm"] = totals["grad_norm"] / len(self.steps)
        for name in (n for n in names if n[:4] == "max/"):
            out[name[4:]] = comm.all_reduce_max(max(r.get(name, 0.0) for r in self.steps))
        out["policy/ratio_first_pass"] = comm.all_reduce_max(self.steps[0].get("max/policy/ratio_dev", 0.0))
        if "mismatch/weight" in out:
            out["mismatch/ess"] = effective_sample_size(out["mismatch/weight"], out.pop("mismatch/weight_sq"))
        return out
