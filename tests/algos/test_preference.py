"""Preference, reward-model, distillation and supervised losses."""

import math

import pytest
import torch
from torch.testing import assert_close

from spmdrl.algos.preference import (
    DPO_LOSSES,
    KD_LOSSES,
    LENGTH_NORMALIZED,
    REFERENCE_FREE,
    RM_LOSSES,
    implicit_rewards,
    kto,
    pair_accuracy,
    sequence_log_probs,
    sft,
)

NAN = math.nan


def t(*rows, dtype=torch.float64):
    return torch.tensor(rows, dtype=dtype)


def m(*rows):
    return torch.tensor(rows, dtype=torch.bool)


def logsigmoid(x):
    return -math.log1p(math.exp(-x))


# Policy margin 3, reference margin 1: h = 2.
PAIR = (t(-1.0), t(-4.0), t(-2.0), t(-3.0))


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("sigmoid", {}, -logsigmoid(1)),
        ("sigmoid", {"label_smoothing": 0.1}, -0.9 * logsigmoid(1) - 0.1 * logsigmoid(-1)),
        ("ipo", {}, (2 - 1) ** 2),
        ("hinge", {}, 0),
        ("hinge", {"beta": 0.25}, 0.5),
        ("robust", {"label_smoothing": 0.1}, (-0.9 * logsigmoid(1) + 0.1 * logsigmoid(-1)) / 0.8),
        ("simpo", {"simpo_gamma": 0.5}, -logsigmoid(0.5 * 3 - 0.5)),
    ],
)
def test_a_pair_by_hand(name, settings, expected):
    assert_close(DPO_LOSSES[name](*PAIR, **{"beta": 0.5, **settings}), t(float(expected)))


def test_robust_dpo_is_unbiased_under_flipped_labels():
    """(1 - e) loss(pair) + e loss(flipped pair) is the loss of clean labels."""
    flipped = (PAIR[1], PAIR[0], PAIR[3], PAIR[2])
    noisy = [DPO_LOSSES["robust"](*pair, beta=0.5, label_smoothing=0.2) for pair in (PAIR, flipped)]
    assert_close(0.8 * noisy[0] + 0.2 * noisy[1], DPO_LOSSES["sigmoid"](*PAIR, beta=0.5))


def test_simpo_needs_no_reference_and_the_tables_say_so():
    assert_close(DPO_LOSSES["simpo"](*PAIR[:2], beta=2.0), DPO_LOSSES["simpo"](*PAIR, beta=2.0))
    assert {"simpo"} == LENGTH_NORMALIZED == REFERENCE_FREE
    assert implicit_rewards(PAIR[0].requires_grad_(), PAIR[2], beta=0.5).tolist() == [0.5]


@pytest.mark.parametrize("name", DPO_LOSSES)
def test_pair_gradients_agree_with_finite_differences_and_nan_is_seen(name):
    generator = torch.Generator().manual_seed(0)
    pairs = [torch.randn(5, generator=generator, dtype=torch.float64, requires_grad=i < 2) for i in range(4)]
    assert torch.autograd.gradcheck(lambda *x: DPO_LOSSES[name](*x, beta=0.7), pairs)
    assert DPO_LOSSES[name](t(NAN), *PAIR[1:], beta=0.5).isnan().all()


def test_kto_by_hand():
    args = (t(-1.0, -1.0), t(-2.0, -2.0), torch.tensor([True, False]))  # h = 1
    sigmoid = 1 / (1 + math.exp(-0.25))  # beta (1 - z) with z = 1/2
    loss = kto(*args, kl=0.5, beta=0.5, desirable_loss_weight=2.0, undesirable_loss_weight=3.0)
    assert_close(loss, t(2 * (1 - sigmoid), 3 * sigmoid))
    assert_close(kto(*args, kl=-9.0, beta=0.5), kto(*args, kl=0.0, beta=0.5))


def test_kto_gradients_agree_with_finite_differences_and_none_flows_through_the_kl():
    log_probs = torch.randn(4, dtype=torch.float64, requires_grad=True)
    ref, desirable = torch.randn(4, dtype=torch.float64), torch.tensor([True, False, True, False])
    assert torch.autograd.gradcheck(lambda x: kto(x, ref, desirable, 0.3, beta=0.5), log_probs)
    kl = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.grad(kto(log_probs, ref, desirable, kl, beta=0.5).sum(), kl, allow_unused=True) == (None,)


def test_reward_model_losses_by_hand():
    assert_close(RM_LOSSES["sigmoid"](t(3.0), t(1.0)), t(-logsigmoid(2)))
    assert_close(RM_LOSSES["sigmoid"](t(3.0), t(1.0), t(0.5)), t(-logsigmoid(1.5)))
    centred = RM_LOSSES["sigmoid"](t(3.0), t(1.0), center_rewards_coefficient=0.01)
    assert_close(centred, t(-logsigmoid(2) + 0.01 * 16))


def test_logexp_is_the_same_function_counts_the_margin_and_does_not_overflow():
    chosen, rejected, margin = torch.randn(3, 6, dtype=torch.float64)
    assert_close(RM_LOSSES["logexp"](chosen, rejected, margin), RM_LOSSES["sigmoid"](chosen, rejected, margin))
    chosen = torch.tensor([-60.0], requires_grad=True)
    loss = RM_LOSSES["logexp"](chosen, torch.tensor([60.0]))
    assert loss.tolist() == [120] and torch.autograd.grad(loss.sum(), chosen)[0].tolist() == [-1]


@pytest.mark.parametrize("name", RM_LOSSES)
def test_reward_model_gradients_agree_with_finite_differences(name):
    chosen, rejected = torch.randn(2, 5, dtype=torch.float64).unbind()
    args = (chosen.clone().requires_grad_(), rejected.clone().requires_grad_())
    assert torch.autograd.gradcheck(lambda c, r: RM_LOSSES[name](c, r, torch.full_like(c, 0.3)), args)


def teacher_and_student(dtype=torch.float64):
    generator = torch.Generator().manual_seed(2)
    student, teacher = torch.randn(2, 2, 3, 4, generator=generator, dtype=dtype).unbind()
    return student.clone().requires_grad_(), teacher, m([1, 1, 0], [0, 1, 1])


def distil(name, student, teacher, mask):
    if name == "top_k":
        top = teacher.topk(2)
        return KD_LOSSES[name](student, top.values, top.indices, mask)
    return KD_LOSSES[name](student, teacher, mask)


def test_distillation_by_hand():
    # teacher (1, 3) / 4, student (1, 1) / 2
    args = (t([[0.0, 0.0]]), t([[0.0, math.log(3)]]), m([1]))
    forward = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    assert_close(KD_LOSSES["forward"](*args), t([forward]))
    assert_close(KD_LOSSES["reverse"](*args), t([0.5 * math.log(2) + 0.5 * math.log(2 / 3)]))
    # a third token that the teacher does not report is left out
    student, ids = t([[0.0, 9.0, 0.0]]), torch.tensor([[[0, 2]]])
    assert_close(KD_LOSSES["top_k"](student, args[1], ids, m([1])), t([forward]))


def test_top_k_of_the_whole_vocabulary_is_the_forward_kl():
    student, teacher, mask = teacher_and_student()
    top = teacher.topk(4)
    whole = KD_LOSSES["top_k"](student, top.values, top.indices, mask)
    assert_close(whole, KD_LOSSES["forward"](student, teacher, mask))


@pytest.mark.parametrize("name", KD_LOSSES)
def test_distillation_gradients_padding_and_equal_models(name):
    student, teacher, mask = teacher_and_student()
    assert torch.autograd.gradcheck(lambda x: distil(name, x, teacher, mask), student)
    assert_close(distil(name, teacher, teacher, mask), torch.zeros(2, 3, dtype=torch.float64))
    dirty = torch.where(mask[..., None], student.detach(), NAN).requires_grad_()
    loss = distil(name, dirty, torch.where(mask[..., None], teacher, math.inf), mask)
    assert_close(loss, distil(name, student, teacher, mask))
    assert torch.autograd.grad(loss.sum(), dirty)[0][~mask].eq(0).all()


def test_pairs_that_are_even_count_half():
    chosen, rejected = torch.tensor([2.0, 1.0, 3.0]), torch.tensor([1.0, 1.0, 4.0])
    assert pair_accuracy(chosen, rejected).tolist() == [1, 0.5, 0]


def test_sums_of_log_probs_do_not_depend_on_the_padding():
    """Each is the fp32 number next to the exact sum, whatever the width in which it is added up."""
    log_probs = -torch.rand(1, 1000, generator=torch.Generator().manual_seed(0))
    exact = math.fsum(log_probs[0].tolist())
    for width in (1000, 1003, 1024, 1500):
        padded = torch.nn.functional.pad(log_probs, (0, width - 1000))
        sums, means = sequence_log_probs(padded, torch.arange(width)[None] < 1000)
        assert sums.item() == torch.tensor(exact).item()
        assert means.item() == torch.tensor(exact / 1000).item()


def test_supervised_loss_and_sequence_log_probs_by_hand():
    log_probs, mask = t([-1.0, -3.0, NAN], [NAN, NAN, NAN]), m([1, 1, 0], [0, 0, 0])
    assert sft(log_probs, mask).tolist() == [[1, 3, 0], [0, 0, 0]]
    sums, means = sequence_log_probs(log_probs, mask)
    assert sums.tolist() == [-4, 0] and means.tolist() == [-2, 0]
