"""Policy and value losses: numbers by hand, gradients against finite differences, NaN and inf on and off the mask."""

import math
from dataclasses import dataclass

import pytest
import torch
from torch.testing import assert_close

from spmdrl.algos.losses import AGGREGATION_OF, AGGREGATIONS, POLICY_LOSSES, BatchCounts, bind, value_loss

NAN, INF = math.nan, math.inf
CUTS_GRADIENTS = {"gspo_token", "cispo"}  # stop-gradients: not the derivative of their own value


def t(*rows, dtype=torch.float64):
    return torch.tensor(rows, dtype=dtype)


def m(*rows):
    return torch.tensor(rows, dtype=torch.bool)


def batch(seed=0, scale=0.3, dtype=torch.float64):
    """log_probs, old_log_probs, advantages of 4 rows of 6, and a mask with a hole, a leading 0 and an empty row."""
    generator = torch.Generator().manual_seed(seed)
    log_probs = -torch.rand(4, 6, generator=generator, dtype=dtype) * 3 - 0.5
    old_log_probs = log_probs + torch.randn(4, 6, generator=generator, dtype=dtype) * scale
    advantages = torch.randn(4, 6, generator=generator, dtype=dtype)
    mask = m([1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 1, 0], [0, 1, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0])
    return log_probs.requires_grad_(), old_log_probs, advantages, mask


def gradient(name, args, **settings):
    return torch.autograd.grad(POLICY_LOSSES[name](*args, **settings)[0].sum(), args[0])[0]


# Ratios 2, 1/2, 2, 1/2 for advantages 1, 1, -1, -1.
LOG_2 = math.log(2)
FOUR = (t([-1.0] * 4), t([-1 - LOG_2, -1 + LOG_2, -1 - LOG_2, -1 + LOG_2]), t([1.0, 1.0, -1.0, -1.0]), m([1] * 4))


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("ppo", {"eps_clip": 0.2}, [-1.2, -0.5, 2.0, 0.8]),
        ("ppo", {"eps_clip_low_high": (0.2, 0.28)}, [-1.28, -0.5, 2.0, 0.8]),
        ("ppo", {"eps_clip": 0.2, "dual_clip": 1.5}, [-1.2, -0.5, 1.5, 0.8]),
        ("gspo", {"eps_clip": 0.2}, [-1, -1, 1, 1]),  # log ratios average to 0
        ("gspo_token", {"eps_clip": 0.2}, [-1, -1, 1, 1]),
        ("cispo", {"eps_clip": 0.2}, [1.2, 0.8, -1.2, -0.8]),  # log_probs are -1
        ("cispo", {"eps_clip_low_high": (1.0, 4.0)}, [2.0, 0.5, -2.0, -0.5]),
        ("gpg", {}, [1, 1, -1, -1]),
        # mean advantage 0
        ("gmpo", {"eps_clip": 0.2}, [0, 0, 0, 0]),
    ],
)
def test_four_ratios_by_hand(name, settings, expected):
    assert_close(POLICY_LOSSES[name](*FOUR, **settings)[0], t([float(x) for x in expected]))


def test_sapo_by_hand():
    loss, _ = POLICY_LOSSES["sapo"](*FOUR, sapo_tau_pos=1.0, sapo_tau_neg=2.0)
    # tau (r - 1) is 1, -1/2, 2, -1 and 4 A / tau is 4, 4, -2, -2
    assert_close(loss, -t([4.0, 4.0, -2.0, -2.0]) * t([1.0, -0.5, 2.0, -1.0]).sigmoid())


def test_gmpo_clips_logarithms_on_the_side_that_lowers_the_objective():
    # A = 1: log ratios (ln 2, -ln 2) with clip 0.2 become (0.2, -ln 2)
    args = (t([-1.0, -1.0]), t([-1 - LOG_2, -1 + LOG_2]), t([1.0, 1.0]), m([1, 1]))
    expected = -math.exp((0.2 - LOG_2) / 2)
    assert_close(POLICY_LOSSES["gmpo"](*args, eps_clip=0.2)[0], t([expected, expected]))


def test_gspo_clips_the_geometric_mean_of_the_row():
    # log ratios ln 4 and 0: the row's ratio is 2, clipped at 1.2
    args = (t([-1.0, -1.0, 0.0]), t([-1 - 2 * LOG_2, -1.0, 0.0]), t([1.0, 1.0, 0.0]), m([1, 1, 0]))
    loss, metrics = POLICY_LOSSES["gspo"](*args, eps_clip=0.2)
    assert_close(loss, t([-1.2, -1.2, 0.0]))
    assert metrics["policy/clip_frac"].tolist() == [[1, 1, 0]]


def test_metrics_say_where_clips_are_at_work_and_are_detached():
    _, metrics = POLICY_LOSSES["ppo"](FOUR[0].clone().requires_grad_(), *FOUR[1:], eps_clip=0.2, dual_clip=1.5)
    assert metrics["policy/clip_frac"].tolist() == [[1, 0, 0, 1]]
    assert metrics["policy/dual_clip_frac"].tolist() == [[0, 0, 1, 0]]
    assert_close(metrics["policy/approx_kl"], t([-LOG_2, LOG_2, -LOG_2, LOG_2]))
    assert_close(metrics["policy/ratio"], t([2.0, 0.5, 2.0, 0.5]))
    assert not any(metric.requires_grad for metric in metrics.values())


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_the_first_pass_has_the_plain_policy_gradient(name):
    """At ratio 1 every loss pulls on a token by -A, however it clips: through the row mean, by the row's mean of A."""
    log_probs, _, advantages, mask = batch()
    grad = gradient(name, (log_probs, log_probs.detach(), advantages, mask))
    by_row = torch.where(mask, advantages, 0).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    expected = by_row.expand_as(advantages) if name in ("gspo", "gmpo") else advantages
    assert_close(grad, torch.where(mask, -expected, 0.0))


@pytest.mark.parametrize("name", [name for name in POLICY_LOSSES if name not in CUTS_GRADIENTS])
@pytest.mark.parametrize("settings", [{}, {"eps_clip_low_high": (0.1, 0.3), "dual_clip": 1.3}], ids=["plain", "clips"])
def test_gradients_agree_with_finite_differences(name, settings):
    fn = POLICY_LOSSES[name]
    settings = {k: v for k, v in settings.items() if k in (fn.__kwdefaults__ or {})}
    log_probs, *rest = batch(seed=3)
    assert torch.autograd.gradcheck(lambda x: fn(x, *rest, **settings)[0], log_probs)


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    log_probs, old, advantages, mask = batch(scale=1.0)
    weight = (log_probs - old).exp().clamp(0.8, 1.2).detach()
    assert_close(gradient("cispo", (log_probs, old, advantages, mask)), torch.where(mask, -weight * advantages, 0.0))


def test_gspo_token_is_gspo_for_one_advantage_a_row_and_else_gives_each_token_its_own():
    log_probs, old, advantages, mask = batch(scale=0.05)
    args = (log_probs, old, advantages[:, :1].expand(4, 6), mask)
    assert_close(gradient("gspo_token", args), gradient("gspo", args))
    row_ratio = (torch.where(mask, log_probs - old, 0).sum(1) / mask.sum(1).clamp(min=1)).exp().detach()
    expected = torch.where(mask, -row_ratio[:, None] * advantages, 0.0)
    assert_close(gradient("gspo_token", (log_probs, old, advantages, mask)), expected)


@pytest.mark.parametrize("garbage", [NAN, INF, -INF, 1e30])
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_garbage_off_the_mask_changes_nothing(name, garbage):
    clean = batch()
    mask = clean[-1]
    dirty = [torch.where(mask, x.detach(), garbage) for x in clean[:3]]
    dirty = (dirty[0].requires_grad_(), *dirty[1:], mask)
    loss, metrics = POLICY_LOSSES[name](*dirty)
    expected, expected_metrics = POLICY_LOSSES[name](*clean)
    assert_close(loss, expected, rtol=0, atol=0)
    assert_close(metrics, expected_metrics, rtol=0, atol=0)
    assert loss[~mask].eq(0).all() and all(metric[~mask].eq(0).all() for metric in metrics.values())
    assert_close(gradient(name, dirty), gradient(name, clean), rtol=0, atol=0)
    assert gradient(name, dirty)[~mask].eq(0).all()


@pytest.mark.parametrize("garbage", [NAN, INF, -INF])
@pytest.mark.parametrize("position", [0, 1, 2], ids=["log_probs", "old_log_probs", "advantages"])
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_garbage_on_the_mask_reaches_the_loss(name, position, garbage):
    args = [x.detach().clone() for x in batch()]
    args[position][1, 4] = garbage
    loss, metrics = POLICY_LOSSES[name](*args)
    is_metric_only = name == "gpg" and position == 1  # it has no ratio
    assert not (metrics["policy/approx_kl"] if is_metric_only else loss).sum().isfinite()


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_more_padding_changes_no_row(name):
    args = batch()
    padded = [torch.nn.functional.pad(x, (0, 3), value=0 if x.dtype == torch.bool else 1e6) for x in args]
    assert_close(POLICY_LOSSES[name](*padded)[0][:, :6], POLICY_LOSSES[name](*args)[0], rtol=0, atol=1e-15)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_huge_log_ratios_stay_finite_in_float32(name):
    log_probs = t([-1.0], [-1.0], [-200.0], [-200.0]).float().requires_grad_()
    args = (log_probs, -201 - log_probs.detach(), t([1.0], [-1.0], [1.0], [-1.0]).float(), m([1], [1], [1], [1]))
    loss = POLICY_LOSSES[name](*args)[0]
    assert loss.dtype == torch.float32 and bool(loss.isfinite().all())
    assert gradient(name, args).isfinite().all()


@dataclass(frozen=True)
class Clip:
    value_clip: float | None


@pytest.mark.parametrize("value_clip", [None, 0.2])
def test_value_loss_gradients_agree_with_finite_differences(value_clip):
    values, old_values, returns, mask = batch(seed=5)
    loss_of = bind(value_loss, Clip(value_clip))
    assert torch.autograd.gradcheck(lambda x: loss_of(x, old_values, returns, mask)[0], values)


def test_value_loss_by_hand():
    args = (t([1.0, 1.0, 1.0, NAN]), t([0.0, 0.9, 0.0, NAN]), t([2.0, 2.0, 0.0, NAN]), m([1, 1, 1, 0]))
    assert_close(value_loss(*args)[0], t([0.5, 0.5, 0.5, 0.0]))
    # the first and third are clipped to 0.2: (0.2 - 2)^2 / 2 = 1.62, and 0.02, which is less than without the clip
    loss, metrics = value_loss(*args, value_clip=0.2)
    assert_close(loss, t([1.62, 0.5, 0.5, 0.0]))
    assert metrics["critic/clip_frac"].tolist() == [[1, 0, 0, 0]]
    assert value_loss(t([NAN]), t([0.0]), t([0.0]), m([1]), value_clip=0.2)[0].isnan().all()


def test_garbage_off_the_mask_changes_no_value_loss():
    values, old_values, returns, mask = batch()
    dirty = [torch.where(mask, x.detach(), NAN) for x in (values, old_values, returns)]
    loss = value_loss(dirty[0].requires_grad_(), *dirty[1:], mask, value_clip=0.2)[0]
    assert_close(loss, value_loss(values, old_values, returns, mask, value_clip=0.2)[0])
    assert torch.autograd.grad(loss.sum(), dirty[0])[0][~mask].eq(0).all()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # Rows 1 + 3 and 6; the third is empty. The step has 10 tokens in 4 rows, of at most 5.
        ("token-mean", 10 / 10),
        ("seq-mean-token-mean", (2 + 6) / 4),
        ("seq-mean-token-sum", 10 / 4),
        ("seq-mean-token-sum-norm", 10 / 20),
    ],
)
def test_aggregation_divides_by_the_counts_of_the_whole_step(name, expected):
    loss, mask = t([1.0, 3.0], [NAN, 6.0], [NAN, INF]), m([1, 1], [0, 1], [0, 0])
    assert AGGREGATIONS[name](loss, mask, BatchCounts(10, 4, 5)) == expected
    assert (
        AGGREGATIONS[name](loss, mask, BatchCounts.of(mask, 5))
        == {
            "token-mean": 10 / 3,
            "seq-mean-token-mean": 4,
            "seq-mean-token-sum": 5,
            "seq-mean-token-sum-norm": 1,
        }[name]
    )
    nothing = torch.zeros_like(mask)
    assert AGGREGATIONS[name](loss, nothing, BatchCounts.of(nothing, 5)) == 0


def test_counts_leave_out_rows_without_tokens():
    assert BatchCounts.of(m([1, 0, 1], [0, 0, 0], [0, 1, 0]), 7) == BatchCounts(3, 2, 7)


def test_gspo_under_its_own_aggregation_weighs_rows_equally_and_under_token_mean_by_length():
    log_probs, old = t([-1.0] * 4, [-1.0] * 4), t([-1.0] * 4, [-1.0] * 4)
    mask = m([1, 0, 0, 0], [1, 1, 1, 1])
    advantages = t([1.0] * 4, [2.0] * 4)
    loss = POLICY_LOSSES["gspo"](log_probs, old, advantages, mask)[0]
    counts = BatchCounts.of(mask)
    assert AGGREGATIONS[AGGREGATION_OF["gspo"]](loss, mask, counts) == -(1 + 2) / 2
    assert AGGREGATIONS["token-mean"](loss, mask, counts) == -(1 * 1 + 2 * 4) / 5
    assert set(AGGREGATION_OF) <= set(POLICY_LOSSES) and set(AGGREGATION_OF.values()) <= set(AGGREGATIONS)


@dataclass(frozen=True)
class Algo:
    eps_clip: float = 0.3
    dual_clip: float | None = 3.0


@dataclass(frozen=True)
class Rollout:
    eps_clip: float = 9.0
    width: int = 5


def test_bind_fills_keyword_only_settings_from_the_first_config_that_has_them():
    def loss(log_probs, dual_clip, *, eps_clip, width, other="default"):
        return eps_clip, width, other

    bound = bind(loss, Algo(), Rollout())
    assert bound(None, None) == (0.3, 5, "default")
    assert bind(POLICY_LOSSES["ppo"], Algo()).keywords == {"eps_clip": 0.3, "dual_clip": 3.0}


def test_bind_names_a_setting_that_no_config_has():
    def loss(log_probs, *, eps_clip, depth):
        return depth

    with pytest.raises(AttributeError, match="loss needs a setting 'depth', which Algo, Rollout lacks"):
        bind(loss, Algo(), Rollout())
