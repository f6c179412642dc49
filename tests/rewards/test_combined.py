"""Several reward functions: their weighted sum, what is logged of each, and how a wrong number of weights is told."""

import pytest
import torch

from spmdrl.config import PPOConfig, RewardConfig
from spmdrl.config.parse import read_config
from spmdrl.errors import UserError
from spmdrl.rewards.combined import CombinedReward, combine, load_rewards, source_names, told_apart
from spmdrl.rewards.function import RewardFunction
from spmdrl.rewards.source import RewardBatch, RewardError

LENGTH = """
def length(queries, prompts, labels):
    return [len(query) - len(prompt) for query, prompt in zip(queries, prompts)]

def checked(queries, prompts, labels, hint):
    right = [float(h in query) for h, query in zip(hint, queries)]
    return {"rewards": right, "scores": [10 * x for x in right], "extra_logs": {"right": right, "seen": 1.0}}

def broken(queries, prompts, labels):
    return [float("nan")] * len(queries)
"""


@pytest.fixture
def spec(tmp_path):
    (tmp_path / "rewards.py").write_text(LENGTH)
    return lambda name: f"{tmp_path / 'rewards.py'}:{name}"


def call(reward):
    """Responses of 3 and 1 characters; the hint is in the first."""
    return reward(
        RewardBatch(
            queries=["Q:abc", "Q:z"],
            prompts=["Q:", "Q:"],
            labels=[None, None],
            columns={"hint": ["abc", "q"]},
            sample_ids=["row 1, sample 0", "row 2, sample 0"],
        )
    )


def load_reward(config):
    return combine(load_rewards(config, batch_size=2), config.reward_weights)


def test_rewards_are_the_weighted_sum_and_each_is_logged(spec):
    """0.5 x [3, 1] + 2 x [1, 0]; only the second function has scores, so the first goes by its rewards."""
    out = call(load_reward(RewardConfig(reward_func=(spec("length"), spec("checked")), reward_weights=(0.5, 2.0))))
    assert out.rewards.tolist() == [3.5, 0.5]
    assert out.scores is not None and out.scores.tolist() == [21.5, 0.5]
    assert {name: x.tolist() for name, x in out.extra_logs.items()} == {
        "reward/length": [3, 1],
        "reward/checked": [1, 0],
        "right": [1, 0],
        "seen": [1, 1],
    }


def test_weights_are_1_unless_given(spec):
    out = call(load_reward(RewardConfig(reward_func=(spec("length"), spec("length")))))
    assert out.rewards.tolist() == [6, 2]
    assert out.scores is None


def test_a_single_function_is_what_it_was(spec):
    alone = load_reward(RewardConfig(reward_func=(spec("length"),)))
    assert isinstance(alone, RewardFunction)
    assert call(alone).extra_logs == {}
    weighed = load_reward(RewardConfig(reward_func=(spec("length"),), reward_weights=(0.1,)))
    torch.testing.assert_close(call(weighed).rewards, torch.tensor([0.3, 0.1]))


def test_a_file_alone_is_one_function(tmp_path):
    (tmp_path / "reward.py").write_text("def reward_func(queries, prompts, labels): return [1.0] * len(queries)\n")
    assert call(load_reward(RewardConfig(remote_rm_url=str(tmp_path / "reward.py")))).rewards.tolist() == [1, 1]


def test_an_error_of_one_function_names_it_whatever_its_weight(spec):
    reward = load_reward(RewardConfig(reward_func=(spec("length"), spec("broken")), reward_weights=(1.0, 0.0)))
    with pytest.raises(RewardError, match=r"broken in .*rewards\.py returned nan for row 1, sample 0"):
        call(reward)


def test_a_column_that_one_function_needs_is_looked_for_at_the_start(spec):
    reward = load_reward(RewardConfig(reward_func=(spec("length"), spec("checked"))))
    assert isinstance(reward, CombinedReward)
    reward.check_columns(["hint"])
    with pytest.raises(UserError, match=r"checked in .* takes 'hint', which no column of the data is called"):
        reward.check_columns(["answer"])


@pytest.mark.parametrize(
    ("choices", "names"),
    [
        ([("f", "a_f"), ("g", "b_g")], ["f", "g"]),
        ([("f", "a_f"), ("g", "b_g"), ("f", "b_f")], ["a_f", "g", "b_f"]),
        ([("f", "a_f"), ("f", "b_f")], ["a_f", "b_f"]),
        ([("f", "a_f"), ("f", "a_f")], ["a_f_1", "a_f_2"]),
        ([], []),
    ],
)
def test_sources_are_told_apart_in_the_logs(choices, names):
    assert told_apart(choices) == names


def test_a_model_and_a_function_of_the_same_name_are_two():
    config = RewardConfig(reward_pretrain="runs/judge", remote_rm_url="http://a/x", reward_func=("b.py:judge",))
    assert source_names(config) == ["runs_judge", "remote", "b_judge"]


def test_functions_are_called_by_their_name_or_with_their_files(spec, tmp_path):
    (tmp_path / "other.py").write_text(LENGTH)
    alone = load_rewards(RewardConfig(reward_func=(spec("length"), spec("checked"))), batch_size=1)
    assert list(alone) == ["length", "checked"]
    both = load_rewards(RewardConfig(reward_func=(spec("length"), f"{tmp_path / 'other.py'}:length")), batch_size=1)
    assert list(both) == ["rewards_length", "other_length"]


def test_a_wrong_number_of_weights_is_refused_with_both_flags():
    flags = ["--reward_func", "a.py:f", "b.py:g", "--reward_weights"]
    assert read_config(PPOConfig, [*flags, "1", "0.5"]).reward.reward_weights == (1.0, 0.5)
    with pytest.raises(UserError) as error:
        read_config(PPOConfig, [*flags, "1"])
    assert str(error.value) == (
        "--reward_weights has 1 number for 2 rewards: 0 of --reward_pretrain, 0 of --remote_rm_url, 2 of "
        "--reward_func; give one for each, in this order"
    )
