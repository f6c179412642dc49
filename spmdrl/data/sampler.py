"""Which rows each step gets: a function of the seed alone, the same on every rank and for every world size."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from spmdrl.errors import UserError


@dataclass(frozen=True)
class SamplerNames:
    """What a sampler calls its numbers in messages."""

    rows: str = "prompts"
    batch: str = "--rollout_batch_size"
    episodes: str = "--num_episodes"


class PromptSampler:
    """Yields the global batch of each step; ranks cut their share from it.

    Each episode is a fresh permutation of the prompts, cut into whole batches; the `num_dropped` prompts that are
    left over differ from episode to episode, or with `keeps_rest` make a smaller last batch. Iterating again goes on
    where the last iteration stopped. A batch counts as taken once it is yielded, so a state saved at the end of a step
    resumes with the next one.
    """

    def __init__(
        self,
        num_prompts: int,
        batch_size: int,
        *,
        seed: int,
        num_episodes: int = 1,
        keeps_rest: bool = False,
        names: SamplerNames = SamplerNames(),
    ):
        self.keeps_rest, self.names = keeps_rest, names
        if batch_size < 1 or num_episodes < 1:
            raise UserError(
                f"{names.batch} and {names.episodes} must be at least 1, got {batch_size} and {num_episodes}"
            )
        if num_prompts < batch_size and not keeps_rest:
            raise UserError(
                f"{num_prompts} {names.rows} do not fill one step of {names.batch} {batch_size}: "
                f"add {names.rows}, or set {names.batch} to {num_prompts} or less"
            )
        self.num_prompts, self.batch_size = num_prompts, batch_size
        self.seed, self.num_episodes = seed, num_episodes
        self.position = 0  # batches taken

    @property
    def steps_per_episode(self) -> int:
        return -(-self.num_prompts // self.batch_size) if self.keeps_rest else self.num_prompts // self.batch_size

    @property
    def num_dropped(self) -> int:
        """Prompts that an episode leaves out because they do not fill a batch."""
        return 0 if self.keeps_rest else self.num_prompts % self.batch_size

    def __len__(self) -> int:
        return self.steps_per_episode * self.num_episodes

    def __iter__(self) -> Iterator[list[int]]:
        episode, order = -1, np.empty(0)
        while self.position < len(self):
            wanted, batch = divmod(self.position, self.steps_per_episode)
            if wanted != episode:
                episode, order = wanted, self._permutation(wanted)
            self.position += 1
            yield order[batch * self.batch_size : (batch + 1) * self.batch_size].tolist()

    def _permutation(self, episode: int) -> np.ndarray:
        return np.random.default_rng([self.seed % 2**64, episode]).permutation(self.num_prompts)

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position, **self._order_key()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes on at a saved position; refuses a state whose order of prompts was another one.

        `num_episodes` may differ: it changes how long the order goes on, not the order.
        """
        for name, now in self._order_key().items():
            if state[name] != now:
                rows = self.names.rows
                flag = {"seed": "--seed", "batch_size": self.names.batch, "num_prompts": f"number of {rows}"}[name]
                raise UserError(
                    f"cannot resume: the checkpoint's {flag} is {state[name]}, this run's is {now}, so the order of "
                    f"{rows} would change; use the checkpoint's, or start a new run"
                )
        if state["position"] > len(self):
            raise UserError(
                f"cannot resume: the checkpoint is at step {state['position']}, this run ends at {len(self)}; "
                f"raise {self.names.episodes} above {self.num_episodes}"
            )
        self.position = state["position"]

    def _order_key(self) -> dict[str, int]:
        return {"seed": self.seed, "batch_size": self.batch_size, "num_prompts": self.num_prompts}
