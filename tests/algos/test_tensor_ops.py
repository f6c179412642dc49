"""Masked arithmetic, token rewards, and log-probs and entropy of logits."""

import math

import pytest
import torch
from torch.testing import assert_close

from spmdrl.algos import tensor_ops as ops

NAN, INF = math.nan, math.inf


def t(*rows, dtype=torch.float64):
    return torch.tensor(rows, dtype=dtype)


def m(*rows):
    return torch.tensor(rows, dtype=torch.bool)


def test_what_lies_off_the_mask_reaches_neither_sum_nor_gradient():
    x = t([1.0, NAN, 3.0, INF]).requires_grad_()
    total = ops.masked_sum(x, m([1, 0, 1, 0]))
    assert total == 4
    assert torch.autograd.grad(total, x)[0].tolist() == [[1, 0, 1, 0]]
    assert ops.masked_mean(x, m([1, 0, 1, 0]), dim=1).tolist() == [2]


def test_the_mean_over_nothing_is_zero():
    assert ops.masked_mean(t([NAN, 1.0]), m([0, 0])) == 0
    assert ops.masked_mean(t([NAN, 1.0], [2.0, 4.0]), m([0, 0], [1, 1]), dim=1).tolist() == [0, 3]


def test_a_mask_of_another_shape_or_type_is_refused():
    with pytest.raises(AssertionError, match=r"\(1, 2\) values for a mask of \(2, 1\)"):
        ops.masked_sum(t([1.0, 2.0]), m([1], [1]))
    with pytest.raises(AssertionError, match=r"expected torch\.bool"):
        ops.masked_sum(t([1.0, 2.0]), t([1.0, 0.0]))


def test_non_finite_values_are_reported_with_counts_where_the_mask_is_true():
    x = t([1.0, NAN, INF], [NAN, 2.0, -INF])
    ops.check_finite("advantages", x, m([1, 0, 0], [0, 1, 0]))
    with pytest.raises(FloatingPointError, match=r"advantages: 2 of 3 values are not finite \(1 NaN\)"):
        ops.check_finite("advantages", x, m([1, 0, 1], [1, 0, 0]))
    with pytest.raises(FloatingPointError, match=r"x: 4 of 6 values are not finite \(2 NaN\), the first at.*\[0, 1\]"):
        ops.check_finite("x", x)


def test_an_infinite_log_prob_on_the_mask_becomes_nan_and_off_it_zero():
    ratio = ops.log_ratio(t([-INF, -1.0, -INF]), t([-1.0, -2.0, -INF]), m([1, 1, 0]))
    assert ratio[0, 0].isnan()
    assert ratio[0, 1:].tolist() == [1, 0]


def test_log_ratios_of_bf16_are_taken_in_float32():
    assert ops.log_ratio(t([-1.0]).bfloat16(), t([-2.0]).bfloat16()).dtype == torch.float32


@pytest.mark.parametrize(
    ("mask", "column"), [([1, 0, 0], 0), ([1, 1, 1], 2), ([0, 1, 0], 1), ([1, 0, 1], 2), ([0, 0, 0], None)]
)
def test_the_reward_lands_on_the_last_action_token(mask, column):
    kl = torch.where(m(mask), 0.0, NAN)
    rewards = ops.token_rewards(t(7.0), kl, m(mask), kl_coef=0.1)
    assert rewards.tolist() == [[7 if i == column else 0 for i in range(3)]]


@pytest.mark.parametrize("length", [1, 3, 5])
def test_token_rewards_plus_the_kl_penalty_sum_to_the_reward(length):
    mask = torch.arange(5)[None] < length
    kl = torch.where(mask, torch.rand(1, 5, dtype=torch.float64), 1e6)
    rewards = ops.token_rewards(t(2.5), kl, mask, kl_coef=0.1)
    assert_close((rewards + 0.1 * ops.select(kl, mask)).sum(1), t(2.5))
    assert rewards[~mask].eq(0).all()


def test_the_reward_is_clipped_and_a_negative_kl_coef_acts_as_zero():
    settings = {"mask": m([1, 1]), "kl": t([5.0, 5.0])}
    clipped = ops.token_rewards(t(30.0), **settings, kl_coef=0.0, reward_clip_range=(-10, 10))
    assert clipped.tolist() == [[0, 10]]
    assert ops.token_rewards(t(1.0), **settings, kl_coef=-3.0).tolist() == [[0, 1]]
    assert_close(ops.token_rewards(t(1.0), **settings, kl_coef=0.1), t([-0.5, 0.5]))


def test_log_probs_of_three_logits_by_hand():
    # softmax of (0, ln 2, ln 5) is (1, 2, 5) / 8; at temperature 1/2 it is (1, 4, 25) / 30
    logits = t([0.0, math.log(2), math.log(5)])
    assert_close(ops.log_probs_from_logits(logits, torch.tensor([1])), t(math.log(2 / 8)))
    assert_close(ops.log_probs_from_logits(logits, torch.tensor([2]), temperature=0.5), t(math.log(25 / 30)))


def test_log_probs_of_bf16_logits_are_float32_and_never_positive():
    logits = (torch.randn(3, 5, 32_768, generator=torch.Generator().manual_seed(0)) * 30).bfloat16()
    labels = logits.argmax(-1)
    log_probs = ops.log_probs_from_logits(logits, labels)
    plain = logits.float().log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    assert log_probs.dtype == torch.float32 and bool((log_probs <= 0).all())
    assert_close(log_probs, plain, rtol=0, atol=1e-6)
    assert ops.entropy_from_logits(logits).dtype == torch.float32


def test_chunks_change_neither_values_nor_gradients(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, 7, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 7, (2, 5), generator=generator)

    def both():
        values = ops.log_probs_from_logits(logits, labels) * 3 + ops.entropy_from_logits(logits)
        return values, torch.autograd.grad(values.sum(), logits)[0]

    whole = both()
    monkeypatch.setattr(ops, "_chunk_rows", lambda _: 3)
    for chunked, plain in zip(both(), whole, strict=True):
        assert_close(chunked, plain, rtol=0, atol=1e-15)


def test_entropy_is_log_v_for_equal_logits_and_ignores_tokens_that_are_ruled_out():
    assert_close(ops.entropy_from_logits(torch.zeros(2, 5)), torch.full((2,), math.log(5)))
    logits = t([0.0, 0.0, -INF]).requires_grad_()
    entropy = ops.entropy_from_logits(logits)
    assert_close(entropy, t(math.log(2)))
    assert torch.autograd.grad(entropy.sum(), logits)[0].isfinite().all()


def test_gradients_of_log_probs_and_entropy_agree_with_finite_differences():
    logits = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([[0, 3, 1], [2, 2, 0]])
    assert torch.autograd.gradcheck(lambda x: ops.log_probs_from_logits(x, labels, temperature=0.7), logits)
    assert torch.autograd.gradcheck(lambda x: ops.entropy_from_logits(x, temperature=1.3), logits)
