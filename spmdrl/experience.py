"""The data that flows: samples, ragged at rest, and experiences, padded for one forward."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

# Per-token fields of a Sample and an Experience, aligned to next-token steps.
TOKEN_FIELDS = ("rollout_log_probs", "log_probs", "ref_log_probs", "values", "advantages", "returns")


@dataclass
class Sample:
    """One response to a prompt. S tokens, prompt + response as sampled; A = S - 1 next-token steps."""

    sequence: Tensor  # (S,) int64: ids as they went into and came out of the engine, never re-encoded
    action_mask: Tensor  # (A,) bool: True where sequence[1:] was sampled
    rollout_log_probs: Tensor  # (A,) fp32: the engine's log-probs, 0 off the mask
    finish_reason: str  # "stop" (EOS or a stop string) or "length"
    group_id: int  # shared by the samples of one prompt; unique within a step
    index: int  # which of the group's samples
    row: int  # of the data set
    rewards: float = float("nan")  # set when the response is rewarded
    score: float = float("nan")  # what dynamic filtering looks at; the reward where the function gives no score
    greedy_reward: float | None = None  # of the greedy response to the same prompt, for remax
    log_probs: Tensor | None = None  # (A,) fp32: the trainer's, at collection
    ref_log_probs: Tensor | None = None  # (A,) fp32
    values: Tensor | None = None  # (A,) fp32
    advantages: Tensor | None = None  # (A,) fp32
    returns: Tensor | None = None  # (A,) fp32
    info: dict[str, float] = field(default_factory=dict)  # extra numbers of the reward function, for the logs
    targets: dict[str, float] = field(default_factory=dict)  # numbers of the row that a supervised loss reads
    num_sampled: int = -1  # sampled tokens, also after action_mask lost some of them

    def __post_init__(self) -> None:
        if self.num_sampled < 0:
            self.num_sampled = self.response_length

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"

    @property
    def num_tokens(self) -> int:
        return len(self.sequence)

    @property
    def response_length(self) -> int:
        """Number of tokens that are trained on."""
        return int(self.action_mask.sum())

    def mask_if_truncated(self) -> None:
        """Take a truncated response out of the loss and of its counts."""
        if self.truncated:
            self.action_mask = torch.zeros_like(self.action_mask)


def make_sample(
    prompt_ids: Sequence[int], response_ids: Sequence[int], log_probs: Sequence[float], **rest: Any
) -> Sample:
    """A Sample of one response: every response token is an action, no prompt token is."""
    assert len(response_ids) == len(log_probs), f"{len(response_ids)} ids and {len(log_probs)} log-probs"
    assert prompt_ids, "an empty prompt"
    before = len(prompt_ids) - 1
    return Sample(
        sequence=torch.tensor([*prompt_ids, *response_ids], dtype=torch.int64),
        action_mask=torch.tensor([False] * before + [True] * len(response_ids), dtype=torch.bool),
        rollout_log_probs=torch.tensor([0.0] * before + list(log_probs), dtype=torch.float32),
        **rest,
    )


@dataclass
class Experience:
    """One micro-batch. B samples, S padded prompt+response tokens, A = S - 1 next-token steps."""

    sequences: Tensor  # (B, S) int64, right-padded with 0
    action_mask: Tensor  # (B, A) bool, True where sequences[:, 1:] was sampled
    rollout_log_probs: Tensor | None = None  # (B, A) fp32
    log_probs: Tensor | None = None  # (B, A) fp32, the trainer's at collection
    ref_log_probs: Tensor | None = None  # (B, A) fp32
    values: Tensor | None = None  # (B, A) fp32
    advantages: Tensor | None = None  # (B, A) fp32
    returns: Tensor | None = None  # (B, A) fp32
    lengths: Tensor | None = None  # (B,) int64, tokens without padding; (0,) without samples
    targets: dict[str, Tensor] = field(default_factory=dict)  # (B,) fp32; (0,) without samples

    def to(self, device: torch.device) -> "Experience":
        return Experience(**{f.name: _to(getattr(self, f.name), device) for f in fields(self)})


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, dict):
        return {name: _to(item, device) for name, item in value.items()}
    return None if value is None else value.to(device)


def pad(rows: Iterable[Tensor], length: int) -> Tensor:
    """1-D tensors -> (B, length), right-padded with 0 (False)."""
    rows = list(rows)
    out = torch.zeros(len(rows), length, dtype=rows[0].dtype)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out


def collate(samples: Sequence[Sample], like: Sample | None = None) -> Experience:
    """Pad samples to the longest of them, at least 2 tokens, so that there is a next-token step.

    No samples give an experience without actions, which trains nothing but takes part in every collective of a
    forward and backward; it has every field, or those that `like` has.
    """
    if not samples:
        names = [name for name in TOKEN_FIELDS if like is None or getattr(like, name) is not None]
        tokens = {name: torch.zeros(1, 1) for name in names}
        targets = {name: torch.zeros(0) for name in (like.targets if like is not None else ())}
        nothing = torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.bool)
        return Experience(*nothing, lengths=torch.zeros(0, dtype=torch.int64), targets=targets, **tokens)
    length = max(2, *(s.num_tokens for s in samples))
    tokens = {}
    for name in TOKEN_FIELDS:
        rows = [row for s in samples if (row := getattr(s, name)) is not None]
        assert len(rows) in (0, len(samples)), f"{name} is set on {len(rows)} of {len(samples)} samples"
        if rows:
            tokens[name] = pad(rows, length - 1)
    return Experience(
        sequences=pad((s.sequence for s in samples), length),
        action_mask=pad((s.action_mask for s in samples), length - 1),
        lengths=torch.tensor([s.num_tokens for s in samples]),
        targets={name: torch.tensor([s.targets[name] for s in samples]) for name in samples[0].targets},
        **tokens,
    )


def scatter(samples: Sequence[Sample], name: str, values: Tensor) -> None:
    """Store row i of `values` (B, A) as field `name` of sample i, without its padding."""
    for sample, row in zip(samples, values.cpu(), strict=True):
        setattr(sample, name, row[: len(sample.action_mask)].clone())
