"""Weights against the mismatch of engine and trainer, and what is logged about it."""

import math

import pytest
import torch
from torch.testing import assert_close

from spmdrl.algos.advantages import masked_stats
from spmdrl.algos.corrections import (
    CORRECTIONS,
    effective_sample_size,
    mismatch_max,
    mismatch_metrics,
    normalize_weights,
    rejection_mask,
    sequence_mismatch,
    tis,
)

NAN, INF = math.nan, math.inf
LOG_2 = math.log(2)


def t(*rows, dtype=torch.float64):
    return torch.tensor(rows, dtype=dtype)


def m(*rows):
    return torch.tensor(rows, dtype=torch.bool)


# Token ratios trainer / engine of 4, 1/4 and 8 (row product 8, geometric mean 2), and of 1 and 3/4 (product 3/4).
ROLLOUT = t([-4.0, -4.0, -4.0], [-4.0, -4.0, NAN])
OLD = ROLLOUT + t([2 * LOG_2, -2 * LOG_2, 3 * LOG_2], [0.0, math.log(0.75), 0.0])
MASK = m([1, 1, 1], [1, 1, 0])


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("none", {}, [[1, 1, 1], [1, 1, 0]]),
        ("tis", {}, [[2, 0.25, 2], [1, 0.75, 0]]),
        ("tis", {"rollout_correction_range": (0.5, 5.0)}, [[4, 0.5, 5], [1, 0.75, 0]]),
        ("icepop", {}, [[4, 0, 0], [1, 0.75, 0]]),
        ("seq-mask-tis", {}, [[2, 0.25, 2], [1, 0.75, 0]]),
        ("seq-mask-tis", {"rollout_token_cap": None}, [[4, 0.25, 8], [1, 0.75, 0]]),
        ("seq-mask-tis", {"rollout_correction_range": (0.9, 1.1)}, [[0, 0, 0], [0, 0, 0]]),
        ("seq-tis", {}, [[2, 2, 2], [0.75, 0.75, 0]]),
        ("seq-mask", {}, [[0, 0, 0], [0.75, 0.75, 0]]),
        ("seq-mask", {"rollout_correction_range": (1.0, INF)}, [[8, 8, 8], [0, 0, 0]]),
    ],
)
def test_five_ratios_by_hand(name, settings, expected):
    assert_close(CORRECTIONS[name](OLD, ROLLOUT, MASK, **settings), t(*expected))


@pytest.mark.parametrize("name", CORRECTIONS)
def test_weights_are_one_without_mismatch_detached_and_zero_off_the_mask(name):
    old = torch.where(MASK, -1.0, NAN).requires_grad_()
    weights = CORRECTIONS[name](old, torch.where(MASK, -1.0, INF), MASK)
    assert_close(weights, MASK.to(weights.dtype))
    assert not weights.requires_grad


@pytest.mark.parametrize("garbage", [NAN, INF, -INF])
@pytest.mark.parametrize("name", [name for name in CORRECTIONS if name != "none"])
def test_a_broken_engine_log_prob_is_never_masked_away(name, garbage):
    rollout = ROLLOUT.clone()
    rollout[0, 1] = garbage
    weights = CORRECTIONS[name](OLD, rollout, MASK)
    assert weights[0].sum().isnan() and weights[1].isfinite().all()


def test_without_correction_engine_log_probs_do_not_reach_the_loss():
    assert CORRECTIONS["none"](OLD, torch.full_like(OLD, NAN), MASK).tolist() == MASK.tolist()


def test_weights_can_be_normalized_to_mean_one_over_the_batch():
    weights = tis(OLD, ROLLOUT, MASK)  # 2, 1/4, 2, 1, 3/4
    normalized = normalize_weights(weights, masked_stats(weights, MASK))
    assert_close(normalized, weights / 1.2)


@pytest.mark.parametrize(
    ("statistic", "bounds", "expected"),
    [
        ("token_k1", (0.25, 4.0), [[1, 1, 0], [1, 1, 0]]),  # engine / trainer: 1/4, 4, 1/8, 1, 4/3
        ("token_k2", (0.0, 1.0), [[1, 1, 0], [1, 1, 0]]),  # (2 ln 2)^2 / 2 = 0.96
        ("token_k3", (0.0, 0.7), [[0, 1, 0], [1, 1, 0]]),  # 4 - 1 - ln 4 = 1.61; 1/4 - 1 + ln 4 = 0.64
        ("seq_sum_k1", (0.1, 1.3), [[1, 1, 1], [0, 0, 0]]),  # 1/8 and 4/3
        ("seq_mean_k1", (0.6, 1.5), [[0, 0, 0], [1, 1, 0]]),  # 1/2 and (4/3)^(1/2)
        ("seq_max_k2", (0.0, 1.0), [[0, 0, 0], [1, 1, 0]]),
    ],
)
def test_rejection_by_token_and_by_row_by_hand(statistic, bounds, expected):
    bounds = (bounds[0] * (1 - 1e-9), bounds[1] * (1 + 1e-9))
    assert rejection_mask(OLD, ROLLOUT, MASK, statistic=statistic, bounds=bounds).int().tolist() == expected


def test_an_unknown_rejection_level_is_named():
    with pytest.raises(AssertionError, match="unknown level 'row'"):
        rejection_mask(OLD, ROLLOUT, MASK, statistic="row_k1", bounds=(0.5, 2.0))


def test_an_engine_off_by_one_half_shows_as_one_half():
    old = t([-1.0, -2.0, -3.0])
    weights = tis(old, old - 0.5, m([1, 1, 0]), rollout_correction_range=(0.0, 1.2))
    metrics = mismatch_metrics(old, old - 0.5, m([1, 1, 0]), weights)
    assert weights.max() == 1.2
    mean = {name: float(piece.sum() / 2) for name, piece in metrics.items()}
    assert mean["mismatch/abs_diff"] == 0.5 and mean["mismatch/kl"] == -0.5 and mean["mismatch/outside"] == 1
    assert mismatch_max(old, old - 0.5, m([1, 1, 0])) == 0.5
    assert mean["mismatch/kl_k3"] == pytest.approx(math.exp(0.5) - 1.5)
    assert mean["mismatch/chi2"] == pytest.approx(math.e - 1)


def test_the_largest_difference_of_no_tokens_is_zero():
    assert mismatch_max(OLD[:0], ROLLOUT[:0], MASK[:0]) == 0
    assert mismatch_max(OLD, ROLLOUT, torch.zeros_like(MASK)) == 0


def test_the_effective_sample_size_adds_up_over_micro_batches():
    weights = tis(OLD, ROLLOUT, MASK)  # 2, 1/4, 2, 1, 3/4: sum 6, squares 9.625
    parts = [mismatch_metrics(OLD[i : i + 1], ROLLOUT[i : i + 1], MASK[i : i + 1], weights[i : i + 1]) for i in (0, 1)]
    mean = {name: float(parts[0][name].sum() + parts[1][name].sum()) / 5 for name in parts[0]}
    size = effective_sample_size(mean["mismatch/weight"], mean["mismatch/weight_sq"])
    assert size == pytest.approx(6**2 / (5 * 9.625))
    assert effective_sample_size(3.0, 9.0) == 1
    assert effective_sample_size(0.0, 0.0) == 0


def test_perplexities_of_rows_by_hand():
    rows = sequence_mismatch(t([-LOG_2, -3 * LOG_2]), t([-LOG_2, -LOG_2]), m([1, 1]))
    assert float(rows["mismatch/trainer_ppl"]) == pytest.approx(4)
    assert float(rows["mismatch/engine_ppl"]) == pytest.approx(2)
    assert float(rows["mismatch/log_ppl_diff"]) == pytest.approx(LOG_2)
    assert float(rows["mismatch/ppl_ratio"]) == pytest.approx(2)
    assert float(rows["mismatch/chi2_seq"]) == pytest.approx(1 / 16 - 1)
