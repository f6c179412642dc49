"""Samples and their padding: masks come from lengths, never from comparing ids."""

import pytest
import torch

from spmdrl.experience import Sample, collate, make_sample, scatter

EOS = PAD = 2


def sample(prompt, response, reason="stop", **rest):
    log_probs = [-0.5 * (i + 1) for i in range(len(response))]
    return make_sample(prompt, response, log_probs, finish_reason=reason, group_id=0, index=0, row=0, **rest)


def rows(tensor):
    return tensor.int().tolist()


def test_the_mask_marks_the_steps_whose_next_token_was_sampled():
    """3 prompt tokens and 2 response tokens: of the 4 steps the last two predict sampled tokens."""
    one = sample([5, 6, 7], [8, 9])
    assert one.sequence.tolist() == [5, 6, 7, 8, 9]
    assert rows(one.action_mask) == [0, 0, 1, 1]
    assert one.rollout_log_probs.tolist() == [0, 0, -0.5, -1.0]
    assert one.response_length == one.num_sampled == 2
    assert not one.truncated


def test_an_eos_that_is_also_the_pad_is_trained_exactly_once():
    """Response [7, 8, eos] padded to 6 steps with the same id: 1, 1, 1, 0, 0, 0."""
    exp = collate([sample([4], [7, 8, EOS]), sample([4], [5] * 6, "length")])
    assert rows(exp.action_mask) == [[1, 1, 1, 0, 0, 0], [1] * 6]
    assert exp.sequences.shape == (2, 7)


def test_an_eos_inside_the_prompt_is_not_an_action():
    exp = collate([sample([4, EOS, 6, EOS], [7, EOS])])
    assert rows(exp.action_mask) == [[0, 0, 0, 1, 1]]


def test_a_truncated_response_keeps_its_tokens_and_its_padding_stays_out():
    """Without an EOS: 3 tokens and 6 in one batch, lengths as they were sampled."""
    short, long = sample([4], [7, 8, 9], "length"), sample([4], [7, 8, 9, 10, 11, EOS])
    exp = collate([short, long])
    assert rows(exp.action_mask) == [[1, 1, 1, 0, 0, 0], [1] * 6]
    assert exp.sequences[0, :4].tolist() == [4, 7, 8, 9]
    assert short.truncated
    assert not long.truncated


@pytest.mark.parametrize(
    ("prompt", "response", "mask"),
    [([5, 6], [], [0]), ([5, 6], [EOS], [1]), ([5, 6], [EOS, EOS], [1, 1]), ([5], [], [])],
    ids=str,
)
def test_empty_responses_and_lone_eos_are_samples_like_others(prompt, response, mask):
    one = sample(prompt, response)
    padding = len(prompt) - 1 + len(response) - len(mask)
    assert rows(one.action_mask) == [0] * padding + mask
    assert one.action_mask.dtype == torch.bool
    exp = collate([one])
    assert exp.action_mask.shape[1] >= 1  # so that maxima over steps exist
    assert exp.action_mask.sum() == len(response)


def test_an_empty_prompt_and_a_missing_log_prob_are_refused():
    with pytest.raises(AssertionError, match="empty prompt"):
        sample([], [5])
    with pytest.raises(AssertionError, match="2 ids and 1 log-probs"):
        make_sample([5], [6, 7], [-1.0], finish_reason="stop", group_id=0, index=0, row=0)


def test_scatter_gives_each_sample_its_own_values_without_padding():
    samples = [sample([4], [7]), sample([4, 5], [7, 8])]
    scatter(samples, "advantages", torch.tensor([[1.0, 9.0, 9.0], [2.0, 3.0, 4.0]]))
    assert [s.advantages.tolist() for s in samples] == [[1.0], [2.0, 3.0, 4.0]]
    exp = collate(samples)
    assert exp.advantages is not None
    assert exp.advantages.tolist() == [[1.0, 0.0, 0.0], [2.0, 3.0, 4.0]]
    assert exp.values is None


def test_a_field_that_only_some_samples_have_is_refused():
    samples = [sample([4], [7]), sample([4], [7])]
    samples[0].values = torch.zeros(1)
    with pytest.raises(AssertionError, match="values is set on 1 of 2 samples"):
        collate(samples)


def test_a_batch_of_no_samples_has_no_actions_and_the_fields_of_the_others():
    """Else a rank without samples would log other metrics than its peers and the reduction of them would not match."""
    exp = collate([], like=sample([4], [7]))
    assert not exp.action_mask.any()
    assert exp.sequences.shape == (1, 2)
    assert exp.rollout_log_probs is not None
    assert exp.ref_log_probs is None
    assert collate([]).ref_log_probs is not None  # where nobody has samples to go by


def test_masking_truncated_responses_keeps_their_sampled_length():
    cut, ended = sample([4], [7, 8], "length"), sample([4], [7, EOS])
    for one in (cut, ended):
        one.mask_if_truncated()
    assert (cut.response_length, cut.num_sampled) == (0, 2)
    assert (ended.response_length, ended.num_sampled) == (2, 2)


def test_samples_survive_pickling():
    """As they do on their way to the other ranks."""
    import pickle

    one = sample([4], [7, 8], "length")
    one.mask_if_truncated()
    copy: Sample = pickle.loads(pickle.dumps(one))
    assert copy.sequence.tolist() == one.sequence.tolist()
    assert copy.num_sampled == 2
