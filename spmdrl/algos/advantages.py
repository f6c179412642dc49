"""Advantages: rewards (B,) -> shaped rewards (B,) -> per-token advantages (B, A). B samples, G of one group, A steps.

To add an estimator, write its baseline, (G,) rewards and (G,) lengths -> (G,) shaped, and give it a row of ESTIMATORS.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from spmdrl.algos.tensor_ops import check_finite, select


def center(rewards: Tensor, lengths: Tensor) -> Tensor:
    """r_i - mean(r). Dr. GRPO, https://arxiv.org/abs/2503.20783, and REINFORCE++-baseline (which then whitens)."""
    return rewards - rewards.mean()


def leave_one_out(rewards: Tensor, lengths: Tensor) -> Tensor:
    """r_i - mean of the other rewards of the group. RLOO, https://arxiv.org/abs/2402.14740"""
    return (rewards - rewards.mean()) * len(rewards) / (len(rewards) - 1)


def standardize(rewards: Tensor, lengths: Tensor, *, eps: float = 1e-6, min_variance: float = 0.0) -> Tensor:
    """(r_i - mean(r)) / (std(r) + eps), std with G - 1 as everywhere. GRPO, https://arxiv.org/abs/2402.03300

    eps is verl's 1e-6. OpenRLHF's 1e-9 turns rewards that differ by float32 round-off into advantages of 1; TRL's
    1e-4 shrinks groups of small spread. `min_variance=1e-6` is verl's vectorised form.
    """
    std = rewards.var(correction=1).clamp(min=min_variance).sqrt()
    return (rewards - rewards.mean()) / (std + eps)


def length_weighted(rewards: Tensor, lengths: Tensor) -> Tensor:
    """r_i - sum(l r) / sum(l), the baseline of least gradient variance. OPO, https://arxiv.org/abs/2505.23585"""
    return rewards - (lengths * rewards).sum() / lengths.sum().clamp(min=1)


def best_only(rewards: Tensor, lengths: Tensor, *, eps: float = 1e-6) -> Tensor:
    """(best - second best) / (std(r) + eps) for the best sample, 0 for the rest. Pass@k, as verl's GRPO_PASSK."""
    best, second = rewards.topk(2).values
    is_best = torch.arange(len(rewards), device=rewards.device) == rewards.argmax()
    return torch.where(is_best, (best - second) / (rewards.std(correction=1) + eps), 0.0)


@dataclass(frozen=True)
class Estimator:
    """What the trainer must know of an estimator; it reads these once, at construction.

    baseline: applied within each group before tokens come in; None leaves the rewards as they are.
    whiten: advantages are standardised over all action tokens of all ranks.
    needs_critic: advantages come from `gae`; otherwise from `cumulative_returns` of the token rewards.
    needs_greedy: the reward of a greedy response to the same prompt is subtracted.
    min_samples: least n_samples_per_prompt for which the baseline means something.
    batch_std: shaped rewards are divided by the standard deviation of the whole batch's rewards.
    """

    baseline: Callable[[Tensor, Tensor], Tensor] | None
    whiten: bool
    needs_critic: bool = False
    needs_greedy: bool = False
    min_samples: int = 1
    batch_std: bool = False


# Whitened: what OpenRLHF whitens, which is what verl whitens and the papers of PPO and REINFORCE++ ask for.
ESTIMATORS: dict[str, Estimator] = {
    "gae": Estimator(None, whiten=True, needs_critic=True),
    "reinforce": Estimator(None, whiten=True),
    "reinforce_baseline": Estimator(center, whiten=True, min_samples=2),
    "rloo": Estimator(leave_one_out, whiten=False, min_samples=2),
    "group_norm": Estimator(standardize, whiten=False, min_samples=2),
    "dr_grpo": Estimator(center, whiten=False, min_samples=2),
    "remax": Estimator(None, whiten=False, needs_greedy=True),
    "opo": Estimator(length_weighted, whiten=False, min_samples=2),
    "grpo_passk": Estimator(best_only, whiten=False, min_samples=2),
    "group_mean_batch_std": Estimator(center, whiten=False, min_samples=2, batch_std=True),
}


def shape_rewards(
    rewards: Tensor,
    group_ids: Tensor,
    estimator: Estimator,
    *,
    lengths: Tensor,
    greedy_rewards: Tensor | None = None,
    valid: Tensor | None = None,
    keep_singletons: bool = False,
) -> Tensor:
    """(B,) -> (B,): rewards with the estimator's baseline taken out, for groups of any size and order.

    Group statistics need whole groups, so the B rows are those of all ranks, not of one.
    A group of equal rewards gets exactly 0, whatever they round to; statistics are taken in float64.
    valid: (B,) bool; samples without a reward (False) get 0 and enter no statistic (TRL does so with NaN rewards).
    keep_singletons: a group left with one sample keeps its reward, as in verl's GRPO and RLOO. By default it gets 0:
    it has nothing to be compared with, and its raw reward is on another scale than the other groups' advantages.
    """
    valid = torch.ones_like(rewards, dtype=torch.bool) if valid is None else valid
    check_finite("rewards", rewards, valid)
    if estimator.needs_greedy:
        assert greedy_rewards is not None, "the estimator needs the rewards of greedy responses, got none"
        check_finite("greedy_rewards", greedy_rewards, valid)
        rewards = rewards - greedy_rewards
    shaped = select(rewards.double(), valid)
    if estimator.baseline is None:
        return shaped.to(rewards.dtype)
    for rows in group_rows(group_ids, valid):
        group = shaped[rows]
        if len(rows) == 1 and keep_singletons:
            continue
        is_equal = bool((group == group[0]).all())
        shaped[rows] = torch.zeros_like(group) if is_equal else estimator.baseline(group, lengths[rows].double())
    if estimator.batch_std:
        shaped = shaped / (rewards[valid].double().std(correction=1).nan_to_num() + 1e-4)
    return shaped.to(rewards.dtype)


def group_rows(group_ids: Tensor, valid: Tensor | None = None) -> Iterator[Tensor]:
    """The row numbers of each group in turn, groups by ascending id; rows outside `valid` are left out."""
    rows = torch.arange(len(group_ids), device=group_ids.device) if valid is None else valid.nonzero()[:, 0]
    order = group_ids[rows].argsort(stable=True)
    counts = group_ids[rows][order].unique_consecutive(return_counts=True)[1]
    yield from rows[order].split(counts.tolist())


def group_std(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """(B,) -> (B,): standard deviation (G - 1) of the rewards of the row's group, 0 where they are all equal."""
    spread = Estimator(_constant_std, whiten=False)
    return shape_rewards(rewards, group_ids, spread, lengths=torch.ones_like(rewards))


def _constant_std(rewards: Tensor, lengths: Tensor) -> Tensor:
    return rewards.std(correction=1).expand_as(rewards)


def cumulative_returns(token_rewards: Tensor, mask: Tensor, *, gamma: float, skip_holes: bool = True) -> Tensor:
    """(B, A) -> (B, A): G_t = r_t + gamma G_(t+1) over action tokens, 0 off the mask.

    A hole in the mask (a tool's or the user's tokens) is no step: the discount counts action tokens, and rewards in
    it do not exist. OpenRLHF discounts at every column of the hole: `skip_holes=False`.
    Source: REINFORCE; with gamma, https://arxiv.org/abs/2501.03262 (REINFORCE++)
    """
    rewards = select(token_rewards, mask)
    returns, future = torch.zeros_like(rewards), rewards.new_zeros(len(rewards))
    for t in range(rewards.shape[1] - 1, -1, -1):
        step = rewards[:, t] + gamma * future
        future = torch.where(mask[:, t], step, future) if skip_holes else step
        returns[:, t] = future
    return select(returns, mask)


def gae(
    token_rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lambd: float, skip_holes: bool = True
) -> tuple[Tensor, Tensor]:
    """(B, A) -> advantages (B, A), returns (B, A), both 0 off the mask; neither is whitened.

    delta_t = r_t + gamma V_(t+1) - V_t;  A_t = delta_t + gamma lambd A_(t+1);  return_t = A_t + V_t, where t + 1 is
    the next action token and V = A = 0 after the last. A hole in the mask is transparent, as in verl: the result is
    that of the row without it. OpenRLHF takes it for steps with r = V = 0, which ends the bootstrap at the hole and
    discounts through it: `skip_holes=False`. Both agree where padding is only at the ends.
    Source: Schulman et al. 2016, https://arxiv.org/abs/1506.02438
    """
    rewards, values = select(token_rewards, mask), select(values, mask)
    advantages = torch.zeros_like(values)
    next_value, advantage = values.new_zeros(len(values)), values.new_zeros(len(values))
    for t in range(values.shape[1] - 1, -1, -1):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        step = delta + gamma * lambd * advantage
        is_step = mask[:, t] if skip_holes else torch.ones_like(mask[:, t])
        advantage = torch.where(is_step, step, advantage)
        next_value = torch.where(is_step, values[:, t], next_value)
        advantages[:, t] = advantage
    advantages = select(advantages, mask)
    return advantages, advantages + values


def masked_stats(x: Tensor, mask: Tensor) -> Tensor:
    """(3,) float64 [sum, sum of squares, count] of x over the mask; adds up over micro-batches and ranks."""
    x = select(x, mask).double()
    return torch.stack([x.sum(), x.square().sum(), mask.sum().double()])


def whiten(
    x: Tensor,
    mask: Tensor,
    stats: Tensor,
    *,
    no_std_norm: bool = False,
    shift_mean: bool = True,
    unbiased: bool = False,
    eps: float = 1e-8,
) -> Tensor:
    """(B, A) -> (B, A): (x - mean) / sqrt(max(variance, eps)) by the summed `masked_stats`, 0 off the mask.

    The default is OpenRLHF's: variance over N, floored. verl and TRL divide by N - 1 and add eps: `unbiased`. With
    thousands of tokens they agree; N keeps a batch of one token defined. `no_std_norm` centres only; without
    `shift_mean` the mean is put back. float64 sums keep the variance right for float32 data with mean >> std.
    """
    count = stats[2].clamp(min=1)
    mean = stats[0] / count
    variance = (stats[1] / count - mean.square()).clamp(min=0)
    variance = variance * count / (count - 1).clamp(min=1) + eps if unbiased else variance.clamp(min=eps)
    result = x.double() - mean
    result = result if no_std_norm else result * variance.rsqrt()
    return select((result if shift_mean else result + mean).to(x.dtype), mask)
