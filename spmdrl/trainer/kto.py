"""Kahneman-Tversky optimisation: a policy trained on responses labelled wanted or unwanted,
https://arxiv.org/abs/2402.01306"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from spmdrl.algos.losses import BatchCounts
from spmdrl.algos.preference import implicit_rewards, kto
from spmdrl.config.supervised import KTOConfig
from spmdrl.data.batching import split_evenly
from spmdrl.data.conversations import ChatTemplate, TextTemplate
from spmdrl.data.supervised import LabelledRows, RowRenderer, SupervisedSet
from spmdrl.distributed import comm
from spmdrl.experience import Experience, Sample
from spmdrl.trainer.dpo import add_reference_log_probs, response_log_probs
from spmdrl.trainer.objectives import Setting, load_policy
from spmdrl.trainer.scoring import log_probs_of, score_samples
from spmdrl.trainer.update import LossPart, Metrics


class KTO:
    """A row's first sequence is its labelled response; the second, another prompt's response, is for the KL alone."""

    group_size, num_labels, value_head_prefix = 2, None, None

    def __init__(self, config: KTOConfig):
        self.config = config
        self.row_loss = partial(
            kto,
            beta=config.kto.beta,
            desirable_loss_weight=config.kto.desirable_loss_weight,
            undesirable_loss_weight=config.kto.undesirable_loss_weight,
        )

    def renderer(self, shape: TextTemplate | ChatTemplate) -> RowRenderer:
        return LabelledRows(self.config.data, shape)

    def prepare(self, setting: Setting) -> None:
        add_reference_log_probs(setting, self.config, self.config.kto.ref_pretrain, group_size=1)

    def load_model(self, setting: Setting) -> nn.Module:
        return load_policy(self.config, setting)

    def parts(self, engine: Any, samples: Sequence[Sample]) -> list[LossPart]:
        kl = self.estimate_kl(engine, samples[1::2])
        return [LossPart(samples[0::2], partial(self.loss, kl=kl))]

    def estimate_kl(self, engine: Any, samples: Sequence[Sample]) -> float:
        """Mean of log pi - log pi_ref over the optimizer step's mismatched responses, all ranks'. A collective."""
        mine = [samples[i] for i in split_evenly(range(len(samples)), comm.world_size())[comm.rank()]]
        score_samples(
            log_probs_of(engine), mine, "log_probs", micro_batch_size=self.config.optim.micro_train_batch_size
        )
        gaps = [
            float(s.log_probs.double().sum()) - s.targets["ref_log_probs"] for s in mine if s.log_probs is not None
        ]
        return float(comm.all_reduce_sum(torch.tensor(sum(gaps), dtype=torch.float64))) / len(samples)

    def loss(self, engine: Any, exp: Experience, counts: BatchCounts, *, kl: float) -> tuple[Tensor, Metrics]:
        """This micro-batch's share of the loss, and its metrics."""
        num_rows = counts.num_sequences
        log_probs, _ = response_log_probs(engine, exp)
        reference, is_wanted = exp.targets["ref_log_probs"], exp.targets["label"] == 1
        loss = self.row_loss(log_probs, reference, is_wanted, kl).sum() / num_rows
        rewards = implicit_rewards(log_probs, reference, beta=self.config.kto.beta)
        return loss, {
            "step/loss": loss.detach(),
            "step/kl": rewards.new_tensor(kl * len(rewards) / num_rows),
            "step/wanted": is_wanted.sum() / num_rows,
            "step/rewards/wanted": rewards[is_wanted].sum() / num_rows,
            "step/rewards/unwanted": rewards[~is_wanted].sum() / num_rows,
        }

    def counts(self, rows: SupervisedSet) -> BatchCounts:
        return BatchCounts(num_tokens=rows.counts.num_tokens, num_sequences=len(rows))

    def summary(self, metrics: dict[str, float]) -> dict[str, float]:
        """Rewards become means over the rows of their label; `margin` is the difference of the two."""
        share = metrics.pop("wanted")
        means = {"rewards/wanted": share, "rewards/unwanted": 1 - share}
        means = {name: metrics.pop(name) / part for name, part in means.items() if part > 0}
        if len(means) == 2:
            means["margin"] = means["rewards/wanted"] - means["rewards/unwanted"]
        return {name: value for name, value in metrics.items() if not name.startswith("rewards/")} | means
