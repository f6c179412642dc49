"""Guardrails: what is wrong with a rollout or an optimizer step, and what is done about it.

Whatever is judged here is the same on every rank: losses and gradient norms are those of all ranks, and samples have
been gathered from all of them. So every rank comes to the same judgement without asking.
"""

import math
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, get_args

import torch
from torch import Tensor

from spmdrl.config import AnomalyConfig
from spmdrl.config.sections import AnomalyKind
from spmdrl.distributed import comm
from spmdrl.errors import UserError
from spmdrl.experience import Sample

KINDS: tuple[str, ...] = get_args(AnomalyKind)
NUM_REMEMBERED = 50  # values of the past that a spike is compared with
MIN_REMEMBERED = 10
LEAST_KL_SPIKE = 0.1  # nats a token: a policy that has hardly moved has no KL to speak of
MAX_ROLLBACKS = 3  # without a step beyond the one that went wrong


@dataclass(frozen=True)
class Anomaly:
    kind: str
    what: str  # with its value and its threshold


class AnomalyStop(UserError):
    """--on_anomaly ends the run: one line with the anomaly, its value, its threshold and the step."""


class RollbackError(Exception):
    """Raised on every rank at the same place: the run is to go on from its newest checkpoint."""


class Guardrails:
    """Judges rollouts and optimizer steps, counts what it finds and acts as --on_anomaly says."""

    def __init__(self, config: AnomalyConfig, *, max_norm: float = 0.0):
        """max_norm: gradients up to this norm are not clipped and never a spike."""
        self.config, self.max_norm = config, max_norm
        self.step = 0
        self.counts: Counter[str] = Counter()  # of this step
        self.before: list[str] = []  # what the last step had, which is not said again
        self.history: dict[str, deque[float]] = {}
        self.redraws = 0  # rollbacks of the run: each samples other responses
        self.attempts = 0  # rollbacks since a step beyond `failed_step`
        self.failed_step = 0

    @property
    def stream(self) -> str:
        """What seeds are drawn for: after a rollback others than before."""
        return f"rollout{self.redraws}" if self.redraws else "rollout"

    def begin(self, step: int) -> None:
        """Whatever is found from now on is of this step."""
        if step != self.step:
            self.before = sorted(self.counts)
            self.counts.clear()
        self.step = step

    # ---- optimizer steps ------------------------------------------------------------------------------------------
    def takes_step(self, role: str, loss: float, norm: float) -> bool:
        """Whether an optimizer step with this loss and gradient norm of all ranks may change the weights."""
        anomaly = self._in_update(role, loss, norm)
        return anomaly is None or (anomaly.kind != "nonfinite" and self._reaction(anomaly.kind) == "warn")

    def after_step(self, role: str, loss: float, norm: float) -> bool:
        """Remember, count and act on an optimizer step that was taken or left out; whether it was taken.

        Raises AnomalyStop or RollbackError where that is what the case asks for.
        """
        anomaly = self._in_update(role, loss, norm)
        taken = self.takes_step(role, loss, norm)
        if taken:
            self._remember(f"{role}/grad_norm", norm)
        if anomaly is not None:
            self._act(anomaly, "" if taken else "this optimizer step is left out")
        return taken

    def _in_update(self, role: str, loss: float, norm: float) -> Anomaly | None:
        for value, what in ((loss, "loss"), (norm, "gradient norm")):
            if not math.isfinite(value):
                return Anomaly("nonfinite", f"{what} of the {role} is {value}")
        limit = max(self._spike_above(f"{role}/grad_norm"), self.max_norm)
        return Anomaly("grad_spike", f"gradient norm of the {role} {norm:.4g} > {limit:.4g}") if norm > limit else None

    # ---- rollouts -------------------------------------------------------------------------------------------------
    def takes_rollout(self, samples: Sequence[Sample]) -> bool:
        """Whether to train on the samples of all ranks; acts on what is wrong with them.

        Raises AnomalyStop or RollbackError where that is what a case asks for.
        """
        taken = True
        for anomaly in self._in_rollout(samples):
            left_out = anomaly.kind == "nonfinite" or self._reaction(anomaly.kind) == "skip"
            taken = taken and not left_out
            self._act(anomaly, "nothing is trained on this rollout" if left_out else "")
        return taken

    def _in_rollout(self, samples: Sequence[Sample]) -> Iterator[Anomaly]:
        yield from _nonfinite(samples)
        kl, limit = kl_to_reference(samples), max(self._spike_above("kl"), LEAST_KL_SPIKE)
        if kl is not None and kl > limit:
            yield Anomaly("kl_spike", f"KL to the reference {kl:.4g} > {limit:.4g} a token")
        elif kl is not None:
            self._remember("kl", kl)
        entropy, least = entropy_of(samples), self.config.anomaly_min_entropy
        if entropy is not None and entropy < least:
            yield Anomaly("entropy_collapse", f"entropy {entropy:.4g} < {least:.4g} (--anomaly_min_entropy) a token")
        if all(s.truncated for s in samples):
            yield Anomaly("all_truncated", f"truncated samples: {len(samples)} of {len(samples)}")
        groups: dict[int, list[float]] = {}
        for sample in samples:
            groups.setdefault(sample.group_id, []).append(sample.rewards)
        if all(len(rewards) > 1 and len(set(rewards)) == 1 for rewards in groups.values()):
            yield Anomaly("all_flat", f"groups whose rewards are all the same: {len(groups)} of {len(groups)}")

    # ---- what is done ---------------------------------------------------------------------------------------------
    def _reaction(self, kind: str) -> str:
        """warn, skip, stop or rollback."""
        if kind in self.config.anomaly_ignore:
            return "warn"
        policy = self.config.on_anomaly
        return ("stop" if kind == "nonfinite" else "warn") if policy == "auto" else policy

    def _act(self, anomaly: Anomaly, done: str) -> None:
        is_new = anomaly.kind not in (*self.before, *self.counts)
        self.counts[anomaly.kind] += 1
        reaction = self._reaction(anomaly.kind)
        if reaction == "stop":
            raise AnomalyStop(f"{self._line(anomaly)} (--on_anomaly); the weights are those before it")
        if reaction == "rollback":
            self._count_rollback(anomaly)
            raise RollbackError(self._line(anomaly))
        if is_new and anomaly.kind not in self.config.anomaly_ignore:
            comm.say(f"anomaly: {self._line(anomaly)}{done and '; '}{done}")

    def _line(self, anomaly: Anomaly) -> str:
        return f"{anomaly.kind} in step {self.step}: {anomaly.what}"

    def _count_rollback(self, anomaly: Anomaly) -> None:
        self.attempts = self.attempts + 1 if self.step <= self.failed_step else 1
        self.failed_step = max(self.step, self.failed_step)
        if self.attempts > MAX_ROLLBACKS:
            raise AnomalyStop(f"{self._line(anomaly)}, also after {MAX_ROLLBACKS} rollbacks (--on_anomaly rollback)")
        self.redraws += 1

    # ---- past values ----------------------------------------------------------------------------------------------
    def _remember(self, name: str, value: float) -> None:
        self.history.setdefault(name, deque(maxlen=NUM_REMEMBERED)).append(value)

    def _spike_above(self, name: str) -> float:
        past = self.history.get(name, ())
        return self.config.anomaly_spike_factor * median(past) if len(past) >= MIN_REMEMBERED else math.inf

    def metrics(self) -> dict[str, float]:
        """How often each case was found in this step."""
        return {f"anomaly/{kind}": float(self.counts[kind]) for kind in KINDS}

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "counts": dict(self.counts),
            "before": self.before,
            "history": {name: list(values) for name, values in self.history.items()},
            "redraws": self.redraws,
            "attempts": self.attempts,
            "failed_step": self.failed_step,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a saved state, without forgetting the rollbacks of this process that led back to it."""
        self.step, self.before = state["step"], list(state["before"])
        self.counts = Counter(state["counts"])
        self.history = {name: deque(values, maxlen=NUM_REMEMBERED) for name, values in state["history"].items()}
        if state["redraws"] >= self.redraws:
            self.redraws, self.attempts = state["redraws"], state["attempts"]
            self.failed_step = state["failed_step"]


def _nonfinite(samples: Sequence[Sample]) -> Iterator[Anomaly]:
    for name in ("rewards", "log_probs", "ref_log_probs", "values", "advantages", "returns"):
        for sample in samples:
            value = getattr(sample, name)
            if value is not None and not torch.isfinite(torch.as_tensor(value)).all():
                where = f"data row {sample.row + 1}, sample {sample.index}"
                yield Anomaly("nonfinite", f"{name.replace('_', ' ')} of {where} are not finite")
                return


def kl_to_reference(samples: Sequence[Sample]) -> float | None:
    """Mean over sampled tokens of log p/p_ref, of the trainer's log-probs or where it has none, the engine's; k1 of
    algos/kl.py. None without a reference model or without a token."""
    pairs = [(s.rollout_log_probs if s.log_probs is None else s.log_probs, s.ref_log_probs, s) for s in samples]
    return _mean_over_tokens([(own - ref)[s.action_mask] for own, ref, s in pairs if ref is not None])


def entropy_of(samples: Sequence[Sample]) -> float | None:
    """Mean over sampled tokens of -log p: an estimate of the entropy of what was sampled from."""
    return _mean_over_tokens([-s.rollout_log_probs[s.action_mask] for s in samples])


def _mean_over_tokens(parts: Sequence[Tensor]) -> float | None:
    tokens = torch.cat(list(parts)) if parts else torch.empty(0)
    return float(tokens.double().mean()) if len(tokens) else None
