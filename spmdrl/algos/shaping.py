"""Reward shaping before the advantages: (B,) rewards in, (B,) out. B samples, A next-token steps, K reward sources."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from spmdrl.algos.advantages import group_rows
from spmdrl.algos.tensor_ops import check_finite


def clip_rewards(rewards: Tensor, reward_clip_range: tuple[float, float] | None) -> Tensor:
    """Rewards clipped before the group baseline (TRL's RLOO); OpenRLHF clips after it, in `token_rewards`."""
    return rewards if reward_clip_range is None else rewards.clamp(*reward_clip_range)


def weighted_sum(rewards: Tensor, weights: Sequence[float]) -> Tensor:
    """(B, K) -> (B,): sum_k w_k r_k. A reward of weight 0 is only logged: NaN in it changes nothing."""
    assert rewards.shape[1] == len(weights), f"{rewards.shape[1]} rewards a sample for {len(weights)} weights"
    factors = rewards.new_tensor(list(weights))
    return torch.where(factors == 0, 0.0, rewards * factors).sum(1)


def overlong_penalty(
    lengths: Tensor,
    *,
    generate_max_len: int,
    overlong_buffer_len: int,
    overlong_penalty_factor: float = 1.0,
    saturate: bool = True,
) -> Tensor:
    """(B,) response lengths -> (B,) penalties <= 0 to be added to the rewards.

    -factor * clip((length - (max - buffer)) / buffer, 0, 1): 0 up to max - buffer, linear from there to -factor at
    max. DAPO, https://arxiv.org/abs/2503.14476, equation 13. Saturates beyond max as in the paper, OpenRLHF and TRL;
    verl's keeps growing: `saturate=False`. The two differ only for responses longer than generate_max_len.
    """
    excess = (lengths.float() - (generate_max_len - overlong_buffer_len)) / overlong_buffer_len
    return -overlong_penalty_factor * excess.clamp(min=0.0, max=1.0 if saturate else None)


def stop_properly_penalty(rewards: Tensor, truncated: Tensor, *, stop_properly_penalty_coef: float) -> Tensor:
    """Rewards of truncated samples times the coefficient; a negative coefficient replaces them. Source: OpenRLHF."""
    coef = stop_properly_penalty_coef
    penalized = rewards * coef if coef >= 0 else torch.full_like(rewards, coef)
    return torch.where(truncated, penalized, rewards)


def mask_truncated(mask: Tensor, truncated: Tensor) -> Tensor:
    """(B, A) mask without the rows of truncated samples: they leave the loss and its counts (DAPO's overlong filter).

    Their rewards still enter the group's baseline; take them out of that with `shape_rewards(valid=)`.
    """
    return mask & ~truncated[:, None]


class RunningMoments:
    """Mean and variance of all rewards so far, for normalising them.

    Takes summed (count, mean, squared deviations), so that micro-batches, ranks and steps merge in any order to the
    moments of the union, without the cancellation of a sum of squares.
    Source: Chan et al. 1979, http://i.stanford.edu/pub/cstr/reports/cs/tr/79/773/CS-TR-79-773.pdf
    """

    def __init__(self):
        self.count, self.mean, self.squares = 0.0, 0.0, 0.0

    def update(self, rewards: Tensor) -> None:
        """Take in the rewards of the whole step, all ranks' together: a NaN among them is an error."""
        check_finite("rewards", rewards)
        batch = RunningMoments()
        if rewards.numel():
            batch.count, batch.mean = float(rewards.numel()), float(rewards.double().mean())
            batch.squares = float((rewards.double() - batch.mean).square().sum())
        self.merge(batch)

    def merge(self, other: "RunningMoments") -> None:
        """Become the moments of both."""
        total = self.count + other.count
        if total == 0:
            return
        delta = other.mean - self.mean
        self.squares += other.squares + delta**2 * self.count * other.count / total
        self.mean += delta * other.count / total
        self.count = total

    @property
    def std(self) -> float:
        """Over N - 1; 1 before there are two rewards or while all are equal, so that dividing by it is safe."""
        variance = self.squares / (self.count - 1) if self.count > 1 else 0.0
        return variance**0.5 if variance > 0 else 1.0

    def normalize(self, rewards: Tensor) -> Tensor:
        """(r - mean) / std."""
        return ((rewards.double() - self.mean) / self.std).to(rewards.dtype)

    def state_dict(self) -> dict[str, float]:
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.count, self.mean, self.squares = state["count"], state["mean"], state["squares"]


def group_is_informative(rewards: Tensor, group_ids: Tensor, low: float, high: float) -> Tensor:
    """(B,) -> (B,) bool: whether the mean reward of the sample's group is strictly between low and high.

    With rewards of 0 and 1 and the range (0, 1), a group of all right or all wrong answers is out: it has no
    gradient. Dynamic sampling of DAPO, https://arxiv.org/abs/2503.14476. Needs whole groups, in any order.
    """
    check_finite("rewards", rewards)
    keep = torch.zeros_like(rewards, dtype=torch.bool)
    for rows in group_rows(group_ids):
        group = rewards[rows].double()
        # The mean of equal rewards can round to beside them; the bounds are open, so it must not.
        mean = float(group[0] if bool((group == group[0]).all()) else group.mean())
        keep[rows] = low < mean < high
    return keep
