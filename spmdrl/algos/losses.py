"""Losses per token, (B, A) and zero off the mask, and the ways to add them up. B samples, A next-token steps.

Nothing here divides by what a micro-batch holds: AGGREGATIONS divide by the counts of the whole optimizer step, over
all ranks and micro-batches, so that the parts add up to the loss of the whole. To add a policy loss, write
fn(log_probs, old_log_probs, advantages, mask, *, settings) and give it a row of POLICY_LOSSES; a setting is filled
from the flag of the same name. Metrics are detached (B, A) tensors, to be summed and divided by the token count.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from spmdrl.algos.tensor_ops import broadcast_rows, log_ratio, masked_mean, masked_sum, select

Metrics = dict[str, Tensor]
MAX_LOG_RATIO = 20.0  # exp(20) = 5e8: beyond it float32 products overflow; no ratio that still trains is near it


def _log_ratio(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    """log(pi / pi_old) per token, 0 off the mask; clamped to +-20 as in OpenRLHF and verl."""
    return log_ratio(log_probs, old_log_probs, mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _sequence_log_ratio(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    """(B,) mean log ratio of each row's tokens, 0 for a row without any."""
    return masked_mean(log_ratio(log_probs, old_log_probs, mask), mask, dim=1).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _finite_log_probs(log_probs: Tensor, mask: Tensor) -> Tensor:
    """log_probs under the rules of `log_ratio`: float32 or more, 0 off the mask, NaN where infinite on it."""
    return log_ratio(log_probs, torch.zeros_like(log_probs), mask)


def _clip_bounds(eps_clip: float, eps_clip_low_high: tuple[float, float] | None) -> tuple[float, float]:
    low, high = (eps_clip, eps_clip) if eps_clip_low_high is None else eps_clip_low_high
    return 1 - low, 1 + high


def _metrics(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor, **extra: Tensor) -> Metrics:
    """approx_kl = old - new per token, unclamped as in OpenRLHF: a token that exploded must show; plus `extra`."""
    approx_kl = -log_ratio(log_probs, old_log_probs, mask)
    ratio = select(_log_ratio(log_probs, old_log_probs, mask).exp(), mask)
    pieces = {"approx_kl": approx_kl, "ratio": ratio, **extra}
    return {f"policy/{name}": piece.detach().to(approx_kl.dtype) for name, piece in pieces.items()}


def _clipped_surrogate(
    ratio: Tensor, advantages: Tensor, bounds: tuple[float, float], dual_clip: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """-min(r A, clip(r) A), bounded below by dual_clip * A where A < 0; with where each clip is at work."""
    unclipped, clipped = ratio * advantages, ratio.clamp(*bounds) * advantages
    objective = torch.min(unclipped, clipped)
    is_capped = torch.zeros_like(objective, dtype=torch.bool)
    if dual_clip is not None:
        is_capped = (advantages < 0) & (objective < dual_clip * advantages)
        objective = torch.where(is_capped, dual_clip * advantages, objective)
    return -objective, clipped < unclipped, is_capped


def ppo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    eps_clip: float = 0.2,
    eps_clip_low_high: tuple[float, float] | None = None,
    dual_clip: float | None = None,
) -> tuple[Tensor, Metrics]:
    """-min(r A, clip(r, 1 - low, 1 + high) A) with r = exp(log_probs - old_log_probs). (B, A) -> (B, A)

    PPO, https://arxiv.org/abs/1707.06347; low < high is DAPO's clip-higher, https://arxiv.org/abs/2503.14476.
    dual_clip c > 1 bounds the loss of A < 0 by c |A|, https://arxiv.org/abs/1912.09729. Off by default as in
    OpenRLHF and the PPO paper; verl always has it, at 3. TRL's `delta` caps the ratio itself, which is the same
    function for delta > 1 + high.
    """
    advantages = select(advantages, mask)
    loss, is_clipped, is_capped = _clipped_surrogate(
        _log_ratio(log_probs, old_log_probs, mask).exp(),
        advantages,
        _clip_bounds(eps_clip, eps_clip_low_high),
        dual_clip,
    )
    metrics = _metrics(log_probs, old_log_probs, mask, clip_frac=is_clipped, dual_clip_frac=is_capped)
    return select(loss, mask), metrics


def gspo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    eps_clip: float = 0.2,
    eps_clip_low_high: tuple[float, float] | None = None,
    dual_clip: float | None = None,
) -> tuple[Tensor, Metrics]:
    """-min(s A, clip(s) A) with one ratio per row, s = exp(mean_t log r_t), at each of its tokens. (B, A) -> (B, A)

    GSPO, https://arxiv.org/abs/2507.18071, which clips at 3e-4 and 4e-4. The gradient goes through the mean, as in
    OpenRLHF and TRL; verl's token form is `gspo_token`, the same where A is constant along the row. The paper's
    objective weighs rows equally: aggregate by seq-mean-token-mean (see AGGREGATION_OF). token-mean and
    seq-mean-token-sum are well defined and weigh a row by its length. For OpenRLHF's GSPO under rollout correction
    hand in the engine's log-probs as old_log_probs.
    """
    ratio = broadcast_rows(_sequence_log_ratio(log_probs, old_log_probs, mask).exp(), mask)
    bounds = _clip_bounds(eps_clip, eps_clip_low_high)
    loss, is_clipped, is_capped = _clipped_surrogate(ratio, select(advantages, mask), bounds, dual_clip)
    metrics = _metrics(log_probs, old_log_probs, mask, clip_frac=is_clipped & mask, dual_clip_frac=is_capped)
    return select(loss, mask), metrics


def gspo_token(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    eps_clip: float = 0.2,
    eps_clip_low_high: tuple[float, float] | None = None,
) -> tuple[Tensor, Metrics]:
    """GSPO-token: the value of `gspo`, with s_t = stopgrad(s) pi_t / stopgrad(pi_t). (B, A) -> (B, A)

    Token t gets the gradient of its own advantage, s A_t, for advantages that differ along the row.
    Section 4.3 of https://arxiv.org/abs/2507.18071; what verl calls gspo.
    """
    own = log_ratio(log_probs, old_log_probs, mask)
    row = broadcast_rows(_sequence_log_ratio(log_probs, old_log_probs, mask).detach(), mask)
    ratio = (row + own - own.detach()).exp()
    bounds = _clip_bounds(eps_clip, eps_clip_low_high)
    loss, is_clipped, _ = _clipped_surrogate(ratio, select(advantages, mask), bounds, None)
    return select(loss, mask), _metrics(log_probs, old_log_probs, mask, clip_frac=is_clipped & mask)


def cispo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    eps_clip: float = 0.2,
    eps_clip_low_high: tuple[float, float] | None = None,
) -> tuple[Tensor, Metrics]:
    """-stopgrad(clip(r, 1 - low, 1 + high)) A log_probs: every token keeps a gradient. (B, A) -> (B, A)

    CISPO of MiniMax-M1, https://arxiv.org/abs/2506.13585, which does not clip below: low = 1. TRL's epsilon_high is
    the cap itself, so epsilon_high 5 there is eps_clip_low_high (1, 4) here.
    """
    ratio = _log_ratio(log_probs, old_log_probs, mask).exp().detach()
    weight = ratio.clamp(*_clip_bounds(eps_clip, eps_clip_low_high))
    loss = -weight * select(advantages, mask) * _finite_log_probs(log_probs, mask)
    return select(loss, mask), _metrics(log_probs, old_log_probs, mask, clip_frac=(weight != ratio) & mask)


def sapo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    sapo_tau_pos: float = 1.0,
    sapo_tau_neg: float = 1.05,
) -> tuple[Tensor, Metrics]:
    """-A (4 / tau) sigmoid(tau (r - 1)), tau by the sign of A: a soft gate instead of a clip. (B, A) -> (B, A)

    SAPO, https://arxiv.org/abs/2511.20347. At r = 1 its gradient is that of the plain policy gradient.
    """
    ratio, advantages = _log_ratio(log_probs, old_log_probs, mask).exp(), select(advantages, mask)
    tau = torch.full_like(ratio, sapo_tau_neg).masked_fill(advantages > 0, sapo_tau_pos)
    loss = -advantages * 4 / tau * torch.sigmoid(tau * (ratio - 1))
    return select(loss, mask), _metrics(log_probs, old_log_probs, mask)


def gpg(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor) -> tuple[Tensor, Metrics]:
    """-A log_probs, the policy gradient without a ratio. (B, A) -> (B, A). GPG, https://arxiv.org/abs/2504.02546"""
    loss = -select(advantages, mask) * _finite_log_probs(log_probs, mask)
    return loss, _metrics(log_probs, old_log_probs, mask)


def gmpo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    eps_clip: float = 0.2,
    eps_clip_low_high: tuple[float, float] | None = None,
) -> tuple[Tensor, Metrics]:
    """-mean(A) exp(mean_t of the clipped log r_t), at each token of the row. (B, A) -> (B, A)

    The log ratio is clipped to [-low, high] on the side where clipping lowers the objective, for the sign of A.
    GMPO, https://arxiv.org/abs/2507.20673, with 0.4 and 0.4; aggregate by seq-mean-token-mean (see AGGREGATION_OF).
    """
    low, high = (eps_clip, eps_clip) if eps_clip_low_high is None else eps_clip_low_high
    own, advantages = _log_ratio(log_probs, old_log_probs, mask), select(advantages, mask)
    clipped, sign = own.clamp(-low, high), advantages.sign()
    row_ratio = masked_mean(sign * torch.min(sign * own, sign * clipped), mask, dim=1).exp()
    loss = broadcast_rows(-masked_mean(advantages, mask, dim=1) * row_ratio, mask)
    outside = (clipped != own) & (advantages != 0)
    extra = {"clip_frac": outside, "clip_frac_negative": outside & (advantages < 0)}
    return loss, _metrics(log_probs, old_log_probs, mask, **extra)


POLICY_LOSSES: dict[str, Callable[..., tuple[Tensor, Metrics]]] = {
    "ppo": ppo,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "cispo": cispo,
    "sapo": sapo,
    "gpg": gpg,
    "gmpo": gmpo,
}

# The aggregation that a loss's paper states, where it is not token-mean.
AGGREGATION_OF: dict[str, str] = {
    "gspo": "seq-mean-token-mean",
    "gspo_token": "seq-mean-token-mean",
    "sapo": "seq-mean-token-mean",
    "gmpo": "seq-mean-token-mean",
}


@dataclass(frozen=True)
class BatchCounts:
    """Counts of one whole optimizer step, over all ranks and micro-batches.

    num_sequences: rows with at least one action token; empty and padding rows are left out, as in OpenRLHF and verl.
    max_tokens: the constant of seq-mean-token-sum-norm, normally generate_max_len; the same in every step.
    """

    num_tokens: float
    num_sequences: float
    max_tokens: float = 1

    @classmethod
    def of(cls, mask: Tensor, max_tokens: float = 1) -> "BatchCounts":
        """What this (B, A) mask alone holds; sum num_tokens and num_sequences over micro-batches and ranks."""
        return cls(int(mask.sum()), int(mask.any(dim=1).sum()), max_tokens)


def token_mean(loss: Tensor, mask: Tensor, counts: BatchCounts) -> Tensor:
    """sum / num_tokens: every token weighs the same. DAPO, https://arxiv.org/abs/2503.14476"""
    return masked_sum(loss, mask) / max(counts.num_tokens, 1)


def seq_mean_token_mean(loss: Tensor, mask: Tensor, counts: BatchCounts) -> Tensor:
    """Mean over rows of the mean over the row's tokens. GRPO, https://arxiv.org/abs/2402.03300"""
    return masked_mean(loss, mask, dim=1).sum() / max(counts.num_sequences, 1)


def seq_mean_token_sum(loss: Tensor, mask: Tensor, counts: BatchCounts) -> Tensor:
    """Mean over rows of the sum over the row's tokens: the policy gradient of whole responses."""
    return masked_sum(loss, mask) / max(counts.num_sequences, 1)


def seq_mean_token_sum_norm(loss: Tensor, mask: Tensor, counts: BatchCounts) -> Tensor:
    """sum / (num_sequences * max_tokens), a constant that no response length moves. (B, A) -> ()

    Dr. GRPO, https://arxiv.org/abs/2503.20783, and TRL. verl's mode of this name does not divide by the rows, so
    its step grows with the batch.
    """
    return masked_sum(loss, mask) / (max(counts.num_sequences, 1) * counts.max_tokens)


AGGREGATIONS: dict[str, Callable[[Tensor, Tensor, BatchCounts], Tensor]] = {
    "token-mean": token_mean,
    "seq-mean-token-mean": seq_mean_token_mean,
    "seq-mean-token-sum": seq_mean_token_sum,
    "seq-mean-token-sum-norm": seq_mean_token_sum_norm,
}


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, value_clip: float | None = None
) -> tuple[Tensor, Metrics]:
    """0.5 max((V - R)^2, (clip(V, V_old +- value_clip) - R)^2), or 0.5 (V - R)^2 without a clip. (B, A) -> (B, A)

    PPO's reference code, https://arxiv.org/abs/2005.12729; the factor 0.5 as in OpenRLHF, verl and TRL.
    """
    values, old_values, returns = select(values, mask), select(old_values, mask), select(returns, mask)
    loss, is_clipped = (values - returns).square(), torch.zeros_like(mask)
    if value_clip is not None:
        clipped = values.clamp(old_values - value_clip, old_values + value_clip)
        is_clipped = (clipped - returns).square() > loss
        loss = torch.max(loss, (clipped - returns).square())
    return 0.5 * loss, {"critic/clip_frac": is_clipped.float()}


def bind(fn: Callable[..., Any], *configs: object) -> Callable[..., Any]:
    """partial of fn with every keyword-only parameter filled from the attribute of that name on the first config
    that has one; a parameter found on none keeps its default, and without a default is an error.
    """
    settings = {}
    for name, parameter in inspect.signature(fn).parameters.items():
        if parameter.kind is not parameter.KEYWORD_ONLY:
            continue
        owner = next((config for config in configs if hasattr(config, name)), None)
        if owner is not None:
            settings[name] = getattr(owner, name)
        elif parameter.default is parameter.empty:
            sections = ", ".join(type(config).__name__ for config in configs) or "no config"
            raise AttributeError(f"{getattr(fn, '__name__', fn)} needs a setting '{name}', which {sections} lacks")
    return partial(fn, **settings)
