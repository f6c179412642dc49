"""Reward models: a scalar head trained on pairs of responses."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from spmdrl.algos.losses import BatchCounts
from spmdrl.algos.preference import RM_LOSSES, pair_accuracy
from spmdrl.config.supervised import RMConfig
from spmdrl.data.conversations import ChatTemplate, TextTemplate
from spmdrl.data.supervised import PairRows, RowRenderer, SupervisedSet
from spmdrl.distributed import comm
from spmdrl.experience import Experience, Sample
from spmdrl.models.lora import add_lora, quantization
from spmdrl.models.value_head import load_reward_model
from spmdrl.trainer.build import enable_checkpointing
from spmdrl.trainer.objectives import Setting, check_vocabulary, every_other, layout_of
from spmdrl.trainer.update import LossPart, Metrics


class RewardTraining:
    """The loss of a pair is of the difference between its scores, each read at the last token of its sequence."""

    group_size, num_labels = 2, 1

    def __init__(self, config: RMConfig):
        self.config = config
        self.value_head_prefix: str | None = config.reward.value_head_prefix
        self.pair_loss = RM_LOSSES[config.reward.loss]

    def renderer(self, shape: TextTemplate | ChatTemplate) -> RowRenderer:
        return PairRows(self.config.data, shape, with_margin=self.config.reward.margin_loss)

    def prepare(self, setting: Setting) -> None:
        pass

    def load_model(self, setting: Setting) -> nn.Module:
        config, strategy = self.config, setting.strategy
        name = str(config.model.pretrain)
        with strategy.loading():
            model = load_reward_model(
                name,
                config.model,
                flag="--pretrain",
                value_head_prefix=config.reward.value_head_prefix,
                dtype=strategy.dtype,
                seed=config.seed,
                **quantization(config.lora, strategy.dtype),
            )
        check_vocabulary(model.model, setting, f"--pretrain {name}")
        if model.has_new_head:
            comm.say(f"reward model: {name} has no head, a new one is initialised")
        add_lora(model.model, config.lora, seed=config.seed)
        enable_checkpointing(model.model, config.model)
        model.layout = layout_of(config, model.model)
        return model

    def parts(self, engine: Any, samples: Sequence[Sample]) -> list[LossPart]:
        return [LossPart(samples, self.loss, group_size=2)]

    def loss(self, engine: Any, exp: Experience, counts: BatchCounts) -> tuple[Tensor, Metrics]:
        """This micro-batch's share of the loss, and its metrics."""
        scores = engine(exp.sequences, exp.lengths)
        chosen, rejected = every_other(scores)
        margin = every_other(exp.targets["margin"])[0] if "margin" in exp.targets else None
        num_pairs = counts.num_sequences / 2
        loss = self.pair_loss(chosen, rejected, margin).sum() / num_pairs
        chosen, rejected, scores = chosen.detach().double(), rejected.detach().double(), scores.detach().double()
        return loss, {
            "step/loss": loss.detach(),
            "step/accuracy": pair_accuracy(chosen, rejected).sum() / num_pairs,
            "step/margin": (chosen - rejected).sum() / num_pairs,
            "step/reward_mean": scores.sum() / counts.num_sequences,
            "step/reward_square": scores.square().sum() / counts.num_sequences,
            "step/num_scores": scores.new_tensor(len(scores)),
        }

    def counts(self, rows: SupervisedSet) -> BatchCounts:
        return rows.counts

    def summary(self, metrics: dict[str, float]) -> dict[str, float]:
        """reward_std is over all scores, chosen and rejected."""
        mean, square, count = (metrics.pop(name) for name in ("reward_mean", "reward_square", "num_scores"))
        variance = max(square - mean**2, 0.0) * count / max(count - 1, 1)
        return metrics | {"reward_mean": mean, "reward_std": variance**0.5}
