"""Held-out prompts: sampled on all ranks, rewarded as the training prompts are, and what they come to."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from spmdrl.config import PPOConfig
from spmdrl.data.batching import split_evenly
from spmdrl.data.prompts import PromptDataset
from spmdrl.distributed import comm
from spmdrl.experience import Sample
from spmdrl.rollout.collector import Collector
from spmdrl.rollout.engine import RolloutEngine, SamplingOptions


class Evaluation:
    """Responses to the prompts of --eval_dataset. Every evaluation draws with the same seeds, training with others."""

    def __init__(self, config: PPOConfig, prompts: PromptDataset, engine: RolloutEngine):
        self.config, self.prompts = config.eval, prompts
        options = SamplingOptions.from_config(config.rollout)
        self.collector = Collector(
            engine,
            replace(options, temperature=config.eval.eval_temperature),
            n_samples_per_prompt=config.eval.eval_n_samples_per_prompt,
            seed=config.seed,
            stream="eval",
        )

    def is_due(self, step: int, total_steps: int) -> bool:
        """Whether to evaluate after this step; 0 is before the first."""
        every = self.config.eval_steps
        if step == 0:
            return self.config.eval_on_start
        return every > 0 and (step % every == 0 or step == total_steps)

    def sample(self) -> list[Sample]:
        """This rank's samples, of consecutive prompts; all ranks call it together while the engine is awake."""
        mine = split_evenly(range(len(self.prompts)), comm.world_size())[comm.rank()]
        return self.collector.collect([self.prompts[i] for i in mine], mine, step=0)


def eval_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Means over all ranks' rewarded `samples`; with N samples a prompt, pass@N of the best reward. A collective.

    A prompt's samples are all on one rank.
    """
    best: dict[int, float] = {}
    for sample in samples:
        best[sample.group_id] = max(sample.rewards, best.get(sample.group_id, sample.rewards))
    sums = {
        "reward": sum(s.rewards for s in samples),
        "response_length": float(sum(s.num_sampled for s in samples)),
        "truncated": float(sum(s.truncated for s in samples)),
    }
    names = sorted({name for share in comm.all_gather_object(_info_names(samples)) for name in share})
    info = {name: [s.info[name] for s in samples if name in s.info] for name in names}
    counts = dict.fromkeys(sums, len(samples)) | {name: len(values) for name, values in info.items()}
    sums |= {name: sum(values) for name, values in info.items()}
    here = [*sums.values(), *(counts[name] for name in sums), len(samples), len(best), sum(best.values())]
    *totals, num_samples, num_prompts, best_sum = comm.all_reduce_sum(torch.tensor(here, dtype=torch.float64)).tolist()
    means = (total / count for total, count in zip(totals[: len(sums)], totals[len(sums) :], strict=True))
    metrics = {f"eval/{name}": mean for name, mean in zip(sums, means, strict=True)}
    if num_samples > num_prompts:
        metrics[f"eval/pass@{round(num_samples / num_prompts)}"] = best_sum / num_prompts
    return metrics | {"eval/num_prompts": num_prompts}


def _info_names(samples: Sequence[Sample]) -> list[str]:
    """Of the reward function's extra numbers, which it may give for some samples only."""
    return list(dict.fromkeys(name for s in samples for name in s.info))
