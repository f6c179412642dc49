"""Forward passes over samples that store what a model says about each step."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from spmdrl.data.batching import in_groups
from spmdrl.distributed import comm, preemption
from spmdrl.experience import Sample, collate, scatter
from spmdrl.trainer.update import plan_groups


def log_probs_of(actor: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """(sequences, action mask) -> log-probs (B, A)."""
    return lambda sequences, action_mask: actor(sequences, action_mask)[0]


@torch.no_grad()
def score_samples(
    model: Callable[[Tensor, Tensor], Tensor],
    samples: Sequence[Sample],
    name: str,
    *,
    micro_batch_size: int,
    group_size: int = 1,
    by_prompt: bool = False,
    progress: Any = None,
) -> None:
    """Store what `model` says of (sequences, action mask) as field `name` of this rank's samples.

    Each `group_size` consecutive ones share a micro-batch, of at most `micro_batch_size` such groups. by_prompt:
    responses to one prompt stay together.

    A collective under ZeRO-3: all ranks make as many forwards as the one with most micro-batches.
    """
    groups = in_groups(samples, group_size)
    batches = plan_groups(groups, num_ranks=1, size=micro_batch_size, by_prompt=by_prompt)[0]
    missing = int(comm.all_reduce_max(len(batches))) - len(batches)
    for batch in batches + [[] for _ in range(missing)]:
        preemption.safe_point()
        part = [sample for i in batch for sample in groups[i]]
        exp = collate(part).to(comm.device())
        result = model(exp.sequences, exp.action_mask)
        if part:
            scatter(part, name, result)
        if progress is not None:
            progress.update(len(part))
