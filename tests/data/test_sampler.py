import pytest

from spmdrl.data.sampler import PromptSampler
from spmdrl.errors import UserError


def sampler(num_prompts=10, batch_size=4, *, seed=7, num_episodes=2):
    return PromptSampler(num_prompts, batch_size, seed=seed, num_episodes=num_episodes)


def take(s, count):
    iterator = iter(s)
    return [next(iterator) for _ in range(count)]


def test_each_episode_is_a_fresh_permutation_cut_into_whole_batches():
    """10 prompts in batches of 4: 2 steps an episode, 2 prompts left out of each."""
    s = sampler()
    batches = list(s)
    assert len(s) == len(batches) == 4 and s.num_dropped == 2
    first, second = batches[0] + batches[1], batches[2] + batches[3]
    for episode in (first, second):
        assert len(set(episode)) == 8 and set(episode) <= set(range(10))
    assert first != second


def test_order_is_a_function_of_the_seed_alone():
    assert list(sampler()) == list(sampler())
    assert list(sampler()) != list(sampler(seed=8))
    assert list(sampler(num_episodes=5))[:4] == list(sampler())


def test_ranks_of_any_world_size_cut_the_same_batches():
    """The batches are global: what two ranks take together is what one takes."""
    whole = list(sampler())
    shares = [[batch[rank::2] for batch in sampler()] for rank in range(2)]
    assert [sorted(a + b) for a, b in zip(*shares, strict=True)] == [sorted(batch) for batch in whole]


@pytest.mark.parametrize("stop", range(7))
def test_three_and_three_are_six(stop):
    """U66: stop after any step, mid-episode or between episodes, and the rest follows without repeat or gap."""
    straight = list(sampler(num_episodes=3))
    before = sampler(num_episodes=3)
    head = take(before, stop)
    after = sampler(num_episodes=3)
    after.load_state_dict(before.state_dict())
    assert head + list(after) == straight


def test_iterating_again_goes_on():
    s = sampler()
    head = take(s, 3)
    assert head + list(s) == list(sampler()) and list(s) == []


@pytest.mark.parametrize(
    "other, message",
    [
        ({"seed": 8}, "the checkpoint's --seed is 7, this run's is 8"),
        ({"batch_size": 5}, "--rollout_batch_size is 4, this run's is 5"),
        ({"num_prompts": 11}, "number of prompts is 10, this run's is 11"),
    ],
)
def test_state_of_another_order_is_refused_by_name(other, message):
    with pytest.raises(UserError, match=message):
        sampler(**other).load_state_dict(sampler().state_dict())


def test_resuming_with_more_episodes_is_allowed_and_with_too_few_is_not():
    s = sampler(num_episodes=3)
    straight = list(sampler(num_episodes=3))
    head = take(s, 4)
    longer = sampler(num_episodes=4)
    longer.load_state_dict(s.state_dict())
    assert (head + list(longer))[:6] == straight
    with pytest.raises(UserError, match="at step 4, this run ends at 2; raise --num_episodes above 1"):
        sampler(num_episodes=1).load_state_dict(s.state_dict())


def test_fewer_prompts_than_a_batch_is_refused_with_numbers():
    with pytest.raises(
        UserError, match="5 prompts do not fill one step of --rollout_batch_size 8: add prompts, or set"
    ):
        sampler(5, 8)
    assert list(sampler(4, 4, num_episodes=1)) and sampler(4, 4).num_dropped == 0
