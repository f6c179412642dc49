"""Which samples share a forward, and on which rank."""

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def split_evenly(items: Sequence[int], parts: int) -> list[list[int]]:
    """`parts` consecutive runs of `items` whose lengths differ by at most one."""
    base, extra = divmod(len(items), parts)
    out, start = [], 0
    for i in range(parts):
        end = start + base + (i < extra)
        out.append(list(items[start:end]))
        start = end
    return out


def in_groups(items: Sequence[T], size: int) -> list[Sequence[T]]:
    """Each `size` consecutive items."""
    return [items[start : start + size] for start in range(0, len(items), size)]


def plan_micro_batches(
    lengths: Sequence[int], *, num_ranks: int, micro_batch_size: int, groups: Sequence[int] | None = None
) -> list[list[list[int]]]:
    """Deal samples of the given token counts to ranks: `plan[rank]` is that rank's list of micro-batches of indices.

    Every rank gets the same number of micro-batches, the fewest that hold at most `micro_batch_size` samples each;
    some may be one sample smaller, or empty where there are fewer samples than micro-batches. Samples of similar
    length share a micro-batch, since a micro-batch is as long as its longest, and ranks get similar work. With
    `groups`, the number of each sample's group, a group stays together in the order of its longest sample.
    """
    per_rank = max(1, -(-len(lengths) // (num_ranks * micro_batch_size)))
    groups = range(len(lengths)) if groups is None else groups
    longest: dict[int, int] = {}
    for group, length in zip(groups, lengths, strict=True):
        longest[group] = max(length, longest.get(group, 0))
    order = sorted(range(len(lengths)), key=lambda i: (-longest[groups[i]], groups[i], -lengths[i], i))
    batches = split_evenly(order, per_rank * num_ranks)
    plan: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    for i, batch in enumerate(batches):  # back and forth over the ranks, so that the longest do not meet on one
        turn, place = divmod(i, num_ranks)
        plan[place if turn % 2 == 0 else num_ranks - 1 - place].append(batch)
    return plan
