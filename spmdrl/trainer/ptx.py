"""The language-model loss on texts that is mixed into the policy's (PPO-ptx)."""

from typing import Any

from torch import Tensor

from spmdrl.algos.losses import BatchCounts, token_mean
from spmdrl.data.texts import TextStream
from spmdrl.experience import Experience
from spmdrl.trainer.update import LossPart, Metrics


class PtxLoss:
    """ptx_coef times the mean of -log p over the tokens of as many texts as an optimizer step has samples.

    Source: Ouyang et al. 2022, https://arxiv.org/abs/2203.02155, equation 2.
    """

    def __init__(self, texts: TextStream, *, ptx_coef: float):
        self.texts, self.ptx_coef = texts, ptx_coef

    def part(self, num_samples: int) -> LossPart:
        """The next texts and their loss."""
        return LossPart(self.texts.take(num_samples), self.loss)

    def loss(self, engine: Any, exp: Experience, counts: BatchCounts) -> tuple[Tensor, Metrics]:
        """This micro-batch's share of the loss, and its metrics. Texts have temperature 1, whatever is sampled at."""
        log_probs, _ = engine(exp.sequences, exp.action_mask, temperature=1.0)
        lm_loss = token_mean(-log_probs, exp.action_mask, counts)
        loss = self.ptx_coef * lm_loss
        return loss, {"step/policy/ptx_loss": lm_loss.detach(), "step/policy/loss": loss.detach()}
