"""What every source of rewards takes and gives: a Python function, a server and a model are called alike."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from spmdrl.errors import UserError


class RewardError(UserError):
    """A reward source that failed or gave something else than rewards. Its own traceback is worth showing."""

    show_cause = True


@dataclass(frozen=True)
class RewardBatch:
    """B responses to be rewarded, as text and as ids."""

    queries: Sequence[str]  # prompt + response, without the EOS that ended it
    prompts: Sequence[str]  # as they went to the policy, template applied
    labels: Sequence[Any]  # of --label_key, unchanged
    columns: Mapping[str, Sequence[Any]]  # every other column of the data
    sample_ids: Sequence[str]  # what errors call the samples
    endings: Sequence[str] = ()  # text of the EOS that ended each response, "" where none did
    cells: Sequence[Any] = ()  # of --input_key, unchanged: what the prompts were rendered from
    sequences: Sequence[Tensor] = ()  # (S,) int64 each: prompt + response, EOS included, as sampled

    def __post_init__(self) -> None:
        lists = (self.prompts, self.labels, self.sample_ids, *self.columns.values())
        optional = [x for x in (self.endings, self.cells, self.sequences) if x]
        lengths = {len(x) for x in (*lists, *optional)}
        assert lengths == {len(self.queries)}, f"{len(self.queries)} queries, but lists of {sorted(lengths)}"

    def __len__(self) -> int:
        return len(self.queries)


@dataclass
class RewardOutput:
    """What one call returned. B samples."""

    rewards: Tensor  # (B,) fp32
    scores: Tensor | None = None  # (B,) fp32
    extra_logs: dict[str, Tensor] = field(default_factory=dict)  # each (B,) fp32


NOTHING = RewardOutput(torch.zeros(0))


class RewardSource(Protocol):
    """Every rank calls it with its own samples, none included: a model under ZeRO-3 computes on all ranks at once."""

    normalizes: bool  # whether --normalize_reward is done already, by statistics of its own

    def check_columns(self, available: Sequence[str]) -> None:
        """Raise UserError when the source needs a column that the data does not have."""
        ...

    def __call__(self, batch: RewardBatch) -> RewardOutput: ...
