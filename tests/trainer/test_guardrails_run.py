"""Whole runs in which something goes wrong: what --on_anomaly makes of it."""

import pytest
import torch

from spmdrl.trainer.anomalies import AnomalyStop
from tests.trainer.runs import FakeEngine, build, canned, completion, write_inputs

ANSWERS = (completion([70, 2]), completion([71, 72, 2]), completion([73, 2], log_prob=-1.0))


@pytest.fixture
def inputs(tmp_path, one_rank):
    return write_inputs(tmp_path / "in") | {"rollout_correction": "none"}


def spoilt(trainer, call, by=float("nan")):
    """The trainer, whose loss is multiplied by `by` in that micro-batch of the run."""
    own, calls = trainer.policy_update.loss, iter(range(10**6))

    def loss(*args, **kwargs):
        value, metrics = own(*args, **kwargs)
        return value * (by if next(calls) == call else 1.0), metrics

    trainer.policy_update.loss = loss
    return trainer


def weights_of(trainer):
    return {name: p.detach().clone() for name, p in trainer.actor.module.model.named_parameters()}


def same(a, b):
    return all(bool((a[name] == b[name]).all()) for name in a)


def start(folder, inputs, answers=ANSWERS, **flags):
    return build(folder, FakeEngine(canned(*answers)), **inputs, **flags)


def test_a_loss_that_is_not_finite_ends_the_run_before_it_reaches_the_weights(tmp_path, inputs):
    """Two optimizer steps a rollout of 2 micro-batches each; the first of the second one is spoilt."""
    trainer = spoilt(start(tmp_path / "out", inputs, train_batch_size=4), call=2)
    weights = []
    own = trainer.policy_update.optimizer_step

    def optimizer_step(*args, **kwargs):
        weights.append(weights_of(trainer))
        return own(*args, **kwargs)

    trainer.policy_update.optimizer_step = optimizer_step
    with pytest.raises(
        AnomalyStop, match=r"nonfinite in step 1: loss of the policy is nan \(--on_anomaly\); the weights"
    ):
        trainer.fit()
    assert len(weights) == 2
    assert not same(weights[0], weights[1])
    assert same(weights[1], weights_of(trainer))
    assert all(p.grad is None for p in trainer.actor.module.parameters())


def test_a_skipped_step_moves_neither_weights_nor_the_schedule(tmp_path, inputs, capsys):
    trainer = spoilt(start(tmp_path / "out", inputs, train_batch_size=4, on_anomaly="skip"), call=2)
    trainer.fit()
    result = trainer.result()
    assert result.column("anomaly/nonfinite") == [1.0, 0.0]
    assert trainer.actor.skipped_steps == 1
    assert trainer.actor.lr_scheduler.last_epoch == 3  # of 4 optimizer steps
    assert "anomaly: nonfinite in step 1: loss of the policy is nan; this optimizer step is left out" in (
        capsys.readouterr().out
    )
    assert all(bool(torch.isfinite(w).all()) for w in result.weights.values())
    assert result.metrics[0]["policy/loss"] == pytest.approx(result.metrics[0]["policy/loss"])
    assert result.metrics[0]["policy/grad_norm"] > 0


@pytest.mark.parametrize("policy", ["warn", "skip"])
def test_a_rollout_is_left_out_if_the_policy_says_so(tmp_path, inputs, policy):
    answers = [completion([70 + i, 71], "length") for i in range(3)]
    trainer = start(tmp_path / "out", inputs, answers, on_anomaly=policy)
    before = weights_of(trainer)
    trainer.fit()
    result = trainer.result()
    assert same(before, weights_of(trainer)) is (policy == "skip")
    assert trainer.actor.lr_scheduler.last_epoch == (0 if policy == "skip" else 2)
    assert result.column("anomaly/all_truncated") == [1.0, 1.0]
    assert ("policy/loss" in result.metrics[0]) is (policy == "warn")


def test_a_critic_that_is_not_finite_is_left_out_alone(tmp_path, inputs):
    """The actor goes on with the advantages that the rollout has."""
    flags = {"advantage_estimator": "gae", "on_anomaly": "skip"}
    trainer = start(tmp_path / "out", inputs, **flags)
    own = trainer.value_update.loss
    trainer.value_update.loss = lambda *a: (own(*a)[0] * float("inf"), own(*a)[1])
    trainer.fit()
    result = trainer.result()
    assert result.column("anomaly/nonfinite") == [1.0, 1.0]
    assert "critic/loss" not in result.metrics[0]
    assert "policy/loss" in result.metrics[0]
    assert trainer.critic.lr_scheduler.last_epoch == 0
    assert trainer.actor.lr_scheduler.last_epoch == 2


# ---- rollback -------------------------------------------------------------------------------------------------------
class TruncatingEngine(FakeEngine):
    """Cuts every response of the generate calls that are named; each call answers by the requests' seeds."""

    def __init__(self, *bad_calls):
        super().__init__(self.by_seed)
        self.bad_calls, self.seeds, self.is_bad = bad_calls, [], False

    def generate(self, requests, options):
        self.is_bad = len(self.seeds) in self.bad_calls
        self.seeds.append([request.seed for request in requests])
        return super().generate(requests, options)

    def by_seed(self, number, request, options):
        ids = [70 + request.seed % 50, 70 + request.seed % 41]
        return completion(ids, "length") if self.is_bad else completion([*ids, 2])


def rolling_back(folder, inputs, engine, **flags):
    flags = {"on_anomaly": "rollback", "save_steps": 1, "ckpt_path": folder / "ckpt", "num_episodes": 2} | flags
    return build(folder / "out", engine, **inputs, **flags)


def test_a_rollback_goes_on_from_the_newest_checkpoint_with_other_samples(tmp_path, inputs, capsys):
    """Step 3 of 4 is all truncated the first time; the run goes back to the end of step 2."""
    engine = TruncatingEngine(2)
    trainer = rolling_back(tmp_path, inputs, engine)
    trainer.fit()
    result = trainer.result()
    assert len(engine.seeds) == 5
    assert not set(engine.seeds[2]) & set(engine.seeds[3])
    assert result.column("step") == [1, 2, 3, 4]
    assert [row["step"] for row in result.rows] == sorted(row["step"] for row in result.rows)
    assert result.column("anomaly/all_truncated") == [0, 0, 0, 0]
    assert trainer.actor.lr_scheduler.last_epoch == 4
    out = capsys.readouterr().out
    assert "anomaly: all_truncated in step 3: truncated samples: 8 of 8; going back to the newest checkpoint" in out

    again = TruncatingEngine()
    plain = rolling_back(tmp_path / "plain", inputs, again)
    plain.fit()
    assert plain.result().ids()[:2] == result.ids()[:2]
    assert again.seeds[:3] == engine.seeds[:3]


def test_rollbacks_that_do_not_help_end_the_run_with_a_checkpoint(tmp_path, inputs):
    trainer = rolling_back(tmp_path, inputs, TruncatingEngine(1, 2, 3, 4))
    with pytest.raises(AnomalyStop, match=r"all_truncated in step 2: .*, also after 3 rollbacks"):
        trainer.fit()
    assert trainer.step == 1


def test_without_a_checkpoint_yet_there_is_no_rollback(tmp_path, inputs):
    trainer = rolling_back(tmp_path, inputs, TruncatingEngine(0), save_steps=2)
    with pytest.raises(AnomalyStop, match="there is no checkpoint to go back to yet"):
        trainer.fit()


def test_a_stopped_run_goes_on_once_the_case_is_to_be_skipped(tmp_path, inputs):
    flags = {"ckpt_path": tmp_path / "ckpt", "num_episodes": 2}
    trainer = build(tmp_path / "out", TruncatingEngine(2), **inputs, **flags, on_anomaly="stop")
    with pytest.raises(AnomalyStop):
        trainer.fit()
    flags |= {"on_anomaly": "skip", "load_checkpoint": True}
    resumed = build(tmp_path / "out", TruncatingEngine(0), **inputs, **flags)
    assert resumed.step == 2
    resumed.fit()
    assert resumed.result().column("anomaly/all_truncated") == [0, 0, 1, 0]
