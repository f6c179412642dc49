"""Knowledge distillation: a policy trained on responses and on a teacher's distribution over each of their tokens."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from spmdrl.algos.losses import BatchCounts
from spmdrl.config.supervised import KDConfig
from spmdrl.data.conversations import ChatTemplate, TextTemplate
from spmdrl.data.supervised import RowRenderer, SupervisedSet, TextRows
from spmdrl.experience import Experience, Sample
from spmdrl.models.distillation import Student, Teacher
from spmdrl.models.loading import load_causal_lm
from spmdrl.models.tokenizer import check_same_ids
from spmdrl.trainer.forward_check import check_forward
from spmdrl.trainer.objectives import Setting, check_vocabulary, layout_of, load_policy
from spmdrl.trainer.update import LossPart, Metrics


class Distillation:
    """(1 - kd_coef) CE + kd_coef KL(teacher || student), every learned token of the optimizer step weighing the same.

    https://arxiv.org/abs/1503.02531. The gradient is OpenRLHF's, whose second term is the cross-entropy.
    """

    group_size, num_labels, value_head_prefix = 1, None, None

    def __init__(self, config: KDConfig):
        self.config = config
        self.teacher: Any = None

    def renderer(self, shape: TextTemplate | ChatTemplate) -> RowRenderer:
        return TextRows(self.config.data, shape)

    def prepare(self, setting: Setting) -> None:
        strategy, name, flag = setting.strategy, str(self.config.distillation.teacher_model), "--teacher_model"
        check_same_ids(setting.tokenizer, self.config.model, name, flag)
        with strategy.loading(frozen=True):
            model = load_causal_lm(replace(self.config.model, pretrain=name), dtype=strategy.dtype, flag=flag)
        check_vocabulary(model, setting, f"{flag} {name}")
        self.strategy = strategy
        self.teacher = strategy.frozen(Teacher(model, layout=layout_of(self.config, model)))
        with strategy.on_device(self.teacher):
            check_forward(self.teacher, f"{flag} {name}")

    def load_model(self, setting: Setting) -> nn.Module:
        return load_policy(self.config, setting, Student)

    def parts(self, engine: Any, samples: Sequence[Sample]) -> list[LossPart]:
        return [LossPart(samples, self.loss)]

    def loss(self, engine: Any, exp: Experience, counts: BatchCounts) -> tuple[Tensor, Metrics]:
        """This micro-batch's share of the loss, and its metrics."""
        with self.strategy.on_device(self.teacher):
            over_teacher = partial(self.teacher, self.teacher(exp.sequences, exp.action_mask))
            kd_coef = self.config.distillation.kd_coef
            sums = engine(exp.sequences, exp.action_mask, over_teacher=over_teacher, kd_coef=kd_coef)
        loss, lm_loss, kd_loss = (value / max(counts.num_tokens, 1) for value in sums)
        return loss, {
            "step/loss": loss.detach(),
            "step/lm_loss": lm_loss.detach(),
            "step/kd_loss": kd_loss.detach(),
        }

    def counts(self, rows: SupervisedSet) -> BatchCounts:
        return rows.counts

    def summary(self, metrics: dict[str, float]) -> dict[str, float]:
        return metrics
