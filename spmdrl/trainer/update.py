"""One optimizer step of any role, from micro-batches that all ranks share, and what the steps of a rollout report.

A loss is a sum over its micro-batch divided by the counts of the whole step, so the update does not depend on how the
samples are dealt to ranks and micro-batches.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from spmdrl.algos.corrections import effective_sample_size
from spmdrl.algos.losses import BatchCounts
from spmdrl.config import AnomalyConfig
from spmdrl.data.batching import in_groups, plan_micro_batches
from spmdrl.distributed import comm, preemption
from spmdrl.distributed.strategy import Strategy
from spmdrl.experience import Experience, Sample, collate
from spmdrl.models.packing import shares_prompts
from spmdrl.trainer.anomalies import Guardrails

# Metrics are detached scalars named by how they add up: "sum/..." over tokens, to be divided by the number of tokens
# that are trained on; "step/..." over micro-batches, already divided by a count of the step; "max/..." the largest.
Metrics = dict[str, Tensor]
Loss = Callable[[Any, Experience, BatchCounts], tuple[Tensor, Metrics]]


@dataclass(frozen=True)
class LossPart:
    """Samples of a whole optimizer step, over all ranks, and the loss (engine, experience, counts) of some of them.

    Each `group_size` consecutive samples, such as the two sides of a pair, share a micro-batch.
    """

    samples: Sequence[Sample]
    loss: Loss
    group_size: int = 1

    def counts(self, max_tokens: int = 1) -> BatchCounts:
        return BatchCounts(
            num_tokens=sum(s.response_length for s in self.samples),
            num_sequences=sum(s.response_length > 0 for s in self.samples),
            max_tokens=max_tokens,
        )

    def micro_batches(self, size: int, *, by_prompt: bool = False) -> Iterator[Experience]:
        """This rank's, of at most `size` groups each, on the device; as many on every rank. by_prompt: responses to
        one prompt stay together."""
        groups = in_groups(self.samples, self.group_size)
        for batch in plan_groups(groups, num_ranks=comm.world_size(), size=size, by_prompt=by_prompt)[comm.rank()]:
            preemption.safe_point()
            samples = [sample for i in batch for sample in groups[i]]
            yield collate(samples, like=self.samples[0]).to(comm.device())


def plan_groups(
    groups: Sequence[Sequence[Sample]], *, num_ranks: int, size: int, by_prompt: bool
) -> list[list[list[int]]]:
    """`plan_micro_batches` for groups of samples that share a micro-batch, `size` of them in each."""
    lengths = [max(s.num_tokens for s in group) for group in groups]
    prompts = [group[0].group_id for group in groups] if by_prompt else None
    return plan_micro_batches(lengths, num_ranks=num_ranks, micro_batch_size=size, groups=prompts)


def optimizer_step(
    strategy: Strategy,
    engine: Any,
    parts: Iterable[LossPart],
    *,
    micro_batch_size: int,
    max_tokens: int = 1,
    guard: Guardrails | None = None,
    role: str = "policy",
) -> dict[str, float]:
    """Train on the sum of the parts' losses, of whose samples every rank takes its micro-batches.

    Returns this rank's metrics, the gradient norm and the learning rate, or nothing where `guard` left the step out.
    Without a guard, a loss or gradient that is not finite raises AnomalyStop. A rank with fewer samples makes passes
    of no weight instead. `max_tokens` is the constant length of the aggregation that has one; `role` is for messages.
    """
    totals: Metrics = {}
    with strategy.training(engine):
        for part in parts:
            counts = part.counts(max_tokens)
            for exp in part.micro_batches(micro_batch_size, by_prompt=shares_prompts(engine)):
                loss, metrics = part.loss(engine, exp, counts)
                strategy.backward(engine, loss)
                add_metrics(totals, metrics | {"": loss.detach()})
    guard = guard or Guardrails(AnomalyConfig())
    loss = float(comm.all_reduce_sum(totals.pop("").cpu().double()))
    lr = engine.get_lr()[0]  # of this step; afterwards it is the next one's
    grad_norm = strategy.step(engine, lambda norm: guard.takes_step(role, loss, norm))
    if not guard.after_step(role, loss, grad_norm):
        return {}
    return {name: float(value) for name, value in totals.items()} | {"grad_norm": grad_norm, "lr": lr}


def add_metrics(totals: Metrics, metrics: Metrics) -> None:
    for name, value in metrics.items():
        seen = totals.get(name)
        totals[name] = value if seen is None else torch.max(seen, value) if name[:4] == "max/" else seen + value


@dataclass
class TrainBatch:
    """The samples of one rollout, all ranks', and how far training on them has come."""

    samples: list[Sample]
    chunks: list[list[int]]  # of each optimizer step, indices into samples
    reports: dict[str, list[dict[str, float]]] = field(default_factory=dict)  # role → of each finished optimizer step

    @property
    def updates(self) -> int:
        return sum(map(len, self.reports.values()))


def train_on(
    batch: TrainBatch,
    step: Callable[[Sequence[Sample]], dict[str, float]],
    role: str,
    progress: Any,
    after_step: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """The optimizer steps of a role that are not done yet; the metrics of all of them. A collective."""
    metrics, reports = UpdateMetrics(role), batch.reports.setdefault(role, [])
    for number, indices in enumerate(batch.chunks):
        chunk = [batch.samples[i] for i in indices]
        if number == len(reports):
            reports.append(step(chunk))
            after_step()
        metrics.add(reports[number], sum(s.response_length for s in chunk))
        progress.update(len(chunk))
    return metrics.reduce()


class UpdateMetrics:
    """Adds up what the optimizer steps of one rollout report, over steps and ranks."""

    def __init__(self, role: str = "policy") -> None:
        self.role = role
        self.steps: list[dict[str, float]] = []
        self.num_tokens = 0

    def add(self, report: dict[str, float], num_tokens: int) -> None:
        """Take the report of an optimizer step over that many tokens; an empty one is of a step that was left out."""
        if report:
            self.steps.append(report)
            self.num_tokens += num_tokens

    def reduce(self) -> dict[str, float]:
        """Means over the tokens of all ranks, for losses and gradient norms over optimizer steps; the learning rate is
        the last one's. A collective.

        Nothing where every step was left out.
        """
        if not self.steps:
            return {}
        names = sorted({name for report in self.steps for name in report} - {"grad_norm", "lr"})
        added = [name for name in names if name[:4] != "max/"]
        totals = [sum(report.get(name, 0.0) for report in self.steps) for name in added]
        over_ranks = dict(
            zip(added, comm.all_reduce_sum(torch.tensor(totals, dtype=torch.float64)).tolist(), strict=True)
        )
        grad_norm = sum(report["grad_norm"] for report in self.steps) / len(self.steps)
        out = {f"{self.role}/grad_norm": grad_norm, f"{self.role}/lr": self.steps[-1]["lr"]}
        for name, total in over_ranks.items():
            kind, _, metric = name.partition("/")
            out[metric] = total / (len(self.steps) if kind == "step" else max(self.num_tokens, 1))
        for name in (n for n in names if n[:4] == "max/"):
            out[name[4:]] = comm.all_reduce_max(max(report.get(name, 0.0) for report in self.steps))
        if "policy/ratio_dev" in out:
            out["policy/ratio_first_pass"] = comm.all_reduce_max(self.steps[0].get("max/policy/ratio_dev", 0.0))
        if "mismatch/weight" in out:
            out["mismatch/ess"] = effective_sample_size(out["mismatch/weight"], out.pop("mismatch/weight_sq"))
        return out
