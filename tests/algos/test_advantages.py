"""Estimators, returns, GAE and whitening, against numbers derived by hand."""

import math

import pytest
import torch
from torch.testing import assert_close

from spmdrl.algos.advantages import (
    ESTIMATORS,
    Estimator,
    cumulative_returns,
    gae,
    group_std,
    masked_stats,
    shape_rewards,
    whiten,
)
from spmdrl.algos.tensor_ops import token_rewards

NAN = math.nan
GROUP_RELATIVE = [name for name, estimator in ESTIMATORS.items() if estimator.baseline is not None]


def t(*rows, dtype=torch.float64):
    return torch.tensor(rows, dtype=dtype)


def m(*rows):
    return torch.tensor(rows, dtype=torch.bool)


def shape(name, rewards, group_ids=None, lengths=None, **options):
    group_ids = torch.zeros(len(rewards), dtype=torch.long) if group_ids is None else torch.tensor(group_ids)
    lengths = torch.ones(len(rewards)) if lengths is None else torch.tensor(lengths)
    return shape_rewards(rewards, group_ids, ESTIMATORS[name], lengths=lengths, **options)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("reinforce", [1, 2, 6]),
        ("reinforce_baseline", [-2, -1, 3]),  # mean 3
        ("dr_grpo", [-2, -1, 3]),
        ("rloo", [1 - 4, 2 - 3.5, 6 - 1.5]),  # less the mean of the other two
        ("group_norm", [-2 / 7**0.5, -1 / 7**0.5, 3 / 7**0.5]),  # variance (4 + 1 + 9) / 2
        ("opo", [1 - 3.75, 2 - 3.75, 6 - 3.75]),  # lengths 1, 1, 2: (1 + 2 + 12) / 4
        ("grpo_passk", [0, 0, 4 / 7**0.5]),  # best less second best
        ("group_mean_batch_std", [-2 / 7**0.5, -1 / 7**0.5, 3 / 7**0.5]),
    ],
)
def test_a_group_of_three_by_hand(name, expected):
    assert_close(shape(name, t(1.0, 2.0, 6.0), lengths=[1, 1, 2]), t(*map(float, expected)), rtol=1e-4, atol=1e-6)


def test_remax_takes_off_the_reward_of_the_greedy_response():
    assert shape("remax", t(1.0, 0.0), greedy_rewards=t(0.25, 0.25)).tolist() == [0.75, -0.25]
    with pytest.raises(AssertionError, match="needs the rewards of greedy responses"):
        shape("remax", t(1.0, 0.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("reward", [0.1, 0.3, 0.7, 1 / 3, 1e6 + 0.1, -0.1])
@pytest.mark.parametrize("name", GROUP_RELATIVE)
def test_a_group_of_equal_rewards_gets_exactly_zero(name, reward, dtype):
    for size in range(2, 17):
        rewards = torch.full((size,), reward, dtype=dtype)
        shaped = shape(name, rewards, lengths=list(range(1, size + 1)))
        assert shaped.eq(0).all(), f"{size} rewards of {reward}: {shaped.tolist()}"
        mask = torch.ones(size, 3, dtype=torch.bool)
        tokens = cumulative_returns(token_rewards(shaped, torch.zeros(size, 3), mask, kl_coef=0.0), mask, gamma=1.0)
        assert whiten(tokens, mask, masked_stats(tokens, mask)).eq(0).all()


@pytest.mark.parametrize("name", GROUP_RELATIVE)
def test_groups_of_any_size_in_any_order_are_shaped_as_if_alone(name):
    generator = torch.Generator().manual_seed(0)
    group_ids = torch.tensor([7] * 2 + [3] * 5 + [11] * 3)
    rewards, lengths = torch.randn(10, generator=generator), torch.randint(1, 9, (10,), generator=generator)
    estimator = ESTIMATORS[name]
    whole = shape_rewards(rewards, group_ids, estimator, lengths=lengths)
    order = torch.randperm(10, generator=generator)
    shuffled = shape_rewards(rewards[order], group_ids[order], estimator, lengths=lengths[order])
    assert_close(shuffled, whole[order])
    if not estimator.batch_std:
        rows = group_ids == 3
        alone = shape_rewards(rewards[rows], group_ids[rows], estimator, lengths=lengths[rows])
        assert_close(alone, whole[rows])


def test_a_sample_without_a_reward_gets_zero_and_moves_no_baseline():
    rewards, valid = t(1.0, NAN, 3.0), torch.tensor([True, False, True])
    assert shape("dr_grpo", rewards, valid=valid).tolist() == [-1, 0, 1]


def test_a_nan_reward_is_reported():
    with pytest.raises(FloatingPointError, match="rewards: 1 of 3 values are not finite"):
        shape("dr_grpo", t(1.0, NAN, 3.0))
    with pytest.raises(FloatingPointError, match="greedy_rewards: 1 of 1"):
        shape("remax", t(1.0), greedy_rewards=t(math.inf))


@pytest.mark.parametrize("name", ["rloo", "group_norm", "dr_grpo", "opo"])
def test_a_group_of_one_gets_zero_unless_its_reward_is_kept(name):
    assert shape(name, t(5.0, 1.0, 3.0), [4, 2, 2])[0] == 0
    assert shape(name, t(5.0, 1.0, 3.0), [4, 2, 2], keep_singletons=True)[0] == 5


def test_group_std_by_hand():
    assert_close(group_std(t(1.0, 3.0, 0.1, 0.1, 9.0), torch.tensor([0, 0, 1, 1, 2])), t(2**0.5, 2**0.5, 0, 0, 0))


def test_a_new_estimator_is_one_function_and_one_row():
    def above_median(rewards, lengths):
        return rewards - rewards.median()

    shaped = shape_rewards(
        t(1.0, 2.0, 9.0), torch.zeros(3), Estimator(above_median, whiten=False), lengths=torch.ones(3)
    )
    assert shaped.tolist() == [-1, 0, 7]


def test_discounted_returns_by_hand():
    # G_2 = 4, G_1 = 2 + 4/2 = 4, G_0 = 1 + 4/2 = 3; the pad's 9 and NaN do not exist
    assert cumulative_returns(t([1.0, 2.0, 4.0, 9.0, NAN]), m([1, 1, 1, 0, 0]), gamma=0.5).tolist() == [
        [3, 4, 4, 0, 0]
    ]


def test_returns_pass_over_a_hole_without_discount_unless_it_counts_as_steps():
    rewards, mask = t([1.0, NAN, NAN, 4.0]), m([1, 0, 0, 1])
    assert cumulative_returns(rewards, mask, gamma=0.5).tolist() == [[3, 0, 0, 4]]  # 1 + 4/2
    assert cumulative_returns(rewards, mask, gamma=0.5, skip_holes=False).tolist() == [[1.5, 0, 0, 4]]  # 1 + 4/8


def test_gae_by_hand():
    # delta = 1 + .5*2 - 1, 0 + .5*4 - 2, 2 - 4 = 1, 0, -2; gamma lambda = 1/4: A_2 = -2, A_1 = -.5, A_0 = .875
    advantages, returns = gae(t([1.0, 0.0, 2.0]), t([1.0, 2.0, 4.0]), m([1, 1, 1]), gamma=0.5, lambd=0.5)
    assert advantages.tolist() == [[0.875, -0.5, -2]]
    assert returns.tolist() == [[1.875, 1.5, 2]]


def test_gae_with_gamma_and_lambda_one_is_the_return_less_the_value():
    advantages, returns = gae(t([1.0, 2.0, 3.0]), t([0.5, 7.0, -2.0]), m([1, 1, 1]), gamma=1.0, lambd=1.0)
    assert_close(returns, t([6.0, 5.0, 3.0]))
    assert_close(advantages, t([5.5, -2.0, 5.0]))


def test_gae_skips_masked_step():
    """A masked middle step is transparent: same result as the sequence without it."""
    gap, _ = gae(t([0.0, 9.0, 1.0]), t([0.5, 7.0, 0.5]), m([1, 0, 1]), gamma=0.9, lambd=0.8)
    dense, _ = gae(t([0.0, 1.0]), t([0.5, 0.5]), m([1, 1]), gamma=0.9, lambd=0.8)
    assert_close(gap[:, [0, 2]], dense)  # delta_0 = 0 + .9*.5 - .5 = -.05; A_0 = -.05 + .72*.5 = .31
    assert_close(dense, t([0.31, 0.5]))


@pytest.mark.parametrize("garbage", [1e6, NAN, math.inf])
@pytest.mark.parametrize("mask", [[1, 1, 1], [1, 0, 1], [0, 1, 1]])
@pytest.mark.parametrize(("gamma", "lambd"), [(1.0, 1.0), (0.9, 0.8)])
def test_appended_padding_changes_nothing_and_is_zero(garbage, mask, gamma, lambd):
    def compute(kl, values, mask):
        rewards = token_rewards(t(2.0), kl, mask, kl_coef=0.1)
        advantages, returns = gae(rewards, values, mask, gamma=gamma, lambd=lambd)
        whitened = whiten(advantages, mask, masked_stats(advantages, mask))
        return advantages, returns, whitened, cumulative_returns(rewards, mask, gamma=gamma)

    kl, values, pad = t([0.1, 0.2, 0.3]), t([0.5, -0.5, 1.0]), torch.full((1, 4), garbage, dtype=torch.float64)
    padded_mask = torch.cat([m(mask), torch.zeros(1, 4, dtype=torch.bool)], 1)
    short = compute(kl, values, m(mask))
    long = compute(torch.cat([kl, pad], 1), torch.cat([values, pad], 1), padded_mask)
    for whole, part in zip(long, short, strict=True):
        assert_close(whole[:, :3], part, rtol=0, atol=0)
        assert whole[:, 3:].eq(0).all()
        assert whole[:, :3][~m(mask)].eq(0).all()


def test_whitening_by_hand():
    x, mask = t([1.0, 5.0, NAN]), m([1, 1, 0])
    stats = masked_stats(x, mask)
    assert stats.tolist() == [6, 26, 2]
    assert_close(whiten(x, mask, stats), t([-1.0, 1.0, 0.0]))  # mean 3, variance 4
    assert_close(whiten(x, mask, stats, no_std_norm=True), t([-2.0, 2.0, 0.0]))
    assert_close(whiten(x, mask, stats, unbiased=True), t([-(0.5**0.5), 0.5**0.5, 0.0]))  # variance 8
    assert_close(whiten(x, mask, stats, shift_mean=False), t([2.0, 4.0, 0.0]))


def test_statistics_of_parts_add_up_to_those_of_the_whole():
    x, mask = torch.randn(7, 4), torch.rand(7, 4) > 0.3
    parts = [masked_stats(x[rows], mask[rows]) for rows in ([0, 1, 2], [], [6], [3, 4, 5])]
    whole = masked_stats(x, mask)
    assert_close(sum(parts), whole)
    assert_close(whiten(x, mask, sum(parts)), whiten(x, mask, whole))


def test_whitening_keeps_float32_data_whose_mean_dwarfs_its_spread():
    x = torch.tensor([[10_000.0, 10_001.0, 10_002.0, 10_003.0]])  # mean 10001.5, variance 1.25
    mask = torch.ones_like(x, dtype=torch.bool)
    expected = (torch.tensor([[0.0, 1.0, 2.0, 3.0]]) - 1.5) / 1.25**0.5
    assert_close(whiten(x, mask, masked_stats(x, mask)), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("unbiased", [False, True])
def test_whitening_of_nothing_one_token_or_equal_values_is_zero(unbiased):
    for mask in (m([0, 0, 0]), m([1, 0, 0]), m([1, 1, 1])):
        x = torch.full((1, 3), 0.25)
        assert whiten(x, mask, masked_stats(x, mask), unbiased=unbiased).eq(0).all()


def test_a_nan_advantage_on_the_mask_is_not_hidden_by_whitening():
    x = t([1.0, NAN])
    assert whiten(x, m([1, 1]), masked_stats(x, m([1, 1]))).isnan().all()
