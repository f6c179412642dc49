"""What guardrails find, what they do about it, and that weights never take a step that is not finite."""

import math
from collections import Counter

import pytest
import torch

from spmdrl.config import AnomalyConfig
from spmdrl.experience import make_sample
from spmdrl.trainer.anomalies import MAX_ROLLBACKS, AnomalyStop, Guardrails, RollbackError


def guardrails(max_norm=1.0, **flags):
    made = Guardrails(AnomalyConfig(**flags), max_norm=max_norm)
    made.begin(1)
    return made


def sample(reward=1.0, group=0, index=0, log_prob=-1.0, ref=-1.0, reason="stop"):
    made = make_sample(
        [5, 6], [7, 8], [log_prob] * 2, finish_reason=reason, group_id=group, index=index, row=group, rewards=reward
    )
    made.ref_log_probs = torch.tensor([0.0, ref, ref])
    return made


def pair(**fields):
    return [sample(reward=float(index), index=index, **fields) for index in range(2)]


# ---- optimizer steps ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (math.inf, 1.0), (0.5, math.inf)])
@pytest.mark.parametrize("policy", ["auto", "warn", "skip", "stop", "rollback"])
def test_no_policy_lets_the_weights_take_a_step_that_is_not_finite(policy, loss, norm):
    guard = guardrails(on_anomaly=policy)
    assert not guard.takes_step("policy", loss, norm)
    error = {"auto": AnomalyStop, "stop": AnomalyStop, "rollback": RollbackError}.get(policy)
    if error is None:
        assert not guard.after_step("policy", loss, norm)
    else:
        with pytest.raises(error):
            guard.after_step("policy", loss, norm)
    assert guard.metrics()["anomaly/nonfinite"] == 1


def test_ten_times_the_median_norm_is_a_spike_once_ten_are_known_and_it_would_be_clipped():
    guard = guardrails(on_anomaly="skip")
    for number in range(9):
        assert guard.after_step("policy", 0.0, 0.5 + (number % 3) / 2)  # 0.5, 1, 1.5, ...: median 1
    assert guard.takes_step("policy", 0.0, 99.0)
    guard.after_step("policy", 0.0, 1.0)
    assert guard.takes_step("policy", 0.0, 10.0)
    assert not guard.takes_step("policy", 0.0, 10.1)
    assert guard.takes_step("critic", 0.0, 10.1)
    assert not guard.after_step("policy", 0.0, 10.1)
    assert guard.history["policy/grad_norm"].count(10.1) == 0


def test_a_norm_below_the_clip_is_no_spike():
    guard = guardrails(max_norm=1.0, on_anomaly="skip")
    for _ in range(10):
        guard.after_step("policy", 0.0, 0.001)
    assert guard.takes_step("policy", 0.0, 1.0)
    assert not guard.takes_step("policy", 0.0, 1.01)


def test_a_spike_that_is_only_warned_of_is_taken(capsys):
    guard = guardrails()
    for _ in range(10):
        guard.after_step("policy", 0.0, 2.0)
    assert guard.after_step("policy", 0.0, 21.0)
    assert capsys.readouterr().out == "anomaly: grad_spike in step 1: gradient norm of the policy 21 > 20\n"


def test_the_line_of_a_stop_has_case_step_value_and_threshold():
    guard = guardrails(on_anomaly="stop")
    for _ in range(10):
        guard.after_step("critic", 0.0, 2.0)
    guard.begin(7)
    with pytest.raises(
        AnomalyStop, match=r"grad_spike in step 7: gradient norm of the critic 21 > 20 \(--on_anomaly\); the"
    ):
        guard.after_step("critic", 0.0, 21.0)


# ---- rollouts -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("samples", "kind"),
    [
        (pair(), None),
        (pair(reason="length"), "all_truncated"),
        ([*pair(reason="length"), *pair(group=1)], None),
        ([sample(group=g, index=i, reward=g) for g in range(2) for i in range(2)], "all_flat"),
        ([sample(reward=float(i), index=i) for i in range(2)] + [sample(group=1, index=i) for i in range(2)], None),
        ([sample(group=g) for g in range(2)], None),  # one sample a prompt: there are no groups
        (pair(log_prob=-0.0009, ref=-0.0009), "entropy_collapse"),
        ([sample(reward=math.nan), sample(index=1)], "nonfinite"),
        (pair(ref=-math.inf), "nonfinite"),
    ],
)
def test_what_is_wrong_with_a_rollout(samples, kind):
    guard = guardrails(on_anomaly="skip")
    assert guard.takes_rollout(samples) is (kind is None)
    assert guard.counts == ({kind: 1} if kind else Counter())


def test_a_kl_spike_is_above_ten_times_the_median_and_above_a_tenth():
    guard = guardrails(on_anomaly="skip")
    for _ in range(10):
        assert guard.takes_rollout(pair(ref=-1.005))  # KL 0.005 a token: 10 times that is still little
    assert guard.takes_rollout(pair(ref=-1.099))
    assert not guard.takes_rollout(pair(ref=-1.101))
    assert guard.counts == {"kl_spike": 1}


def test_ignored_cases_are_counted_without_a_word(capsys):
    guard = guardrails(on_anomaly="stop", anomaly_ignore=("all_truncated",))
    assert guard.takes_rollout(pair(reason="length"))
    assert guard.metrics()["anomaly/all_truncated"] == 1
    assert capsys.readouterr().out == ""


def test_what_the_last_step_had_too_is_not_said_again(capsys):
    guard = guardrails()
    for step, reason in enumerate(("length", "length", "stop", "length"), 1):
        guard.begin(step)
        guard.takes_rollout(pair(reason=reason))
    assert [line.split()[4] for line in capsys.readouterr().out.splitlines()] == ["1:", "4:"]


def test_counts_are_of_the_step():
    guard = guardrails()
    guard.takes_rollout(pair(reason="length"))
    guard.begin(2)
    assert set(guard.metrics().values()) == {0.0}


# ---- rollbacks ------------------------------------------------------------------------------------------------------
def test_rollbacks_without_getting_further_end_the_run():
    guard = guardrails(on_anomaly="rollback")
    saved = guard.state_dict()
    for number in range(1, MAX_ROLLBACKS + 1):
        guard.begin(5)
        with pytest.raises(RollbackError):
            guard.takes_rollout(pair(reason="length"))
        guard.load_state_dict(saved)
        assert guard.redraws == number
    guard.begin(4)
    with pytest.raises(AnomalyStop, match=rf"all_truncated in step 4: .*also after {MAX_ROLLBACKS} rollbacks"):
        guard.takes_rollout(pair(reason="length"))


def test_a_step_further_is_a_new_case():
    guard = guardrails(on_anomaly="rollback")
    for step in range(1, 2 * MAX_ROLLBACKS):
        guard.begin(step)
        with pytest.raises(RollbackError):
            guard.takes_rollout(pair(reason="length"))


def test_a_new_process_goes_on_from_the_saved_state():
    guard = guardrails(on_anomaly="rollback")
    for _ in range(10):
        guard.after_step("policy", 0.0, 2.0)
    with pytest.raises(RollbackError):
        guard.after_step("policy", 0.0, 30.0)
    other = Guardrails(AnomalyConfig(on_anomaly="skip"), max_norm=1.0)
    other.load_state_dict(guard.state_dict())
    assert other.state_dict() == guard.state_dict()
    assert not other.takes_step("policy", 0.0, 20.1)
