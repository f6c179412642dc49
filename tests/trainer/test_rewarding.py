"""Rewards of a step, normalised, penalised and compared with their groups."""

import pytest
import torch

from spmdrl.algos.advantages import ESTIMATORS
from spmdrl.config import PPOConfig
from spmdrl.config.parse import read_config
from spmdrl.data.prompts import Prompt
from spmdrl.experience import make_sample
from spmdrl.rewards.source import RewardError, RewardOutput
from spmdrl.trainer.rewarding import Rewarder, reward_samples, split_ending


def sample(reward, *, group=0, index=0, truncated=False, greedy=None):
    response = make_sample(
        [5], [6, 7], [0.0, 0.0], finish_reason="length" if truncated else "stop", group_id=group, index=index, row=0
    )
    response.rewards, response.greedy_reward = reward, greedy
    return response


class Uncalled:
    """A reward source: these samples have their rewards."""

    def __init__(self, normalizes):
        self.normalizes = normalizes

    def __call__(self, batch):
        pytest.fail("called")


def rewarder(flags, *, normalizes=False):
    config = read_config(PPOConfig, flags.split())
    estimator = ESTIMATORS[config.algo.advantage_estimator]
    return Rewarder(config, Uncalled(normalizes), [], lambda sample: ("", ""), estimator)


def shaped(rewards, samples):
    return rewards.shaped(samples).tolist()


def test_rewards_are_normalised_by_all_rewards_so_far():
    """Rewards 1, 3 have mean 2 and std sqrt(2). With 5, 7 after them the mean is 4 and the std sqrt(20 / 3)."""
    rewards = rewarder("--advantage_estimator reinforce --normalize_reward")
    assert shaped(rewards, [sample(1.0), sample(3.0, index=1)]) == pytest.approx([-(0.5**0.5), 0.5**0.5])
    second = shaped(rewards, [sample(5.0), sample(7.0, index=1)])
    assert second == pytest.approx([1 / (20 / 3) ** 0.5, 3 / (20 / 3) ** 0.5])


def test_the_rewards_that_are_logged_stay_as_they_were():
    samples = [sample(1.0), sample(3.0, index=1)]
    shaped(rewarder("--advantage_estimator reinforce --normalize_reward"), samples)
    assert [s.rewards for s in samples] == [1.0, 3.0]


def test_a_first_step_of_equal_rewards_gives_zeros():
    rewards = rewarder("--advantage_estimator reinforce --normalize_reward")
    assert shaped(rewards, [sample(0.1), sample(0.1, index=1)]) == [0, 0]


def test_rewards_that_their_source_has_normalised_are_not_normalised_again():
    rewards = rewarder("--advantage_estimator reinforce --normalize_reward", normalizes=True)
    assert shaped(rewards, [sample(1.0), sample(3.0, index=1)]) == [1.0, 3.0]
    assert rewards.moments.count == 0


def test_statistics_are_those_of_the_rewards_of_every_rank(monkeypatch):
    """This rank has 1, another one 3: the mean is 2, the std sqrt(2)."""
    from spmdrl.distributed import comm

    other = [(1, 0, 3.0, 2, False, None)]
    monkeypatch.setattr(comm, "all_gather_object", lambda rows: [rows, other])
    assert shaped(rewarder("--advantage_estimator reinforce --normalize_reward"), [sample(1.0)]) == pytest.approx(
        [-(0.5**0.5)]
    )


def test_saved_statistics_go_on():
    first = rewarder("--advantage_estimator reinforce --normalize_reward")
    shaped(first, [sample(1.0), sample(3.0, index=1)])
    second = rewarder("--advantage_estimator reinforce --normalize_reward")
    second.load_state_dict(first.state_dict())
    batch = [sample(5.0), sample(7.0, index=1)]
    assert shaped(second, batch) == shaped(first, batch)


def test_greedy_rewards_are_normalised_like_the_others_and_enter_no_statistic():
    """remax: (r - greedy) / std, with std sqrt(2) of 1 and 3."""
    samples = [sample(1.0, greedy=2.0), sample(3.0, index=1, greedy=2.0)]
    result = shaped(rewarder("--advantage_estimator remax --normalize_reward"), samples)
    assert result == pytest.approx([-(0.5**0.5), 0.5**0.5])


def test_penalties_come_after_the_normalisation():
    """-1 / sqrt(2) and 1 / sqrt(2); the truncated second one is then multiplied by 0.5."""
    flags = "--advantage_estimator reinforce --normalize_reward --stop_properly_penalty_coef 0.5"
    result = shaped(rewarder(flags), [sample(1.0), sample(3.0, index=1, truncated=True)])
    assert result == pytest.approx([-(0.5**0.5), 0.5 * 0.5**0.5])


def test_without_the_flag_rewards_are_taken_as_they_are():
    assert shaped(rewarder("--advantage_estimator reinforce"), [sample(1.0), sample(3.0, index=1)]) == [1.0, 3.0]


def test_a_rank_without_samples_takes_part(monkeypatch):
    from spmdrl.distributed import comm

    monkeypatch.setattr(comm, "all_gather_object", lambda rows: [rows, [(1, 0, 3.0, 2, False, None)]])
    rewards = rewarder("--advantage_estimator reinforce --normalize_reward")
    assert torch.equal(rewards.shaped([]), torch.zeros(0))
    assert rewards.moments.count == 1


@pytest.mark.parametrize("name", ["reward", "num_tokens", "response", "step"])
def test_an_extra_number_does_not_take_the_place_of_the_runs_own(one_rank, name):
    """ "reward" would be logged as rollout/reward, and as eval/reward decide which model is the best."""

    def source(batch):
        return RewardOutput(torch.tensor([1.0]), extra_logs={name: torch.tensor([5.0]), "fine": torch.tensor([2.0])})

    prompt = Prompt(row=0, prompt="the", prompt_ids=[5], label=None, columns={})
    with pytest.raises(RewardError, match=f"'{name}'.: the run logs a number of its own by that name"):
        reward_samples([sample(0.0)], [prompt], source, lambda sample: ("x", ""))


# ---- the text of a response -----------------------------------------------------------------------------------------
WORDS = ["<unk>", "<s>", "</s>", "▁the", "▁answer", ":", "▁is", "▁4", "4", "▁", "!", "▁!"]


@pytest.fixture(scope="module")
def sentencepiece():
    """A tokenizer as Llama 2 has it: its decoder takes a space off the beginning of what it decodes."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(WORDS)}, merges=[], unk_token="<unk>"))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", clean_up_tokenization_spaces=True)
    tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = True
    assert tokenizer.decode([WORDS.index("▁4")]) == "4"
    assert tokenizer.decode([WORDS.index(word) for word in ("▁4", "▁!")]) == "4!"
    return tokenizer


@pytest.mark.parametrize(
    ("prompt", "response", "text"),
    [
        ("▁the ▁answer :", "▁4", " 4"),
        ("▁the ▁answer :", "4", "4"),
        ("▁the ▁answer", "▁is ▁4 ▁!", " is 4 !"),
        ("▁the ▁answer ▁", "▁4", " 4"),
        ("▁", "4", "4"),
        ("</s>", "▁4", " 4"),
        ("▁the", "", ""),
    ],
)
@pytest.mark.parametrize("is_ended", [True, False])
def test_the_text_of_a_response_is_what_stands_behind_the_prompt(sentencepiece, prompt, response, text, is_ended):
    """Every space of it counts, also the first one and one before punctuation."""
    prompt_ids, ids = ([WORDS.index(word) for word in words.split()] for words in (prompt, response))
    ids += [2] * is_ended
    reason = "stop" if is_ended else "length"
    one = make_sample(prompt_ids, ids, [0.0] * len(ids), finish_reason=reason, group_id=0, index=0, row=0)
    assert split_ending(one, sentencepiece, {2}) == (text, "</s>" if is_ended else "")
