"""From responses to the one number per sample that advantages start from."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from spmdrl.algos.advantages import Estimator, shape_rewards
from spmdrl.algos.losses import bind
from spmdrl.algos.shaping import RunningMoments, group_is_informative, overlong_penalty, stop_properly_penalty
from spmdrl.config import PPOConfig
from spmdrl.data.prompts import Prompt
from spmdrl.distributed import comm, preemption
from spmdrl.experience import Sample
from spmdrl.rewards.source import RewardBatch, RewardError, RewardSource
from spmdrl.trainer.metrics import OWN_NAMES


class Rewarder:
    """Rewards samples, and shapes their rewards over the groups of all ranks."""

    def __init__(
        self,
        config: PPOConfig,
        reward_fn: RewardSource,
        prompts: Sequence[Prompt],
        response_parts: Callable[[Sample], tuple[str, str]],
        estimator: Estimator,
    ):
        self.config, self.estimator = config, estimator
        self.reward_fn, self.prompts, self.response_parts = reward_fn, prompts, response_parts
        self.moments = RunningMoments()  # of the rewards of all ranks so far, for --normalize_reward

    def reward(self, samples: Sequence[Sample]) -> None:
        """Ask the reward source once for this rank's samples and store what it gives. A collective."""
        prompts = [self.prompts[s.row] for s in samples]
        reward_samples(samples, prompts, self.reward_fn, self.response_parts)

    def informative(self, samples: list[Sample]) -> list[Sample]:
        """Samples of groups whose mean score is inside --dynamic_filtering_range."""
        if not samples:
            return []
        scores = torch.tensor([s.score for s in samples], dtype=torch.float64)
        ids = torch.tensor([s.group_id for s in samples])
        keep = group_is_informative(scores, ids, *self.config.algo.dynamic_filtering_range)
        return [s for s, k in zip(samples, keep.tolist(), strict=True) if k]

    def shaped(self, samples: Sequence[Sample]) -> Tensor:
        """(B,) rewards of this rank's samples after normalisation, penalties and group baseline, over all ranks."""
        rows = [(s.group_id, s.index, s.rewards, s.response_length, s.truncated, s.greedy_reward) for s in samples]
        everything = sorted(row for share in comm.all_gather_object(rows) for row in share)
        ids, indices, rewards, lengths, truncated, greedy = zip(*everything, strict=True)
        length, reward = torch.tensor(lengths), torch.tensor(rewards, dtype=torch.float32)
        greedy_reward = torch.tensor(greedy, dtype=torch.float32) if self.estimator.needs_greedy else None
        if self.config.reward.normalize_reward and not self.reward_fn.normalizes:
            self.moments.update(reward)
            reward = self.moments.normalize(reward)
            greedy_reward = None if greedy_reward is None else self.moments.normalize(greedy_reward)
        shaped = shape_rewards(
            self._penalised(reward, length, torch.tensor(truncated)),
            torch.tensor(ids),
            self.estimator,
            lengths=length,
            greedy_rewards=greedy_reward,
        )
        place = {key: i for i, key in enumerate(zip(ids, indices, strict=True))}
        return shaped[[place[s.group_id, s.index] for s in samples]]

    def state_dict(self) -> dict[str, Any]:
        return {"moments": self.moments.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.moments.load_state_dict(state["moments"])

    def _penalised(self, rewards: Tensor, lengths: Tensor, truncated: Tensor) -> Tensor:
        algo = self.config.algo
        if algo.stop_properly_penalty_coef is not None:
            coef = algo.stop_properly_penalty_coef
            rewards = stop_properly_penalty(rewards, truncated, stop_properly_penalty_coef=coef)
        if algo.overlong_buffer_len is not None:
            rewards = rewards + bind(overlong_penalty, algo, self.config.rollout)(lengths)
        return rewards


def reward_samples(
    samples: Sequence[Sample],
    prompts: Sequence[Prompt],
    reward_fn: RewardSource,
    response_parts: Callable[[Sample], tuple[str, str]],
) -> None:
    """Ask the reward source once for this rank's samples, each with its prompt, and store what it gives. A collective.

    response_parts: the text of a sample's response, and that of the EOS that ended it. Raises RewardError for an extra
    number of a name that the run's own have.
    """
    parts = [response_parts(s) for s in samples]
    output = reward_fn(
        RewardBatch(
            queries=[p.prompt + response for p, (response, _) in zip(prompts, parts, strict=True)],
            prompts=[p.prompt for p in prompts],
            labels=[p.label for p in prompts],
            columns=_columns(prompts),
            sample_ids=[f"row {s.row + 1}, sample {s.index}" for s in samples],
            endings=[ending for _, ending in parts],
            cells=[p.cell for p in prompts],
            sequences=[s.sequence for s in samples],
        )
    )
    preemption.safe_point()  # beyond it no function's helpers were ended by a signal
    if taken := sorted(OWN_NAMES & output.extra_logs.keys()):
        raise RewardError(f"extra_logs[{taken[0]!r}]: the run logs a number of its own by that name; give another")
    for i, sample in enumerate(samples):
        sample.rewards = float(output.rewards[i])
        sample.score = float(output.scores[i]) if output.scores is not None else sample.rewards
        sample.info = {name: float(values[i]) for name, values in output.extra_logs.items()}


def split_ending(sample: Sample, tokenizer: Any, eos_ids: Collection[int]) -> tuple[str, str]:
    """A response's text, special tokens included, and that of the EOS that ended it, "" where none did.

    It is decoded behind the prompt's last token: some tokenizers take a space off the beginning of what they decode.
    """
    ids = sample.sequence[-sample.num_sampled - 1 :].tolist()
    is_ended = sample.num_sampled > 0 and sample.finish_reason == "stop" and ids[-1] in eos_ids
    end = len(ids) - is_ended
    before, whole, ending = (_decoded(tokenizer, part) for part in (ids[:1], ids[:end], ids[end:]))
    return (whole[len(before) :] if whole.startswith(before) else _decoded(tokenizer, ids[1:end])), ending


def _decoded(tokenizer: Any, ids: list[int]) -> str:
    """Every token as it is, without BERT's clean-up of spaces before punctuation, for which tokenizers may ask."""
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _columns(prompts: Sequence[Prompt]) -> dict[str, list[Any]]:
    names = list(dict.fromkeys(name for p in prompts for name in p.columns))
    return {name: [p.columns.get(name) for p in prompts] for name in names}
