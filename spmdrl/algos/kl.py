"""Per-token KL estimates against the reference model and the controllers of their weight. B samples, A steps.

Every estimator is fn(log_probs, ref_log_probs, mask=None) -> (B, A) in float32 or more, with d = log_probs -
ref_log_probs of a token sampled from the policy; with a mask, 0 and without gradient off it.

Values are clamped to +-10 as in OpenRLHF, so that one broken token cannot outweigh a batch (k3 grows like exp(-d));
`clamp=None` leaves them as they are: TRL, and verl for k1, k2 and abs. A clamped value has no gradient.
Source: http://joschu.net/blog/kl-approx.html
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from spmdrl.algos.tensor_ops import log_ratio


def _clamp(kl: Tensor, bound: float | None) -> Tensor:
    return kl if bound is None else kl.clamp(-bound, bound)


def k1(log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor | None = None, *, clamp: float | None = 10.0) -> Tensor:
    """d: unbiased, of both signs. For the reward only, see KL_LOSS_REFUSED."""
    return _clamp(log_ratio(log_probs, ref_log_probs, mask), clamp)


def k2(log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor | None = None, *, clamp: float | None = 10.0) -> Tensor:
    """d^2 / 2: biased in value, never negative; as a loss its expected gradient is that of KL(policy || ref)."""
    return _clamp(log_ratio(log_probs, ref_log_probs, mask).square() / 2, clamp)


def k3(log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor | None = None, *, clamp: float | None = 10.0) -> Tensor:
    """exp(-d) - 1 + d: unbiased and never negative; as a loss its expected gradient is that of KL(ref || policy).

    GRPO's loss, https://arxiv.org/abs/2402.03300. exp(-d) - 1 is taken as one operation: exact near 0.
    """
    d = log_ratio(log_probs, ref_log_probs, mask)
    return _clamp(torch.expm1(-d) + d, clamp)


def k3_st(
    log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor | None = None, *, clamp: float | None = 10.0
) -> Tensor:
    """The value of k3 with the gradient of k2 (straight-through): unbiased in both. verl's k3+.

    The value is clamped, the gradient is not: a token far from the reference is still pulled back.
    """
    gradient = k2(log_probs, ref_log_probs, mask, clamp=None)
    return k3(log_probs, ref_log_probs, mask, clamp=clamp).detach() + gradient - gradient.detach()


def absolute(
    log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor | None = None, *, clamp: float | None = 10.0
) -> Tensor:
    """|d|, verl's abs: biased, a bound on neither KL."""
    return _clamp(log_ratio(log_probs, ref_log_probs, mask).abs(), clamp)


KL_ESTIMATORS: dict[str, Callable[..., Tensor]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "k3_st": k3_st,
    "abs": absolute,
}

# Estimators that make no KL loss, and why; in the reward they are fine.
KL_LOSS_REFUSED: dict[str, str] = {
    "k1": "the gradient of k1 as a loss is zero in expectation, so it trains nothing; use k2 or k3_st",
    "abs": "the gradient of abs as a loss is that of no KL; use k2 or k3_st",
}


class FixedKLController:
    """The KL weight, always the same."""

    def __init__(self, init_kl_coef: float):
        self.value = init_kl_coef

    def update(self, current: float, n_steps: int) -> None:
        """Nothing: the weight is fixed."""

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Nothing: where --init_kl_coef was changed, it is what it is now."""


class AdaptiveKLController(FixedKLController):
    """Moves the KL weight so that the measured KL stays near a target. https://arxiv.org/abs/1909.08593, section 2.2

    value *= 1 + clip(current / target - 1, -0.2, 0.2) * n_steps / horizon, n_steps being the samples of the step.
    """

    def __init__(self, init_kl_coef: float, target: float, horizon: float):
        super().__init__(init_kl_coef)
        self.target, self.horizon = target, horizon

    def update(self, current: float, n_steps: int) -> None:
        error = min(max(current / self.target - 1, -0.2), 0.2)
        self.value *= 1 + error * n_steps / self.horizon

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.value = state["value"]
