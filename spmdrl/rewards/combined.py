"""Several reward sources as one, and the reward that the flags ask for."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from spmdrl.algos.shaping import weighted_sum
from spmdrl.config import RewardConfig
from spmdrl.distributed import comm
from spmdrl.rewards.function import RewardFunction, parse_spec
from spmdrl.rewards.remote import RemoteReward
from spmdrl.rewards.source import RewardBatch, RewardOutput, RewardSource


class CombinedReward:
    """The weighted sum of what several sources return, each of them logged as reward/<name>.

    What dynamic filtering goes by is the weighted sum too, of each source's scores or, without any, its rewards.
    """

    def __init__(self, sources: Mapping[str, RewardSource], weights: Sequence[float]):
        assert len(sources) == len(weights), f"{len(sources)} sources, {len(weights)} weights"
        self.sources, self.weights = dict(sources), list(weights)
        self.normalizes = all(source.normalizes for source in sources.values())

    def check_columns(self, available: Sequence[str]) -> None:
        """Raise UserError when a source needs a column that the data does not have."""
        for source in self.sources.values():
            source.check_columns(available)

    def __call__(self, batch: RewardBatch) -> RewardOutput:
        """Rewards of B samples."""
        outputs = {name: source(batch) for name, source in self.sources.items()}
        parts = list(outputs.values())
        logs = {f"reward/{name}": output.rewards for name, output in outputs.items()}
        for name, output in outputs.items():
            logs |= {log if log not in logs else f"{name}_{log}": x for log, x in output.extra_logs.items()}
        scores = [x.rewards if x.scores is None else x.scores for x in parts]
        return RewardOutput(
            rewards=weighted_sum(torch.stack([x.rewards for x in parts], dim=1), self.weights),
            scores=weighted_sum(torch.stack(scores, dim=1), self.weights)
            if any(x.scores is not None for x in parts)
            else None,
            extra_logs=logs,
        )


def load_rewards(config: RewardConfig, *, batch_size: int) -> dict[str, RewardSource]:
    """Servers and functions by the names that logs have for them; `batch_size` samples are sent in one request."""
    sources: list[RewardSource] = [RewardFunction(spec) for spec in config.functions]
    if config.servers:
        timeout_s, first = config.remote_rm_timeout, comm.rank()
        sources.insert(0, RemoteReward(config.servers, timeout_s=timeout_s, batch_size=batch_size, first=first))
    return dict(zip(source_names(config)[len(config.models) :], sources, strict=True))


def source_names(config: RewardConfig) -> list[str]:
    """What logs call each model, then all servers together, then each function: all different."""
    models = [(path.name, f"{path.parent.name}_{path.name}") for path in map(Path, config.models)]
    servers = [("remote", "remote_servers")] if config.servers else []
    functions = [(name, f"{path.stem}_{name}") for path, name in map(parse_spec, config.functions)]
    return told_apart([*models, *servers, *functions])


def combine(sources: Mapping[str, RewardSource], weights: Sequence[float]) -> RewardSource:
    """The one source, or the weighted sum of several and of one with a weight."""
    if len(sources) == 1 and not weights:
        return next(iter(sources.values()))
    return CombinedReward(sources, weights or [1.0] * len(sources))


def told_apart(choices: Sequence[Sequence[str]]) -> list[str]:
    """For each row of names from short to long the first that no other row has, else the longest with a number."""
    names = []
    for i, row in enumerate(choices):
        others = {name for other in (*choices[:i], *choices[i + 1 :]) for name in other}
        names.append(next((name for name in row if name not in others), f"{row[-1]}_{i + 1}"))
    return names
