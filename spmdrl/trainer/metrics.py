"""Numbers about a step's samples."""

from collections.abc import Sequence

import torch

from spmdrl.experience import Sample

# What metrics and the rows of logged samples have by themselves. A reward function's number of such a name would take
# its place, and with "reward" decide which model is the best.
OWN_NAMES = frozenset(
    {
        *("reward", "reward_std", "response_length", "truncated", "flat_groups", "num_tokens", "num_samples"),
        *("num_prompts", "step", "row", "index", "prompt", "response", "label", "finish_reason"),
    }
)


def rollout_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Means over the samples of all ranks."""
    rewards = torch.tensor([s.rewards for s in samples], dtype=torch.float64)
    lengths = torch.tensor([s.num_sampled for s in samples], dtype=torch.float64)
    groups: dict[int, set[float]] = {}
    for sample in samples:
        groups.setdefault(sample.group_id, set()).add(sample.rewards)
    metrics = {
        "rollout/reward": float(rewards.mean()),
        "rollout/reward_std": float(rewards.std(correction=0)),
        "rollout/response_length": float(lengths.mean()),
        "rollout/truncated": sum(s.truncated for s in samples) / len(samples),
        "rollout/flat_groups": sum(len(values) == 1 for values in groups.values()) / len(groups),
        "rollout/num_tokens": float(lengths.sum()),
        "rollout/num_samples": float(len(samples)),
    }
    for name in dict.fromkeys(name for s in samples for name in s.info):
        shown = name if name.startswith("reward/") else f"rollout/{name}"
        values = [s.info[name] for s in samples if name in s.info]  # a rank's reward function may give it, or not
        metrics[shown] = sum(values) / len(values)
    return metrics
