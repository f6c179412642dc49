"""Weights against the engine and the trainer disagreeing on the probability of the same tokens.

The engine samples from its own arithmetic; old_log_probs come from the trainer's forward of the same weights. The
ratio w = exp(old_log_probs - rollout_log_probs) turns samples of the one into samples of the other; each correction
tames it differently and returns detached weights (B, A), zero off the mask, that multiply the per-token policy loss.
Denominators keep counting what a mask drops. Log ratios are clamped to +-20. B samples, A next-token steps.

`rollout_correction_range` is (low, high) of the ratio, None for the default that each function states; 0 and inf
leave an end open. Sources: https://fengyao.notion.site/off-policy-rl (tis), https://arxiv.org/abs/2510.18855 (icepop),
and the rollout correction of OpenRLHF, TRL and verl, whose differences the docstrings name.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from spmdrl.algos.tensor_ops import broadcast_rows, log_ratio, masked_mean, masked_sum, select

Range = tuple[float, float]
MAX_LOG_RATIO = 20.0


def _token_log_ratio(old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> Tensor:
    """(B, A) detached old - rollout, clamped, 0 off the mask, NaN where either is not finite on it."""
    return log_ratio(old_log_probs, rollout_log_probs, mask).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _row_log_ratio(old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> Tensor:
    """(B,) detached sum of the row's log ratios, clamped: the log of the ratio of whole responses."""
    log_ratios = log_ratio(old_log_probs, rollout_log_probs, mask).detach()
    return masked_sum(log_ratios, mask, dim=1).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _zero_outside(weights: Tensor, ratio: Tensor, bounds: Range) -> Tensor:
    """weights where bounds hold the ratio, else 0; a NaN ratio is outside neither bound and stays to be seen."""
    return torch.where((ratio < bounds[0]) | (ratio > bounds[1]), 0.0, weights)


def no_correction(old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> Tensor:
    """1 on the mask: the engine's log-probs do not enter the loss."""
    return mask.to(torch.promote_types(old_log_probs.dtype, torch.float32))


def tis(
    old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, *, rollout_correction_range: Range | None = None
) -> Tensor:
    """Token truncation: w clipped to the range, by default (0, 2). (B, A) -> (B, A)

    Truncated from above only, as in verl and the original: raising small weights adds bias and saves no variance.
    A low end above 0 clips both ends, as OpenRLHF (0.5, 5) and TRL can.
    """
    ratio = _token_log_ratio(old_log_probs, rollout_log_probs, mask).exp()
    return select(ratio.clamp(*(rollout_correction_range or (0.0, 2.0))), mask)


def icepop(
    old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, *, rollout_correction_range: Range | None = None
) -> Tensor:
    """Token mask: w inside the range, by default (0.5, 5), and 0 outside. (B, A) -> (B, A)"""
    ratio = _token_log_ratio(old_log_probs, rollout_log_probs, mask).exp()
    return select(_zero_outside(ratio, ratio, rollout_correction_range or (0.5, 5.0)), mask)


def seq_mask_tis(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    *,
    rollout_correction_range: Range | None = None,
    rollout_token_cap: float | None = 2.0,
) -> Tensor:
    """Rows whose geometric mean of w is outside the range, by default (0.5, 5), get 0; others min(w, cap) per token.

    (B, A) -> (B, A). OpenRLHF's mode of this name announces truncated weights and does not truncate them:
    `rollout_token_cap=None`. The cap is on by default because a row within bounds can hold a token far outside.
    """
    log_ratios = _token_log_ratio(old_log_probs, rollout_log_probs, mask)
    row_ratio = broadcast_rows(masked_mean(log_ratios, mask, dim=1).exp(), mask)
    weights = log_ratios.exp().clamp(max=rollout_token_cap) if rollout_token_cap is not None else log_ratios.exp()
    return select(_zero_outside(weights, row_ratio, rollout_correction_range or (0.5, 5.0)), mask)


def seq_tis(
    old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, *, rollout_correction_range: Range | None = None
) -> Tensor:
    """Sequence truncation: the product of the row's w clipped to the range, by default (0, 2). (B, A) -> (B, A)

    TRL's sequence_truncate and verl's sequence level. Unbiased up to the truncation, where token weights are not.
    """
    ratio = _row_log_ratio(old_log_probs, rollout_log_probs, mask).exp()
    return broadcast_rows(ratio.clamp(*(rollout_correction_range or (0.0, 2.0))), mask)


def seq_mask(
    old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, *, rollout_correction_range: Range | None = None
) -> Tensor:
    """Sequence mask: the product of the row's w inside the range, by default (0, 2), and 0 outside. (B, A) -> (B, A)

    TRL's sequence_mask.
    """
    ratio = _row_log_ratio(old_log_probs, rollout_log_probs, mask).exp()
    return broadcast_rows(_zero_outside(ratio, ratio, rollout_correction_range or (0.0, 2.0)), mask)


CORRECTIONS: dict[str, Callable[..., Tensor]] = {
    "none": no_correction,
    "tis": tis,
    "icepop": icepop,
    "seq-mask-tis": seq_mask_tis,
    "seq-tis": seq_tis,
    "seq-mask": seq_mask,
}


def normalize_weights(weights: Tensor, stats: Tensor) -> Tensor:
    """Weights divided by their mean over the whole batch, whose summed `masked_stats` are `stats` (verl's option)."""
    return (weights.double() * stats[2] / stats[0]).to(weights.dtype)


REJECTION_DIVERGENCES: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda log_ratios: -log_ratios,
    "k2": lambda log_ratios: log_ratios.square() / 2,
    "k3": lambda log_ratios: torch.expm1(log_ratios) - log_ratios,
}


def rejection_mask(
    old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, *, statistic: str, bounds: Range
) -> Tensor:
    """(B, A) bool: the action tokens that stay when those, or rows, of too large a mismatch are dropped.

    statistic: token_, seq_sum_, seq_mean_ or seq_max_ followed by a divergence of log ratios s = old - rollout:
    k1 = -s, k2 = s^2 / 2, k3 = exp(s) - 1 - s. seq_mean_k1 is the geometric mean of the ratio.
    bounds: for k1 of the ratio rollout / trainer (the inverse of w, as verl has it), compared as logarithms; for k2
    and k3 of the divergence itself. A statistic of NaN stays. Source: verl's rollout rejection.
    """
    level, divergence = statistic.rsplit("_", 1)
    kl = select(REJECTION_DIVERGENCES[divergence](_token_log_ratio(old_log_probs, rollout_log_probs, mask)), mask)
    if level == "seq_sum":
        kl = broadcast_rows(masked_sum(kl, mask, dim=1), mask)
    elif level == "seq_mean":
        kl = broadcast_rows(masked_mean(kl, mask, dim=1), mask)
    elif level == "seq_max":
        kl = broadcast_rows(torch.where(mask, kl, -torch.inf).amax(dim=1), mask)
    else:
        assert level == "token", f"unknown level {level!r} in statistic {statistic!r}"
    low, high = torch.tensor(bounds, dtype=torch.float64).log().tolist() if divergence == "k1" else bounds
    return mask & ~((kl < low) | (kl > high))


def mismatch_metrics(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    weights: Tensor,
    *,
    inside: Range = (0.9, 1.1),
) -> dict[str, Tensor]:
    """Detached (B, A) tensors, zero off the mask, whose sums over the batch divided by the token count are

    abs_diff: mean |old - rollout|;  kl: mean rollout - old, the k1 estimate of KL(engine || trainer);  kl_k3: its k3
    estimate;  chi2: mean w^2 - 1;  outside: share of tokens with w outside `inside`;  weight, weight_sq: moments of
    the correction's `weights`, from which `effective_sample_size` follows. The maximum is not a sum: `mismatch_max`.
    """
    difference = _token_log_ratio(old_log_probs, rollout_log_probs, mask)
    ratio = difference.exp()
    pieces = {
        "abs_diff": difference.abs(),
        "kl": -difference,
        "kl_k3": torch.expm1(difference) - difference,
        "chi2": ratio.square() - 1,
        "outside": ((ratio < inside[0]) | (ratio > inside[1])).to(ratio.dtype),
        "weight": weights,
        "weight_sq": weights.square(),
    }
    return {f"mismatch/{name}": select(piece.detach(), mask) for name, piece in pieces.items()}


def mismatch_max(old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> Tensor:
    """() largest |old - rollout| on the mask, 0 without tokens; combine over micro-batches and ranks by maximum."""
    difference = log_ratio(old_log_probs, rollout_log_probs, mask).detach().abs()
    return difference.max() if difference.numel() else difference.new_zeros(())


def effective_sample_size(mean_weight: float, mean_weight_sq: float) -> float:
    """mean(w)^2 / mean(w^2), the share of the tokens that the weighted batch is worth: 1 where all weights agree."""
    return mean_weight**2 / mean_weight_sq if mean_weight_sq > 0 else 0.0


def sequence_mismatch(old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Detached (B,) tensors to be averaged over rows: perplexities exp(-mean log-prob) under trainer and engine,

    their log difference and ratio (trainer over engine), and chi2_seq = w^2 - 1 with w the product of the row's
    ratios. Source: verl's off-policy metrics.
    """
    trainer_nll = -masked_mean(old_log_probs.detach(), mask, dim=1)
    engine_nll = -masked_mean(rollout_log_probs.detach(), mask, dim=1)
    difference = trainer_nll - engine_nll
    return {
        "mismatch/trainer_ppl": trainer_nll.exp(),
        "mismatch/engine_ppl": engine_nll.exp(),
        "mismatch/log_ppl_diff": difference,
        "mismatch/ppl_ratio": difference.exp(),
        "mismatch/chi2_seq": (2 * _row_log_ratio(old_log_probs, rollout_log_probs, mask)).exp() - 1,
    }
