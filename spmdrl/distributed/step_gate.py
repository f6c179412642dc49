"""Seeing the gradient norm of all ranks before anything is updated, and leaving the update out where it is not wanted.

DeepSpeed skips an optimizer step whose norm is not finite: it drops the gradients and touches neither weights nor
moments nor the learning-rate schedule. An optimizer of DeepSpeed's that asks the gate for its norm therefore skips
every step that the gate refuses. Without ZeRO in fp32 there is no such optimizer, and the gate does it all.
"""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.utils import combine_grad_norm_groups, get_global_norm_of_tensors
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor


class StepGate:
    """Stands between the gradient norm of an engine and its update.

    norm: of the last step, before clipping; infinite where gradients are not finite.
    accepts: whether a step with this finite norm may be taken; asked on every rank with the same norm.
    """

    def __init__(self) -> None:
        self.norm = math.inf
        self.accepts: Callable[[float], bool] = lambda norm: True

    def open_for(self, accepts: Callable[[float], bool]) -> None:
        """Ask `accepts` from now on; until a norm comes, gradients that DeepSpeed finds not finite are assumed."""
        self.accepts, self.norm = accepts, math.inf

    def __call__(self, norm: Tensor) -> Tensor:
        """() norm, negative where DeepSpeed says so of one that is not finite -> the same, or infinity to skip."""
        value = float(norm)
        self.norm = value if math.isfinite(value) and value >= 0 else math.inf
        return norm if math.isfinite(self.norm) and self.accepts(self.norm) else torch.full_like(norm, math.inf)


def install_gate(engine: Any, max_norm: float) -> StepGate:
    """The gate of a DeepSpeed engine's optimizer, whichever that is for the ZeRO stage and dtype."""
    gate, optimizer = StepGate(), engine.optimizer
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        norm_of = optimizer.scaled_global_norm
        optimizer.scaled_global_norm = lambda norm_type=2: gate(norm_of(norm_type))
    elif isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        groups_of = optimizer._get_norm_groups
        optimizer._get_norm_groups = lambda: [gate(combine_grad_norm_groups(groups_of()))]
    elif isinstance(optimizer, BF16_Optimizer):
        optimizer.get_grads_for_norm = functools.partial(_sharded_grads, optimizer.get_grads_for_norm, gate)
    elif isinstance(optimizer, FP16_UnfusedOptimizer):
        optimizer.overflow_checker.check = lambda: not _is_finite(gate(norm_of_grads(engine.module.parameters())))
    else:
        assert isinstance(optimizer, torch.optim.Optimizer), f"no gate for {type(optimizer).__name__}"
        engine.clip_fp32_gradients = lambda: None  # the gate clips by the norm that it computes
        optimizer.step = _gated_step(engine, optimizer, gate, max_norm)
    return gate


def _sharded_grads(grads_of: Callable[..., Any], gate: StepGate, for_clipping: bool = False) -> Any:
    if for_clipping:
        return grads_of(for_clipping=True)
    grads, expert_grads = grads_of()
    norm = torch.as_tensor(get_global_norm_of_tensors(input_tensors=grads))
    return (grads if _is_finite(gate(norm)) else [torch.full((1,), math.inf)]), expert_grads


def _gated_step(engine: Any, optimizer: torch.optim.Optimizer, gate: StepGate, max_norm: float) -> Callable[[], None]:
    inner = optimizer.step

    @functools.wraps(inner)  # the schedule looks for its mark on it
    def step() -> None:
        params = list(engine.module.parameters())
        norm = gate(norm_of_grads(params))
        optimizer.overflow = not _is_finite(norm)  # pyright: ignore[reportAttributeAccessIssue]
        if not optimizer.overflow:  # pyright: ignore[reportAttributeAccessIssue]
            if max_norm > 0:
                torch.nn.utils.clip_grads_with_norm_(params, max_norm, norm)
            inner()

    return step


def norm_of_grads(params: Iterable[torch.nn.Parameter]) -> Tensor:
    """() fp32 norm of whole gradients of any dtype."""
    norms = [torch.linalg.vector_norm(p.grad, dtype=torch.float32) for p in params if p.grad is not None]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())


def _is_finite(norm: Tensor) -> bool:
    return bool(torch.isfinite(norm))
