"""Evaluation: when it runs, what its numbers are, and that training does not notice it."""

import json
import math

import pytest

from spmdrl.errors import UserError
from spmdrl.experience import make_sample
from spmdrl.rollout.engine import sampling_seed
from spmdrl.trainer.evaluation import eval_metrics
from spmdrl.trainer.metrics import OWN_NAMES, rollout_metrics
from tests.ranks import run_ranks
from tests.tiny import write_jsonl
from tests.trainer.runs import config_of, read_jsonl, run, write_inputs

HELD_OUT = [{"question": f"{word}?", "answer": 0, "number": i} for i, word in enumerate(("x", "yyy", "zz"))]


def sample(group, index, reward, length=2, reason="stop", **info):
    return make_sample(
        [5],
        [6] * length,
        [-1.0] * length,
        finish_reason=reason,
        group_id=group,
        index=index,
        row=group,
        rewards=reward,
        info=info,
    )


def evaluating(folder, **flags):
    path = write_jsonl(folder / "held_out.jsonl", HELD_OUT)
    return {"eval_dataset": path, "eval_steps": 1, "eval_n_samples_per_prompt": 2} | flags


def eval_rows(result):
    return {row["step"]: row for row in result.metrics if "eval/reward" in row}


def test_means_are_over_samples_and_pass_at_n_over_prompts(one_rank):
    samples = [
        sample(0, 0, 1.0, 2, right=1.0),
        sample(0, 1, 0.0, 4, "length", right=0.0),
        sample(1, 0, 0.0, 2, right=0.0),
        sample(1, 1, 0.0, 4, right=1.0),
    ]
    assert eval_metrics(samples) == {
        "eval/reward": 0.25,
        "eval/response_length": 3.0,
        "eval/truncated": 0.25,
        "eval/right": 0.5,
        "eval/pass@2": 0.5,
        "eval/num_prompts": 2.0,
    }
    assert not any("pass" in name for name in eval_metrics(samples[::2]))


def test_a_number_that_some_samples_have_is_a_mean_over_those(one_rank):
    samples = [sample(0, 0, 1.0), sample(1, 0, 0.0, right=1.0), sample(2, 0, 0.0, right=0.0)]
    assert eval_metrics(samples)["eval/right"] == rollout_metrics(samples)["rollout/right"] == 0.5


def test_the_runs_own_metrics_have_names_that_no_reward_function_may_give(one_rank):
    samples = [sample(0, 0, 1.0), sample(0, 1, 0.0)]
    names = [name.partition("/")[2] for name in rollout_metrics(samples) | eval_metrics(samples)]
    assert set(names) - {"pass@2"} <= OWN_NAMES


def test_evaluation_draws_with_other_seeds_than_training():
    assert len({sampling_seed(1, 0, 0, 0, stream) for stream in ("rollout", "eval", "rollout1")}) == 3


def test_training_is_the_same_with_and_without_evaluation(tmp_path, one_rank):
    inputs = write_inputs(tmp_path / "in")
    plain = run(tmp_path / "plain", **inputs)
    evaluated = run(tmp_path / "evaluated", **inputs, **evaluating(tmp_path, eval_on_start=True))
    assert evaluated.ids() == plain.ids()
    assert all((evaluated.weights[name] == plain.weights[name]).all() for name in plain.weights)
    assert sorted(eval_rows(evaluated)) == [0, 1, 2]
    assert not eval_rows(plain)
    assert [row["step"] for row in evaluated.metrics if row.get("time/eval_s", 0) > 0] == [1, 2]
    assert all(row["eval/num_prompts"] == 3 for row in eval_rows(evaluated).values())
    rows = read_jsonl(tmp_path / "evaluated" / "eval_samples.jsonl")
    assert rows[0].keys() <= OWN_NAMES
    assert [row["prompt"] for row in rows[:6]] == [f"{word}?" for word in ("x", "yyy", "zz") for _ in range(2)]
    assert rows[0]["response"] != rows[1]["response"]
    assert math.fsum(row["reward"] for row in rows[:6]) / 6 == pytest.approx(evaluated.metrics[0]["eval/reward"])


def test_every_evaluation_draws_with_the_same_seeds(tmp_path, one_rank):
    flags = write_inputs(tmp_path / "in") | evaluating(tmp_path, eval_on_start=True)
    still = run(tmp_path / "still", **flags, actor_learning_rate=0)
    numbers = [{k: v for k, v in row.items() if k != "step"} for row in eval_rows(still).values()]
    assert numbers[0] == numbers[1] == numbers[2]


def test_evaluation_runs_every_eval_steps_and_after_the_last_step(tmp_path, one_rank):
    flags = write_inputs(tmp_path / "in", num_prompts=12) | evaluating(tmp_path, eval_steps=2, eval_temperature=0)
    assert sorted(eval_rows(run(tmp_path / "out", **flags | {"eval_n_samples_per_prompt": 1}))) == [2, 3]


def test_held_out_rows_are_diagnosed_like_prompts(tmp_path, one_rank):
    flags = write_inputs(tmp_path / "in") | evaluating(tmp_path)
    (tmp_path / "held_out.jsonl").write_text(json.dumps(HELD_OUT[0]) + '\n{"question": 5, "answer": 0}\n')
    with pytest.raises(UserError, match=r"held_out.jsonl line 2: 'question' \(--input_key\) is a number \(5\)"):
        run(tmp_path / "out", **flags)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"eval_steps": 5}, "--eval_steps evaluates on held-out prompts: give --eval_dataset"),
        ({"eval_dataset": "x.jsonl"}, "--eval_dataset is read every --eval_steps steps: give --eval_steps too"),
        ({"eval_steps": 0, "eval_dataset": "x.jsonl"}, "--eval_steps must be -1 (never) or at least 1, got 0"),
        (
            {"eval_dataset": "x.jsonl", "eval_steps": 1, "eval_temperature": 0},
            "--eval_temperature 0 gives the same response 4 times: add --eval_n_samples_per_prompt 1",
        ),
        ({"eval_split": "dev"}, "--eval_split changes nothing without --eval_dataset; give both or neither"),
    ],
)
def test_flags_that_cannot_be_meant(tmp_path, flags, message):
    with pytest.raises(UserError) as error:
        config_of(tmp_path, **flags)
    assert str(error.value).startswith(message)


def metrics_of_a_run(folder, flags):
    from spmdrl.distributed import comm

    return eval_rows(run(folder / f"on{comm.world_size()}", **flags))


@pytest.mark.slow
def test_the_world_size_does_not_matter(tmp_path):
    """3 prompts on 2 ranks, with the weights of two steps of training."""
    flags = write_inputs(tmp_path / "in") | evaluating(tmp_path)
    one = run_ranks(1, metrics_of_a_run, tmp_path, flags)[0]
    two = run_ranks(2, metrics_of_a_run, tmp_path, flags)
    assert two[0] == two[1]
    for step in (1, 2):
        assert two[0][step] == pytest.approx(one[step])
