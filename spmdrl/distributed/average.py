"""An exponential moving average of the weights that an engine trains: a <- beta a + (1 - beta) w after each update.

Each rank averages the fragments of the master weights that it would save, in fp32 and in host memory: in bf16 the
small changes would be lost, and on the device there is better use for the room.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from spmdrl.distributed import comm
from spmdrl.distributed.engine_state import EngineState, Fragment, Read

AVERAGE = "average"


class WeightAverage:
    """Starts from the weights that `engine` has, and is saved like an engine."""

    def __init__(self, engine: Any, *, ema_beta: float):
        self.engine_state, self.ema_beta = EngineState(engine), ema_beta
        self._averages = [_copy(fragment) for fragment in self._weights()]

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights as they are now, after an optimizer step."""
        for average, weight in zip(self._averages, self._weights(), strict=True):
            average.tensor.lerp_(weight.tensor.to("cpu", torch.float32), 1 - self.ema_beta)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The engine has the averages in place of its weights for the time of the block. A collective."""
        weights = self.engine_state.weights()
        own = [weight.tensor.to("cpu", copy=True) for weight in weights]
        averages = zip(weights, self._averages, strict=True)
        self.engine_state.set_weights([_whole(average.tensor, weight) for weight, average in averages])
        try:
            yield
        finally:
            self.engine_state.set_weights(own)

    def fragments(self) -> list[Fragment]:
        return self._averages

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load(self, state: dict[str, Any], read: Read) -> None:
        for average in self._averages:
            average.tensor.copy_(read(average))

    def _weights(self) -> list[Fragment]:
        """This rank's share."""
        return [weight.to_save() for weight in self.engine_state.weights()]


def _copy(weight: Fragment) -> Fragment:
    name = f"{weight.name.rpartition('/')[0]}/{AVERAGE}"
    return replace(weight, name=name, tensor=weight.tensor.to("cpu", torch.float32, copy=True))


def _whole(average: Tensor, weight: Fragment) -> Tensor:
    """What belongs into `weight`: this rank's average, or where all ranks hold the weight, all ranks' averages."""
    return torch.cat(comm.all_gather_object(average)) if weight.is_replicated else average
