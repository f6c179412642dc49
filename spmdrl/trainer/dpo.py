"""Direct preference optimisation: a policy trained on pairs of responses, https://arxiv.org/abs/2305.18290"""

from array import array
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from spmdrl.algos.losses import BatchCounts
from spmdrl.algos.preference import dpo_ipo, dpo_sigmoid, implicit_rewards, pair_accuracy, sequence_log_probs
from spmdrl.config.supervised import DPOConfig, SupervisedConfig
from spmdrl.data.batching import split_evenly
from spmdrl.data.conversations import ChatTemplate, TextTemplate
from spmdrl.data.supervised import PairRows, RowRenderer, SupervisedSet
from spmdrl.distributed import comm
from spmdrl.experience import Experience, Sample
from spmdrl.models.actor import Actor
from spmdrl.models.loading import load_causal_lm
from spmdrl.models.lora import quantization
from spmdrl.models.tokenizer import check_same_ids
from spmdrl.trainer.forward_check import check_forward
from spmdrl.trainer.objectives import (
    Setting,
    check_vocabulary,
    every_other,
    free_memory,
    layout_of,
    load_policy,
)
from spmdrl.trainer.scoring import log_probs_of, score_samples
from spmdrl.trainer.update import LossPart, Metrics

SCORED_ROWS = 1024  # of each rank at a time: enough to find sequences of similar length


class DPO:
    """The policy's log-probs of both responses against the reference model's, which are computed once, up front."""

    group_size, num_labels, value_head_prefix = 2, None, None

    def __init__(self, config: DPOConfig):
        self.config = config
        options = {"beta": config.dpo.beta}
        sigmoid = partial(dpo_sigmoid, label_smoothing=config.dpo.label_smoothing, **options)
        self.pair_loss = partial(dpo_ipo, **options) if config.dpo.ipo else sigmoid

    def renderer(self, shape: TextTemplate | ChatTemplate) -> RowRenderer:
        return PairRows(self.config.data, shape, with_margin=False)

    def prepare(self, setting: Setting) -> None:
        add_reference_log_probs(setting, self.config, self.config.dpo.ref_pretrain, group_size=2)

    def load_model(self, setting: Setting) -> nn.Module:
        return load_policy(self.config, setting)

    def parts(self, engine: Any, samples: Sequence[Sample]) -> list[LossPart]:
        return [LossPart(samples, self.loss, group_size=2)]

    def loss(self, engine: Any, exp: Experience, counts: BatchCounts) -> tuple[Tensor, Metrics]:
        """This micro-batch's share of the loss, and its metrics."""
        beta, num_pairs = self.config.dpo.beta, counts.num_sequences / 2
        sums, means = response_log_probs(engine, exp)
        chosen, rejected = every_other(sums)
        ref_chosen, ref_rejected = every_other(exp.targets["ref_log_probs"])
        loss = self.pair_loss(chosen, rejected, ref_chosen, ref_rejected).sum() / num_pairs
        nll = -every_other(means)[0].sum() / num_pairs  # of the chosen responses, each weighing the same
        metrics = {"step/nll_loss": nll.detach()} if self.config.dpo.nll_loss_coef else {}
        if self.config.dpo.nll_loss_coef:
            loss = loss + self.config.dpo.nll_loss_coef * nll
        good = implicit_rewards(chosen, ref_chosen, beta=beta)
        bad = implicit_rewards(rejected, ref_rejected, beta=beta)
        return loss, metrics | {
            "step/loss": loss.detach(),
            "step/accuracy": pair_accuracy(good, bad).sum() / num_pairs,
            "step/margin": (good - bad).sum() / num_pairs,
            "step/rewards/chosen": good.sum() / num_pairs,
            "step/rewards/rejected": bad.sum() / num_pairs,
        }

    def counts(self, rows: SupervisedSet) -> BatchCounts:
        return rows.counts

    def summary(self, metrics: dict[str, float]) -> dict[str, float]:
        return metrics


def response_log_probs(engine: Any, exp: Experience) -> tuple[Tensor, Tensor]:
    """Sums and per-token means of each response's log-probs, (B,) both; (0,) for a micro-batch without samples, whose
    only row has no response."""
    log_probs, _ = engine(exp.sequences, exp.action_mask)
    has_response = exp.action_mask.any(1)
    sums, means = sequence_log_probs(log_probs, exp.action_mask)
    return sums[has_response], means[has_response]


def add_reference_log_probs(
    setting: Setting, config: SupervisedConfig, ref_pretrain: str | None, *, group_size: int
) -> None:
    """Score every sequence of the sets with the reference model: target "ref_log_probs", the sum over the response.

    Each `group_size` consecutive ones are scored together. The model is built for this alone and freed again, before
    the one that trains is built. A collective.
    """
    flag, name = ("--ref_pretrain", ref_pretrain) if ref_pretrain else ("--pretrain", config.model.pretrain)
    strategy = setting.strategy
    check_same_ids(setting.tokenizer, config.model, str(name), flag)
    with strategy.loading(frozen=True):
        model = load_causal_lm(
            replace(config.model, pretrain=name),
            dtype=strategy.dtype,
            flag=flag,
            **quantization(config.lora, strategy.dtype),  # as the policy's, which would differ from it by rounding
        )
    check_vocabulary(model, setting, f"{flag} {name}")
    reference = strategy.frozen(Actor(model, layout=layout_of(config, model)))
    size = config.optim.micro_train_batch_size
    with strategy.on_device(reference):
        check_forward(reference, f"{flag} {name}")
        for rows in setting.sets:
            with setting.phase("ref_log_probs", rows.num_sequences) as progress:
                rows.targets["ref_log_probs"] = sequence_sums(reference, rows, size, group_size, progress)
    del reference, model
    free_memory()


def sequence_sums(model: Any, rows: SupervisedSet, micro_batch_size: int, group_size: int, progress: Any) -> array:
    """The sum of the response's log-probs of every sequence, the same on all ranks. A collective."""
    sums = array("d")
    size = SCORED_ROWS * comm.world_size()
    options = {"micro_batch_size": micro_batch_size, "group_size": group_size, "progress": progress}
    for start in range(0, len(rows), size):
        chunk = range(start, min(start + size, len(rows)))
        samples = rows.samples(split_evenly(chunk, comm.world_size())[comm.rank()])
        score_samples(log_probs_of(model), samples, "log_probs", **options)
        mine = [float(s.log_probs.double().sum()) for s in samples if s.log_probs is not None]
        sums.extend(value for share in comm.all_gather_object(mine) for value in share)
    return sums
