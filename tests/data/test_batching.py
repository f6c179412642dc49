"""Dealing samples to ranks and micro-batches."""

from hypothesis import given
from hypothesis import strategies as st

from spmdrl.data.batching import plan_micro_batches, split_evenly


def test_split_evenly_gives_the_first_parts_one_more():
    assert split_evenly(range(7), 3) == [[0, 1, 2], [3, 4], [5, 6]]
    assert split_evenly([8, 9], 4) == [[8], [9], [], []]


def test_similar_lengths_share_a_micro_batch_and_ranks_get_similar_work():
    """Sorted 9 8 7 6 | 5 4 3 1 in pairs, dealt to 2 ranks there and back: 9+7 and 3+5 would be worse."""
    plan = plan_micro_batches([3, 9, 5, 7, 1, 8, 4, 6], num_ranks=2, micro_batch_size=2)
    assert plan == [[[1, 5], [0, 4]], [[3, 7], [2, 6]]]


def test_groups_stay_together_in_the_order_of_their_longest_sample():
    lengths, groups = [3, 9, 5, 7, 1, 8], [0, 1, 0, 2, 2, 1]
    assert plan_micro_batches(lengths, num_ranks=1, micro_batch_size=2, groups=groups) == [[[1, 5], [3, 4], [2, 0]]]


def test_more_ranks_than_samples_leave_empty_micro_batches():
    assert plan_micro_batches([4], num_ranks=3, micro_batch_size=2) == [[[0]], [[]], [[]]]
    assert plan_micro_batches([], num_ranks=2, micro_batch_size=4) == [[[]], [[]]]


def test_five_and_two_samples_make_equal_numbers_of_passes():
    """7 samples one at a time on 2 ranks: 4 passes each, one of them empty."""
    plan = plan_micro_batches([5] * 7, num_ranks=2, micro_batch_size=1)
    assert [len(batches) for batches in plan] == [4, 4]
    assert sorted(len(batch) for batches in plan for batch in batches) == [0, 1, 1, 1, 1, 1, 1, 1]


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 5)), max_size=40),
    st.booleans(),
    st.integers(1, 5),
    st.integers(1, 7),
)
def test_every_sample_is_dealt_once_and_ranks_make_equal_passes(samples, in_groups, num_ranks, micro_batch_size):
    lengths = [length for length, _ in samples]
    groups = [group for _, group in samples] if in_groups else None
    plan = plan_micro_batches(lengths, num_ranks=num_ranks, micro_batch_size=micro_batch_size, groups=groups)
    assert sorted(i for batches in plan for batch in batches for i in batch) == list(range(len(lengths)))
    assert len({len(batches) for batches in plan}) == 1
    assert all(len(batch) <= micro_batch_size for batches in plan for batch in batches)
    fewest = max(1, -(-len(lengths) // (num_ranks * micro_batch_size)))
    assert len(plan[0]) == fewest
