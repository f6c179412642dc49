"""Invariant 6: a run that was stopped and resumed is, bit for bit, the run that was not."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from spmdrl.distributed import comm, preemption
from spmdrl.distributed.preemption import Preempted
from spmdrl.distributed.weight_sync import iter_weights
from spmdrl.errors import UserError
from tests.ranks import run_ranks
from tests.tiny import make_model, write_jsonl
from tests.trainer.runs import build, read_jsonl, write_inputs

# 14 prompts in steps of 4: 3 steps an episode, and which 2 prompts are left out differs. Two optimizer steps a role.
EVERYTHING = {
    "num_episodes": 2,
    "advantage_estimator": "gae",
    "critic_learning_rate": 1e-3,
    "train_batch_size": 4,
    "normalize_reward": True,
    "kl_target": 0.05,
    "kl_horizon": 40,
    "generate_max_len": 6,
}
# Draws a number of its own, as a noisy reward does, besides what the response earns.
REWARD = """
import random, zlib

def reward_func(queries, prompts, labels, **columns):
    return [random.random() / 8 + zlib.crc32(q[len(p):].encode()) % 8 / 4 for q, p in zip(queries, prompts)]
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    flags = write_inputs(folder, num_prompts=14, reward=REWARD)
    texts = write_jsonl(folder / "texts.jsonl", [{"text": "ab" * i} for i in range(1, 8)])
    return flags | {"pretrain_data": texts, "pretrain_key": "text"}


def weights_of(engine):
    return {name: w.clone() for name, w in iter_weights(engine, bucket_mb=64)}


def outcome(trainer):
    """All that a run leaves, but for its times: weights of actor and critic, metrics, samples, and its state."""
    comm.barrier()  # the main rank has written
    folder = Path(trainer.config.checkpoint.save_path)
    metrics = [
        {name: value for name, value in row.items() if not name.startswith(("time/", "perf/"))}
        for row in read_jsonl(folder / "metrics.jsonl")
    ]
    state = trainer.state_dict() | {"shuffle": trainer.shuffle.get_state().tolist()}
    critic = {} if trainer.critic is None else weights_of(trainer.critic)
    return {
        "actor": weights_of(trainer.actor),
        "critic": critic,
        "metrics": metrics,
        "samples": read_jsonl(folder / "samples.jsonl"),
        "state": json.dumps(state, sort_keys=True),
        "random": torch.rand(3).tolist(),
    }


def assert_same(a, b):
    for role in ("actor", "critic"):
        assert a[role].keys() == b[role].keys()
        for name in a[role]:
            assert torch.equal(a[role][name], b[role][name]), f"{role}: {name}"
    assert a["metrics"] == b["metrics"]
    assert a["samples"] == b["samples"]
    assert a["state"] == b["state"]
    assert a["random"] == b["random"]


def straight(folder, **flags):
    trainer = build(folder, **flags)
    trainer.fit()
    return outcome(trainer)


def only(trainer, total_steps):
    """The trainer of a run that ends earlier than its schedules say."""
    trainer.sizes = dataclasses.replace(trainer.sizes, total_steps=total_steps)
    return trainer


class StopAt:
    """Asks the run to stop at one of its safe points: the one of that `number`, or the first where `when` says so."""

    def __init__(self, monkeypatch, number=None, when=lambda: False):
        self.number, self.when, self.count = number, when, 0
        monkeypatch.setattr(preemption, "safe_point", self)

    def __call__(self):
        self.count += 1
        if self.count == self.number or self.when():
            raise Preempted("a test", "here")


def stopped_at(number, folder, updates=None, **flags):
    """Name of the checkpoint of a run that was stopped at that safe point, or in step 2 after that many updates."""
    trainer = build(folder, **flags)
    with pytest.MonkeyPatch.context() as patch:
        StopAt(patch, number, when=lambda: updates is not None and (trainer.step, trainer.updates) == (1, updates))
        with pytest.raises(Preempted) as stopped:
            trainer.fit()
    return stopped.value.saved_in.rpartition("/")[2]


def resumed(folder, **flags):
    trainer = build(folder, load_checkpoint=True, **flags)
    trainer.fit()
    return outcome(trainer)


# ---- 3 + 3 = 6 ------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def six_steps(inputs, tmp_path_factory, process_group):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
            patch.setenv(name, value)
        points = StopAt(patch)
        result = straight(tmp_path_factory.mktemp("six"), **inputs, **EVERYTHING)
    assert [row["step"] for row in result["metrics"]] == [1, 2, 3, 4, 5, 6]
    assert len({row["policy/lr"] for row in result["metrics"]}) == 6
    return result | {"safe_points": points.count}


@pytest.mark.parametrize("first", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_stopped_after_three_steps_and_resumed_is_six(tmp_path, one_rank, inputs, six_steps, first):
    """Also where the first part ends in the middle of the second episode."""
    flags = {**inputs, **EVERYTHING, "save_steps": first}
    only(build(tmp_path, **flags), first).fit()
    assert_same(resumed(tmp_path, **flags), six_steps)


@pytest.mark.slow
def test_stopped_in_any_phase_and_resumed_is_six(tmp_path, one_rank, inputs, six_steps):
    """At safe points all over the second step: generation, the three scorings, both updates of critic and actor."""
    a_step = six_steps["safe_points"] // 6
    names = set()
    for number in range(a_step + 2, 2 * a_step + 2, 3):
        folder = tmp_path / str(number)
        names.add(stopped_at(number, folder, **inputs, **EVERYTHING))
        assert_same(resumed(folder, **inputs, **EVERYTHING), six_steps)
    updates = [f"step_000002_update_{i:06d}" for i in (1, 2, 3)]
    assert names >= {"step_000001", *updates}


@pytest.mark.slow
def test_resumed_again_and_again_is_six(tmp_path, one_rank, inputs, six_steps):
    """Each time a little further, the saved rollout being used up over several lives."""
    lives = 0
    while lives < 20:
        lives += 1
        with pytest.MonkeyPatch.context() as patch:
            StopAt(patch, six_steps["safe_points"] // 7)
            trainer = build(tmp_path, **inputs, **EVERYTHING, load_checkpoint=True)
            try:
                trainer.fit()
                break
            except Preempted:
                continue
    assert 5 < lives < 20
    assert_same(outcome(trainer), six_steps)


def test_nothing_is_generated_again_for_a_rollout_that_was_saved(tmp_path, one_rank, inputs, six_steps):
    """U66: a run that is resumed in its second step samples for the four steps after it."""
    flags = {**inputs, **EVERYTHING, "save_steps": 1}
    assert stopped_at(None, tmp_path, updates=0, **flags) == "step_000002_update_000000"
    trainer = build(tmp_path, **inputs, **EVERYTHING, load_checkpoint=True)
    calls, own = [], trainer.engine.generate
    trainer.engine.generate = lambda *args: (calls.append(args), own(*args))[1]
    trainer.fit()
    assert len(calls) == 4


@pytest.mark.slow
def test_a_run_that_had_ended_ends_again(tmp_path, one_rank, inputs, six_steps):
    flags = {**inputs, **EVERYTHING, "save_steps": 6}
    straight(tmp_path, **flags)
    assert_same(resumed(tmp_path, **flags), six_steps)


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_stopped_within_a_step_under_zero_and_resumed_is_the_same(tmp_path, one_rank, inputs, zero_stage):
    flags = {**inputs, **EVERYTHING, "zero_stage": zero_stage, "num_episodes": 1}
    whole = straight(tmp_path / "whole", **flags)
    assert stopped_at(None, tmp_path / "parts", updates=3, **flags) == "step_000002_update_000003"
    assert_same(resumed(tmp_path / "parts", **flags), whole)


# ---- what changes may be made ---------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def one_step(inputs, tmp_path_factory, process_group):
    """A checkpoint after the first of three steps; its flags."""
    flags = {**inputs, "save_steps": 1, "ckpt_path": str(tmp_path_factory.mktemp("ckpt")), "lr_scheduler": "constant"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
            patch.setenv(name, value)
        only(build(tmp_path_factory.mktemp("out"), **flags), 1).fit()
    return flags | {"save_steps": -1}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"temperature": 0.5}, "--temperature 1.0 -> 0.5"),
        ({"seed": 7}, "--seed 42 -> 7"),
        ({"actor_learning_rate": 1e-4, "max_epochs": 2}, "--max_epochs 1 -> 2; --actor_learning_rate 0.001 -> 0.0001"),
        ({"lr_scheduler": "linear"}, "--lr_scheduler constant -> linear"),
    ],
)
def test_a_flag_that_changes_the_result_is_refused_by_name(tmp_path, one_rank, one_step, change, said):
    with pytest.raises(UserError, match=r"would go on differently") as error:
        build(tmp_path, **(one_step | change), load_checkpoint=True)
    assert said in str(error.value)
    assert "--allow_config_change" in str(error.value)


def test_other_data_model_and_reward_are_refused_by_their_contents(tmp_path, one_rank, one_step):
    rows = [{"question": "cd" * i + "?", "answer": {"value": i}, "number": i} for i in range(1, 15)]
    reward = tmp_path / "reward.py"
    reward.write_text(REWARD + "\n")
    for flag, value in {
        "prompt_data": write_jsonl(tmp_path / "other.jsonl", rows),
        "pretrain": make_model(tmp_path / "model", "llama", seed=1),
        "remote_rm_url": str(reward),
    }.items():
        with pytest.raises(UserError, match=rf"--{flag} has other contents"):
            build(tmp_path / "out", **(one_step | {flag: value}), load_checkpoint=True)


def test_what_changes_nothing_may_change_and_is_said(tmp_path, one_rank, one_step, capsys):
    """Micro-batches, ZeRO stage, places; the model in another directory; more episodes under a constant rate."""
    import shutil

    moved = shutil.copytree(one_step["pretrain"], tmp_path / "moved")
    changes = {"micro_train_batch_size": 8, "zero_stage": 2, "num_episodes": 2, "pretrain": str(moved)}
    trainer = build(tmp_path / "out", **(one_step | changes), load_checkpoint=True)
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("changed since the"))
    for said in ("--micro_train_batch_size 3 -> 8", "--zero_stage 0 -> 2", "--num_episodes 1 -> 2"):
        assert said in line
    assert "pretrain" not in line
    assert (trainer.step, trainer.sizes.total_steps) == (1, 6)


def test_more_episodes_are_refused_where_the_schedule_would_be_another_one(tmp_path, one_rank, one_step):
    with pytest.raises(UserError, match="--num_episodes 1 -> 2"):
        build(tmp_path, **(one_step | {"lr_scheduler": "linear", "num_episodes": 2}), load_checkpoint=True)


def test_a_change_that_is_allowed_takes_effect(tmp_path, one_rank, one_step, capsys):
    """The new learning rate is that of the flag, and not the one that was saved."""
    change = {"actor_learning_rate": 1e-4, "temperature": 0.5}
    trainer = build(tmp_path, **(one_step | change), load_checkpoint=True, allow_config_change=True)
    assert "--temperature 1.0 -> 0.5" in capsys.readouterr().out
    trainer.fit()
    assert [row["policy/lr"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [1e-4] * 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"advantage_estimator": "gae"}, "values, as --advantage_estimator gae needs"),
        ({"old_log_probs": "trainer"}, "log_probs, as --old_log_probs trainer needs"),
        ({"use_kl_loss": True, "kl_estimator": "k3", "init_kl_coef": 0.01}, "ref_log_probs, as --use_kl_loss needs"),
    ],
)
def test_samples_that_were_not_scored_for_the_new_flags_are_one_line(tmp_path, one_rank, inputs, change, said):
    """--allow_config_change in the middle of a step; the former flags go on."""
    flags = {**inputs, "train_batch_size": 4, "old_log_probs": "engine", "init_kl_coef": 0}
    assert stopped_at(None, tmp_path, updates=1, **flags) == "step_000002_update_000001"
    with pytest.raises(UserError) as error:
        build(tmp_path, **(flags | change), load_checkpoint=True, allow_config_change=True)
    assert f"the middle of a step, whose samples have no {said}" in str(error.value)
    build(tmp_path, **flags, load_checkpoint=True)


def test_logs_go_on_after_the_step_that_was_saved(tmp_path, one_rank, inputs):
    """Rows of steps that are done again are dropped, those before stay."""
    flags = {**inputs, "save_steps": 2}
    build(tmp_path, **flags).fit()
    first = read_jsonl(tmp_path / "metrics.jsonl")
    resumed(tmp_path, **flags)
    again = read_jsonl(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in again] == [1, 2, 3]
    assert again[:2] == first[:2]


@pytest.mark.parametrize("number", [2, 5])
def test_a_run_stopped_before_its_first_rollout_is_there_evaluates_again(tmp_path, one_rank, inputs, number):
    """Stopped in the evaluation before the first step, or after it, there is one row of it."""
    flags = {**inputs, "eval_dataset": inputs["prompt_data"], "eval_steps": 2, "eval_on_start": True}
    assert stopped_at(number, tmp_path, **flags) == "step_000000"
    resumed(tmp_path, **flags)
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows if "eval/reward" in row] == [0, 2, 3]


def test_a_home_directory_is_found_by_all_that_is_written(tmp_path, one_rank, inputs, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    only(build("~/run", **inputs), 1).fit()
    assert all((tmp_path / "run" / name).is_file() for name in ("config.yaml", "config.json", "metrics.jsonl"))
    assert not (tmp_path / "~").exists()


def test_the_model_beside_a_checkpoint_and_the_best_one_load_elsewhere(tmp_path, one_rank, inputs):
    from transformers import AutoModelForCausalLM

    flags = {**inputs, "save_steps": 2, "save_hf_ckpt": True, "eval_dataset": inputs["prompt_data"], "eval_steps": 1}
    trainer = build(tmp_path, **flags)
    trainer.fit()
    rewards = {
        row["step"]: row["eval/reward"] for row in read_jsonl(tmp_path / "metrics.jsonl") if "eval/reward" in row
    }
    best = max(rewards, key=rewards.get)
    assert [path.name for path in (tmp_path / "ckpt" / "best").glob("step_*")] == [f"step_{best:06d}"]
    for folder in (tmp_path / "ckpt" / "step_000002" / "hf", tmp_path / "ckpt" / "best" / f"step_{best:06d}" / "hf"):
        AutoModelForCausalLM.from_pretrained(folder)
    assert trainer.saver.best == rewards[best]


# ---- two ranks ------------------------------------------------------------------------------------------------------
def run_whole_and_stopped(folder, flags):
    """A run, and one that is stopped in its second step; what the first came to."""
    whole = straight(f"{folder}/whole", **flags)
    stopped_at(None, f"{folder}/parts", updates=3, **flags)
    return whole


def run_resumed(folder, flags, ckpt_path):
    return resumed(folder, **flags, ckpt_path=ckpt_path)


@pytest.mark.slow
def test_two_ranks_stopped_within_a_step_are_the_same_and_one_rank_goes_on_too(tmp_path, inputs):
    """ZeRO-3. On one rank, under ZeRO-1, the rest of the run differs by rounding only."""
    flags = {**inputs, **EVERYTHING, "zero_stage": 3, "num_episodes": 1, "remote_rm_url": f"{tmp_path}/reward.py"}
    (tmp_path / "reward.py").write_text(REWARD.replace("random.random() / 8 + ", ""))
    whole = run_ranks(2, run_whole_and_stopped, str(tmp_path), flags)
    found = f"{tmp_path}/parts/ckpt"
    for one, other in zip(run_ranks(2, run_resumed, str(tmp_path / "two"), flags, found), whole, strict=True):
        assert_same(one | {"metrics": [], "samples": []}, other | {"metrics": [], "samples": []})
        assert one["metrics"] == other["metrics"][1:]
        assert one["samples"] == [row for row in other["samples"] if row["step"] > 1]
    Path(found, "finished").unlink()
    (alone,) = run_ranks(1, run_resumed, str(tmp_path / "one"), flags | {"zero_stage": 1}, found)
    for name, weight in whole[0]["actor"].items():
        torch.testing.assert_close(alone["actor"][name], weight, atol=1e-3, rtol=0)
    assert alone["samples"] == one["samples"]
    for row, other in zip(alone["metrics"], whole[0]["metrics"][1:], strict=True):
        for name in ("policy/loss", "critic/loss", "policy/grad_norm", "policy/ptx_loss", "policy/entropy"):
            assert row[name] == pytest.approx(other[name], rel=1e-3, abs=1e-4), name
