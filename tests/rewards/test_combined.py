"""Several reward functions: their weighted sum, what is logged of each, and how a wrong number of weights is told."""

import pytest
import torch

from spmdrl.config import PPOConfig, RewardConfig
from spmdrl.config.parse import read_config
from spmdrl.errors import UserError
from spmdrl.rewards.combined import CombinedReward, function_names, load_reward
from spmdrl.rewards.function import RewardError, RewardFunction

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
        queries=["Q:abc", "Q:z"],
        prompts=["Q:", "Q:"],
        labels=[None, None],
        columns={"hint": ["abc", "q"]},
        sample_ids=["row 1, sample 0", "row 2, sample 0"],
    )


def test_rewards_are_the_weighted_sum_and_each_is_logged(spec):
    """0.5 x [3, 1] + 2 x [1, 0]; only the second function has scores, so the first goes by its rewards."""
    out = call(load_reward(RewardConfig(reward_func=(spec("length"), spec("checked")), reward_weights=(0.5, 2.0))))
    assert out.rewards.tolist() == [3.5, 0.5]
    assert out.scores is not None and out.scores.tolist() == [21.5, 0.5]
    assert {name: x.tolist() for name, x in out.extra_logs.items()} == {
        "reward_length": [3, 1],
        "reward_checked": [1, 0],
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
    ("specs", "names"),
    [
        (["a.py:f", "b.py:g"], ["f", "g"]),
        (["a.py", "b.py"], ["a_reward_func", "b_reward_func"]),
        (["x/a.py:f", "y/a.py:f"], ["a_f_1", "a_f_2"]),
    ],
)
def test_functions_are_told_apart_in_the_logs(specs, names):
    assert function_names(specs) == names


def test_a_wrong_number_of_weights_is_refused_with_both_flags():
    flags = ["--reward_func", "a.py:f", "b.py:g", "--reward_weights"]
    assert read_config(PPOConfig, [*flags, "1", "0.5"]).reward.reward_weights == (1.0, 0.5)
    with pytest.raises(UserError) as error:
        read_config(PPOConfig, [*flags, "1"])
    assert str(error.value) == (
        "--reward_weights has 1 number for the 2 functions of --reward_func; give one for each"
    )
