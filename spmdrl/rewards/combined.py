"""Several reward functions as one, and the reward that the flags ask for."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from spmdrl.algos.shaping import weighted_sum
from spmdrl.config import RewardConfig
from spmdrl.rewards.function import RewardFunction, RewardOutput, parse_spec


class CombinedReward:
    """The weighted sum of what several functions return, each of them logged as reward_<name>.

    What dynamic filtering goes by is the weighted sum too, of each function's scores or, without any, its rewards.
    """

    def __init__(self, functions: dict[str, RewardFunction], weights: Sequence[float]):
        assert len(functions) == len(weights), f"{len(functions)} functions, {len(weights)} weights"
        self.functions, self.weights = functions, list(weights)

    def check_columns(self, available: Sequence[str]) -> None:
        """Raise UserError when a function needs a column that the data does not have."""
        for function in self.functions.values():
            function.check_columns(available)

    def __call__(
        self,
        queries: Sequence[str],
        prompts: Sequence[str],
        labels: Sequence[Any],
        columns: dict[str, list[Any]],
        sample_ids: Sequence[str],
    ) -> RewardOutput:
        """Rewards of B samples, as RewardFunction gives them."""
        outputs = {
            name: function(queries, prompts, labels, columns, sample_ids) for name, function in self.functions.items()
        }
        parts = list(outputs.values())
        logs = {f"reward_{name}": output.rewards for name, output in outputs.items()}
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


def load_reward(config: RewardConfig) -> RewardFunction | CombinedReward:
    """The function of --reward_func or --remote_rm_url; several, or one with a weight, as a CombinedReward."""
    specs = config.reward_func or (config.remote_rm_url or "",)
    if len(specs) == 1 and not config.reward_weights:
        return RewardFunction(specs[0])
    names = function_names(specs)
    functions = {name: RewardFunction(spec) for name, spec in zip(names, specs, strict=True)}
    return CombinedReward(functions, config.reward_weights or [1.0] * len(specs))


def function_names(specs: Sequence[str]) -> list[str]:
    """What the logs call each function: its name, with its file's where names repeat, else with a number too."""
    parsed = [parse_spec(spec) for spec in specs]
    names = [name for _, name in parsed]
    with_file = [f"{Path(path).stem}_{name}" for path, name in parsed]
    numbered = [f"{name}_{number}" for number, name in enumerate(with_file, 1)]
    return next(choice for choice in (names, with_file, numbered) if len(set(choice)) == len(choice))
