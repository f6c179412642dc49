"""What samples responses: one protocol, two implementations (vllm_engine, hf_engine)."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from spmdrl.config import RolloutConfig


@dataclass(frozen=True)
class SamplingOptions:
    """How every request of a run is sampled."""

    temperature: float
    top_p: float
    top_k: int
    min_new_tokens: int
    max_new_tokens: int
    stop: tuple[str, ...]
    max_len: int | None = None  # most tokens of prompt and response together

    @classmethod
    def from_config(cls, config: RolloutConfig) -> "SamplingOptions":
        return cls(
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            min_new_tokens=config.generate_min_len,
            max_new_tokens=config.generate_max_len,
            stop=tuple(config.stop),
            max_len=config.max_len,
        )

    def room_after(self, prompt_len: int) -> int:
        """Most tokens of a response to a prompt of that many."""
        return min(self.max_new_tokens, (self.max_len or prompt_len + self.max_new_tokens) - prompt_len)


@dataclass(frozen=True)
class Request:
    """One response to sample. The seed alone decides what is drawn, whatever else is in the batch."""

    prompt_ids: Sequence[int]
    seed: int


@dataclass(frozen=True)
class Completion:
    """What was sampled: ids, their log-probs under the distribution they were drawn from, and why it ended."""

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: str  # "stop" (EOS or a stop string) or "length"


class RolloutEngine(Protocol):
    """An inference engine in this process.

    Order within a step: wake_up(["weights"]) → load_weights → reset_prefix_cache → wake_up(["kv_cache"]) →
    generate → sleep. Engines that cannot sleep do nothing there.
    """

    name: str
    own_forward: bool  # True where sampling uses the trainer's own forward, so that log-probs agree

    def generate(self, requests: Sequence[Request], options: SamplingOptions) -> list[Completion]:
        """One completion for each request, in order. Ranks may pass different numbers of requests, also none.

        Returns early, with fewer, once the run is asked to stop (preemption.requested): a safe point follows.
        """
        ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace all weights; raises RuntimeError naming weights that are missing or unknown."""
        ...

    def reset_prefix_cache(self) -> bool:
        """Forget KV computed with older weights; False when that was not possible."""
        ...

    def sleep(self) -> None: ...

    def wake_up(self, tags: Sequence[str]) -> None: ...


def sampling_seed(run_seed: int, step: int, group_id: int, index: int, stream: str = "rollout") -> int:
    """A 63-bit seed that depends on what is sampled and not on which rank samples it; another one in each stream."""
    digest = hashlib.blake2b(f"{stream}/{run_seed}/{step}/{group_id}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
