"""Masked tensor arithmetic shared by every algorithm. B samples, A next-token steps, V vocabulary entries.

What lies off a mask never reaches a result or a gradient, NaN and inf included: values are selected, not multiplied.
"""

import torch
from torch import Tensor


def select(x: Tensor, mask: Tensor) -> Tensor:
    """x where the mask is True and 0 elsewhere, with zero gradient elsewhere; both of the same shape."""
    assert x.shape == mask.shape, f"{tuple(x.shape)} values for a mask of {tuple(mask.shape)}"
    assert mask.dtype == torch.bool, f"mask of {mask.dtype}, expected torch.bool"
    return torch.where(mask, x, 0.0)


def masked_sum(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of x over the mask, all of it or along `dim`."""
    return select(x, mask).sum() if dim is None else select(x, mask).sum(dim)


def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of x over the mask, all of it or along `dim`; 0 where the mask is empty."""
    count = mask.sum() if dim is None else mask.sum(dim)
    return masked_sum(x, mask, dim) / count.clamp(min=1)


def broadcast_rows(row_values: Tensor, mask: Tensor) -> Tensor:
    """(B,) -> (B, A): each row's value on the row's mask, 0 elsewhere."""
    return select(row_values[:, None].expand(mask.shape), mask)


def check_finite(name: str, x: Tensor, mask: Tensor | None = None) -> None:
    """Raise FloatingPointError with counts if x, of any shape, has NaN or inf on the mask. Waits for the device."""
    bad = ~torch.isfinite(x) if mask is None else ~torch.isfinite(x) & mask
    if not bad.any():
        return
    total = x.numel() if mask is None else int(mask.sum())
    num_nan, first = int((torch.isnan(x) & bad).sum()), bad.nonzero()[0].tolist()
    raise FloatingPointError(
        f"{name}: {int(bad.sum())} of {total} values are not finite ({num_nan} NaN), the first at index {first}"
    )


def log_ratio(log_probs: Tensor, other_log_probs: Tensor, mask: Tensor | None = None) -> Tensor:
    """log_probs - other_log_probs in at least float32; 0 off the mask, NaN where either is infinite on it.

    An infinite log-prob is a broken one. Clamps further on would turn it into an ordinary number; NaN survives
    them and reaches the loss, where it is seen.
    """
    if mask is not None:
        log_probs, other_log_probs = select(log_probs, mask), select(other_log_probs, mask)
    dtype = torch.promote_types(torch.promote_types(log_probs.dtype, other_log_probs.dtype), torch.float32)
    difference = log_probs.to(dtype) - other_log_probs.to(dtype)
    return torch.where(difference.isinf(), torch.nan, difference)


def last_true(mask: Tensor) -> Tensor:
    """(B, A) -> (B, A): True only at the last True of each row; rows without any stay without."""
    return mask & (mask.flip(1).cumsum(1).flip(1) == 1)


def token_rewards(
    rewards: Tensor,
    kl: Tensor,
    mask: Tensor,
    *,
    kl_coef: float,
    reward_clip_range: tuple[float, float] | None = None,
) -> Tensor:
    """(B,) rewards and (B, A) kl -> (B, A): -kl_coef * kl at every action token, plus the reward at the last one.

    The reward sits ON the last action token, never after it, so that summing (reward + kl_coef * kl) over a row
    gives the reward. A row without action tokens gets nothing, and nothing is written off the mask: OpenRLHF
    writes the KL there too, where later sums can pick it up. `reward_clip_range` clips what is handed in, which
    in the trainer is the reward after its group baseline, as in OpenRLHF; to clip raw rewards as TRL does, use
    `shaping.clip_rewards` before the baseline. A negative kl_coef acts as 0 (OpenRLHF).
    Source: Stiennon et al. 2020, https://arxiv.org/abs/2009.01325
    """
    assert rewards.shape == mask.shape[:1], f"{tuple(rewards.shape)} rewards for a mask of {tuple(mask.shape)}"
    if reward_clip_range is not None:
        rewards = rewards.clamp(*reward_clip_range)
    penalty = -max(kl_coef, 0.0) * select(kl, mask)
    return penalty + broadcast_rows(rewards, last_true(mask))


def log_probs_from_logits(logits: Tensor, labels: Tensor, *, temperature: float = 1.0) -> Tensor:
    """(..., V) logits and (...) labels -> (...) log softmax(logits / temperature) at the labels, float32 or more.

    No shift: logits[t] scores labels[t]. In chunks, so that without autograd no second (..., V) tensor exists.
    """
    chunks = zip(_chunks(logits), labels.reshape(-1).split(_chunk_rows(logits)), strict=True)
    picked = [_log_softmax(x, temperature).gather(-1, y[:, None])[:, 0] for x, y in chunks]
    return torch.cat(picked).reshape(labels.shape)


def entropy_from_logits(logits: Tensor, *, temperature: float = 1.0) -> Tensor:
    """(..., V) logits -> (...) Shannon entropy in nats of softmax(logits / temperature), float32 or more.

    Entries of -inf (a masked vocabulary) have probability 0 and contribute 0, also to the gradient.
    """
    entropies = []
    for chunk in _chunks(logits):
        log_probs = _log_softmax(chunk, temperature)
        entropies.append(-(log_probs.exp() * log_probs.clamp(min=torch.finfo(log_probs.dtype).min)).sum(-1))
    return torch.cat(entropies).reshape(logits.shape[:-1])


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """Log softmax over the last dimension, computed in float32 or more whatever the logits are."""
    return (logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature).log_softmax(-1)


def _chunk_rows(logits: Tensor) -> int:
    """Rows of V entries that make about 4 million."""
    return max(1, 2**22 // logits.shape[-1])


def _chunks(logits: Tensor) -> tuple[Tensor, ...]:
    return logits.reshape(-1, logits.shape[-1]).split(_chunk_rows(logits))
