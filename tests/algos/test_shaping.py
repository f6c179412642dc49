"""Penalties, masking, running normalisation, several rewards and dynamic filtering."""

import math

import pytest
import torch
from torch.testing import assert_close

from spmdrl.algos.shaping import (
    RunningMoments,
    clip_rewards,
    group_is_informative,
    mask_truncated,
    overlong_penalty,
    stop_properly_penalty,
    weighted_sum,
)

NAN = math.nan


def t(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_the_overlong_penalty_grows_over_the_buffer_and_saturates():
    settings = {"generate_max_len": 100, "overlong_buffer_len": 20, "overlong_penalty_factor": 2.0}
    lengths = torch.tensor([0, 80, 85, 100, 130])
    assert_close(overlong_penalty(lengths, **settings), torch.tensor([0, 0, -0.5, -2, -2]))
    assert_close(overlong_penalty(lengths, **settings, saturate=False), torch.tensor([0, 0, -0.5, -2, -5]))


def test_truncated_samples_have_their_reward_scaled_or_replaced():
    rewards, truncated = t(2.0, -3.0, 5.0), torch.tensor([True, True, False])
    assert stop_properly_penalty(rewards, truncated, stop_properly_penalty_coef=0.5).tolist() == [1, -1.5, 5]
    assert stop_properly_penalty(rewards, truncated, stop_properly_penalty_coef=-1.0).tolist() == [-1, -1, 5]


def test_truncated_samples_leave_the_mask_with_all_their_tokens():
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]], dtype=torch.bool)
    assert mask_truncated(mask, torch.tensor([False, True])).int().tolist() == [[1, 1, 0], [0, 0, 0]]


def test_rewards_are_clipped_only_if_there_is_a_range():
    assert clip_rewards(t(-30.0, 0.5), (-10, 10)).tolist() == [-10, 0.5]
    assert clip_rewards(t(-30.0), None).tolist() == [-30]


def test_several_rewards_are_weighted_and_weight_zero_only_logs():
    rewards = torch.tensor([[1.0, 2.0, NAN], [3.0, -1.0, 5.0]])
    assert weighted_sum(rewards, [0.5, 2.0, 0.0]).tolist() == [4.5, -0.5]
    assert weighted_sum(rewards, [1.0, 1.0, 1.0]).isnan().tolist() == [True, False]
    with pytest.raises(AssertionError, match="3 rewards a sample for 2 weights"):
        weighted_sum(rewards, [1.0, 1.0])


def test_running_moments_are_those_of_all_rewards_whatever_the_parts():
    rewards = torch.randn(20, generator=torch.Generator().manual_seed(0)) * 3 + 1000
    one, many, left, right = (RunningMoments() for _ in range(4))
    one.update(rewards)
    for part in rewards.split([1, 0, 12, 7]):
        many.update(part)
    left.update(rewards[:5])
    right.update(rewards[5:])
    left.merge(right)
    for moments in (one, many, left):
        assert moments.mean == pytest.approx(float(rewards.double().mean()), rel=1e-12)
        assert moments.std == pytest.approx(float(rewards.double().std()), rel=1e-9)
    assert_close(
        many.normalize(rewards), ((rewards - 1000) - (rewards - 1000).mean()) / rewards.std(), atol=1e-4, rtol=0
    )


def test_running_moments_survive_a_restart_and_equal_or_no_rewards():
    moments, restored = RunningMoments(), RunningMoments()
    assert moments.normalize(t(3.0)).tolist() == [3]
    moments.update(t(0.5, 0.5))
    assert moments.normalize(t(0.5)).tolist() == [0]
    restored.load_state_dict(moments.state_dict())
    for each in (moments, restored):
        each.update(t(1.0, 4.0))
    assert restored.state_dict() == moments.state_dict()
    with pytest.raises(FloatingPointError, match="rewards: 1 of 2"):
        moments.update(t(1.0, NAN))


def test_groups_whose_mean_is_not_strictly_inside_the_range_are_uninformative():
    rewards = t(0.0, 1.0, 0.0, 1.0, 0.5, 1.0, 0.0)
    group_ids = torch.tensor([5, 9, 5, 9, 2, 7, 7])
    assert group_is_informative(rewards, group_ids, 0.0, 1.0).int().tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert group_is_informative(rewards, group_ids, 0.5, 1.0).int().tolist() == [0] * 7
    with pytest.raises(FloatingPointError):
        group_is_informative(t(NAN, 1.0), torch.tensor([0, 0]), 0.0, 1.0)


@pytest.mark.parametrize("size", range(2, 17))
@pytest.mark.parametrize("reward", [0.1, 0.3, 0.7])
def test_a_group_of_equal_rewards_on_the_bound_is_out_whatever_its_mean_rounds_to(reward, size):
    for dtype in (torch.float32, torch.float64):
        rewards = torch.full((size,), reward, dtype=dtype)
        bound = float(rewards[0])
        for low, high in ((bound, 1.0), (0.0, bound)):
            assert not group_is_informative(rewards, torch.zeros(size), low, high).any()
