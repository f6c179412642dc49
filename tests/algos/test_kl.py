"""KL estimators and controllers; the exact expected gradient of each KL loss by enumeration."""

import math

import pytest
import torch
from torch.testing import assert_close

from spmdrl.algos.kl import KL_ESTIMATORS, KL_LOSS_REFUSED, AdaptiveKLController, FixedKLController

NAN = math.nan
LOGITS = torch.tensor([0.3, -0.8, 1.1], dtype=torch.float64)
REF_LOG_PROBS = torch.tensor([-0.2, 0.9, 0.4], dtype=torch.float64).log_softmax(0)


def t(*rows, dtype=torch.float64):
    return torch.tensor(rows, dtype=dtype)


def expected_loss_gradient(name):
    """E over the policy of d estimate(token) / d logits, exactly, for a 3-way softmax; tokens sampled, so constant."""
    logits = LOGITS.clone().requires_grad_()
    log_probs = logits.log_softmax(0)
    estimates = KL_ESTIMATORS[name](log_probs[None], REF_LOG_PROBS[None])[0]
    return torch.autograd.grad((log_probs.detach().exp() * estimates).sum(), logits)[0]


def true_gradient(reverse=False):
    """d KL(policy || ref) / d logits, or of KL(ref || policy)."""
    logits = LOGITS.clone().requires_grad_()
    log_probs = logits.log_softmax(0)
    forward = (log_probs.exp() * (log_probs - REF_LOG_PROBS)).sum()
    backward = (REF_LOG_PROBS.exp() * (REF_LOG_PROBS - log_probs)).sum()
    return torch.autograd.grad(backward if reverse else forward, logits)[0]


@pytest.mark.parametrize("name", ["k2", "k3_st"])
def test_as_a_loss_k2_and_straight_through_k3_descend_the_kl_of_the_policy(name):
    assert_close(expected_loss_gradient(name), true_gradient(), rtol=0, atol=1e-14)


def test_as_a_loss_k3_descends_the_other_kl():
    assert_close(expected_loss_gradient("k3"), true_gradient(reverse=True), rtol=0, atol=1e-14)
    assert (expected_loss_gradient("k3") - true_gradient()).abs().max() > 0.1


def test_as_a_loss_k1_trains_nothing_and_is_refused_with_alternatives():
    assert_close(expected_loss_gradient("k1"), torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-14)
    assert (expected_loss_gradient("abs") - true_gradient()).abs().max() > 0.05
    assert set(KL_LOSS_REFUSED) == {"k1", "abs"}
    assert all("k2" in reason and "k3_st" in reason for reason in KL_LOSS_REFUSED.values())


@pytest.mark.parametrize("name", ["k1", "k3", "k3_st"])
def test_the_expected_value_is_the_kl(name):
    log_probs = LOGITS.log_softmax(0)
    kl = (log_probs.exp() * (log_probs - REF_LOG_PROBS)).sum()
    estimates = KL_ESTIMATORS[name](log_probs[None], REF_LOG_PROBS[None])[0]
    assert_close((log_probs.exp() * estimates).sum(), kl)


@pytest.mark.parametrize(
    ("name", "expected"), [("k1", -0.5), ("k2", 0.125), ("k3", 0.148721), ("k3_st", 0.148721), ("abs", 0.5)]
)
def test_a_log_ratio_of_minus_one_half_by_hand(name, expected):  # exp(.5) - 1 - .5
    assert_close(KL_ESTIMATORS[name](t([-1.5]), t([-1.0])), t([expected]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_equal_models_have_kl_exactly_zero_and_garbage_off_the_mask_changes_nothing(name):
    log_probs = (-torch.rand(3, 4) * 5).requires_grad_()
    mask = torch.rand(3, 4) > 0.4
    assert KL_ESTIMATORS[name](log_probs, log_probs.detach()).eq(0).all()
    dirty = torch.where(mask, log_probs.detach(), NAN).requires_grad_()
    ref = torch.where(mask, -1.0, math.inf)
    kl = KL_ESTIMATORS[name](dirty, ref, mask)
    clean = KL_ESTIMATORS[name](log_probs, torch.full((3, 4), -1.0))
    assert_close(kl, torch.where(mask, clean, 0.0))
    grads = [torch.autograd.grad(x.sum(), y)[0] for x, y in ((kl, dirty), (clean, log_probs))]
    assert_close(grads[0], torch.where(mask, grads[1], 0.0))


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_values_are_clamped_unless_told_otherwise_and_nan_is_seen(name):
    far = KL_ESTIMATORS[name](t([-40.0]), t([-1.0]))
    assert far.abs() == 10
    assert KL_ESTIMATORS[name](t([-40.0]), t([-1.0]), clamp=None).abs() > 30
    assert KL_ESTIMATORS[name](t([-math.inf]), t([-1.0])).isnan()
    assert KL_ESTIMATORS[name](t([-1.0]), t([NAN])).isnan()


def test_straight_through_k3_still_pulls_where_its_value_is_clamped():
    log_probs = t([-40.0]).requires_grad_()
    assert_close(torch.autograd.grad(KL_ESTIMATORS["k3_st"](log_probs, t([-1.0])).sum(), log_probs)[0], t([-39.0]))


def test_k3_is_exact_for_float32_log_ratios_near_zero():
    d = 1e-4
    kl = KL_ESTIMATORS["k3"](torch.tensor([[d]]), torch.tensor([[0.0]]))
    assert_close(kl, torch.tensor([[d * d / 2]]), rtol=5e-3, atol=0)


def test_estimates_of_bf16_log_probs_are_float32():
    assert KL_ESTIMATORS["k3"](t([-1.0]).bfloat16(), t([-2.0]).bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("name", [name for name in KL_ESTIMATORS if name != "k3_st"])
def test_gradients_agree_with_finite_differences(name):
    log_probs = (-torch.rand(2, 3, dtype=torch.float64) * 2 - 0.1).requires_grad_()
    ref = log_probs.detach() + torch.tensor([[0.3, -0.6, 0.9], [-1.2, 0.2, -0.4]], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: KL_ESTIMATORS[name](x, ref), log_probs)


def test_adaptive_controller_by_hand():
    controller = AdaptiveKLController(0.1, target=2.0, horizon=1000)
    controller.update(2.2, 100)  # error 0.1: times 1 + 0.1 * 0.1
    assert controller.value == pytest.approx(0.101)
    controller.update(100.0, 100)  # error clipped to 0.2
    assert controller.value == pytest.approx(0.101 * 1.02)
    controller.update(0.0, 100)  # and to -0.2
    assert controller.value == pytest.approx(0.101 * 1.02 * 0.98)


@pytest.mark.parametrize("make", [lambda: AdaptiveKLController(0.1, 2.0, 100), lambda: FixedKLController(0.1)])
def test_a_restored_controller_continues_as_if_never_stopped(make):
    whole, first, second = make(), make(), make()
    for current in (3.0, 1.0):
        whole.update(current, 10)
    first.update(3.0, 10)
    second.load_state_dict(first.state_dict())
    second.update(1.0, 10)
    assert second.value == whole.value


def test_a_fixed_weight_stays():
    controller = FixedKLController(0.1)
    controller.update(100.0, 1000)
    assert controller.value == 0.1


def test_a_fixed_weight_is_that_of_the_flag_also_where_another_was_saved():
    controller = FixedKLController(0.1)
    controller.load_state_dict(FixedKLController(0.5).state_dict())
    assert controller.value == 0.1
