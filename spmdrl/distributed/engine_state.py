"""The training state of a DeepSpeed engine as fragments: which ranges of which weights and moments this rank owns.

Fragments are named after parameters and not after ranks or buffers, so a state that was saved by any number of ranks
under any ZeRO stage is read by any other. Only what is trained has fragments: master weights (fp32, or the weights
themselves where there is no second copy) and the optimizer's states of the same size.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor

from spmdrl.distributed import comm

WEIGHT = "weight"  # what a fragment of the master weights is called, beside the names of the optimizer's states


@dataclass(frozen=True)
class Fragment:
    """A live range of a flattened parameter or moment; writing into `tensor` changes the engine.

    All ranks hold the whole of a replicated one, of which each saves the share `to_save`.
    """

    name: str
    total: int  # elements of the whole
    start: int  # of `tensor` in the flattened whole
    tensor: Tensor  # (numel,)
    is_replicated: bool = False

    def to_save(self) -> "Fragment":
        """What this rank writes, so that all ranks together write everything once."""
        if not self.is_replicated:
            return self
        size = -(-len(self.tensor) // comm.world_size())
        start = min(comm.rank() * size, len(self.tensor))
        return Fragment(self.name, self.total, start, self.tensor[start : start + size])


Read = Callable[[Fragment], Tensor]  # the values of a fragment, (numel,)


class EngineState:
    """What a checkpoint holds of a DeepSpeed engine."""

    def __init__(self, engine: Any):
        self.engine = engine

    def fragments(self) -> list[Fragment]:
        """Weights and moments as they are; before the first optimizer step there are no moments."""
        return [fragment for piece in _pieces(self.engine) for fragment in self._fragments_of(piece)]

    def weights(self) -> list[Fragment]:
        """The fragments of the master weights alone."""
        return [_fragment(piece, WEIGHT, piece.holder.detach()) for piece in _pieces(self.engine)]

    @torch.no_grad()
    def set_weights(self, values: Sequence[Tensor]) -> None:
        """Write `values` into the fragments of `weights`; every rank calls it."""
        for fragment, value in zip(self.weights(), values, strict=True):
            fragment.tensor.copy_(value)
        _weights_from_masters(self.engine)

    def gather(self) -> Callable[[str], Tensor]:
        """A function of a trained parameter's name that gives its whole master weight, in its shape; every rank calls
        it for the same names in the same order."""
        owned = {piece.name: piece for piece in _pieces(self.engine)}
        params = dict(self.engine.module.named_parameters())

        def whole(name: str) -> Tensor:
            param = params[name]
            shape = getattr(param, "ds_shape", param.shape)
            flat = torch.zeros(shape.numel(), dtype=torch.float32, device=comm.device())
            piece = owned.get(name)
            if piece is not None and piece.is_replicated:
                return flat.copy_(piece.holder.detach().view(-1)).view(shape)
            if piece is not None:
                own = piece.holder.detach().view(-1)[piece.offset : piece.offset + piece.numel]
                flat[piece.start : piece.start + piece.numel] = own
            return comm.all_reduce_sum(flat).view(shape)  # what a rank does not own is 0 there

        return whole

    def state_dict(self) -> dict[str, Any]:
        """The same on every rank: number of updates, and names of the optimizer's states."""
        states = [s for s in _optimizer(self.engine).state.values() if "step" in s]
        steps = {int(state["step"]) for state in states}
        assert len(steps) <= 1, f"parameters of one engine were updated {sorted(steps)} times"
        return {
            "updates": max(steps, default=0),
            "moments": _moments(states[0]) if states else [],
            "schedule": self.engine.lr_scheduler.last_epoch,
        }

    def load(self, state: dict[str, Any], read: Read) -> None:
        """Take over a saved state; every rank calls it, and reads what it owns. Learning rates follow from the
        engine's own schedule. Gradients that are there are dropped."""
        self._make_moments(state["moments"], state["updates"])
        for fragment in self.fragments():
            fragment.tensor.copy_(read(fragment))
        self.engine.optimizer.zero_grad()
        _weights_from_masters(self.engine)
        _set_schedule(self.engine, state["schedule"])
        if isinstance(_optimizer(self.engine), DeepSpeedCPUAdam):
            _replay(_optimizer(self.engine), state["updates"])

    def _fragments_of(self, piece: "_Piece") -> Iterator[Fragment]:
        state = _optimizer(self.engine).state.get(piece.holder, {})
        for kind, whole in ((WEIGHT, piece.holder.detach()), *((kind, state[kind]) for kind in _moments(state))):
            yield _fragment(piece, kind, whole)

    @torch.no_grad()
    def _make_moments(self, names: list[str], updates: int) -> None:
        """The optimizer's states as they are after its first step, of the right sizes and devices; their values are
        read afterwards."""
        optimizer = _optimizer(self.engine)
        for holder in {id(h): h for h in _holders(self.engine)}.values():
            state = optimizer.state[holder]
            for name in names:
                if name not in state:
                    state[name] = torch.zeros_like(holder, requires_grad=False)
            for name in set(_moments(state)) - set(names):  # rolled back to before the first step
                del state[name]
            if isinstance(optimizer, DeepSpeedCPUAdam):
                state["step"] = updates
            else:
                state["step"] = torch.tensor(float(updates), device=holder.device)
            if not names:
                del optimizer.state[holder]


@dataclass(frozen=True)
class _Piece:
    """The part of a parameter that this rank owns, as a range of `holder`, which is what the optimizer updates."""

    name: str
    total: int
    start: int
    numel: int
    holder: Tensor
    offset: int
    is_replicated: bool = False


def _fragment(piece: _Piece, kind: str, whole: Tensor) -> Fragment:
    tensor = whole.view(-1).narrow(0, piece.offset, piece.numel)
    return Fragment(f"{piece.name}/{kind}", piece.total, piece.start, tensor, piece.is_replicated)


def _pieces(engine: Any) -> Iterator[_Piece]:
    """In the order of the module's parameters."""
    outer = engine.optimizer
    masters = _unfused_masters(outer) if isinstance(outer, FP16_UnfusedOptimizer) else {}
    for name, param in engine.module.named_parameters():
        if not param.requires_grad:
            continue
        if isinstance(outer, DeepSpeedZeroOptimizer_Stage3):
            piece = _stage_3_piece(outer, name, param)
        elif isinstance(outer, DeepSpeedZeroOptimizer | BF16_Optimizer):
            piece = _stage_1_2_piece(outer, name, param)
        else:
            piece = _Piece(name, param.numel(), 0, param.numel(), masters.get(param, param), 0, is_replicated=True)
        if piece is not None and piece.numel > 0:
            yield piece


def _stage_3_piece(outer: Any, name: str, param: Any) -> _Piece:
    """Ranks own consecutive ranges of equal size, the last of which is padded."""
    group, offset, size = outer.grad_position[outer.get_param_id(param)]
    start = min(outer._get_param_partition_rank(param) * size, param.ds_numel)
    holder = outer.fp32_partitioned_groups_flat[group]
    return _Piece(name, param.ds_numel, start, min(size, param.ds_numel - start), holder, offset)


def _stage_1_2_piece(outer: Any, name: str, param: Any) -> _Piece | None:
    mapping = param._hp_mapping
    if mapping is None:  # all of it is other ranks'
        return None
    whole, flat = mapping.lp_fragment_address, mapping.hp_fragment_address
    holder = _flat_groups(outer)[mapping.param_group_index]
    return _Piece(name, param.numel(), whole.start, whole.numel, holder, flat.start)


def _flat_groups(outer: Any) -> list[Tensor]:
    is_bf16 = isinstance(outer, BF16_Optimizer)
    return outer.fp32_groups_flat_partition if is_bf16 else outer.single_partition_of_fp32_groups


def _unfused_masters(outer: Any) -> dict[Any, Tensor]:
    return {
        param: master
        for params, masters in zip(outer.fp16_groups, outer.fp32_groups, strict=True)
        for param, master in zip(params, masters, strict=True)
    }


@torch.no_grad()
def undo_empty_step(engine: Any) -> None:
    """DeepSpeed makes the optimizer of half-precision weights without ZeRO take a step of no gradients: it would decay
    weights, and the first real step would have the bias corrections of a second one, three quarters of its size."""
    if isinstance(engine.optimizer, FP16_UnfusedOptimizer):
        _optimizer(engine).state.clear()
        for param, master in _unfused_masters(engine.optimizer).items():
            master.copy_(param)


def _holders(engine: Any) -> Iterator[Tensor]:
    """All tensors that the optimizer updates, also those of which this rank owns only padding."""
    outer = engine.optimizer
    if isinstance(outer, DeepSpeedZeroOptimizer_Stage3):
        yield from outer.fp32_partitioned_groups_flat
    elif isinstance(outer, DeepSpeedZeroOptimizer | BF16_Optimizer):
        yield from _flat_groups(outer)
    else:
        yield from (piece.holder for piece in _pieces(engine))


def state_tensors(engine: Any, *, weights: bool) -> Iterator[Tensor]:
    """What an engine has in memory between two optimizer steps: master weights, moments, room for gradients, and the
    weights themselves or, without `weights`, nothing that shares memory with them."""
    outer = engine.optimizer
    own = [getattr(param, "ds_tensor", param) for param in engine.module.parameters()]
    states = [value for state in _optimizer(engine).state.values() for value in state.values()]
    grads = [*getattr(outer, "fp32_groups_gradients_flat", ()), getattr(outer, "grad_partitions_flat_buffer", None)]
    kept = set() if weights else {tensor.untyped_storage().data_ptr() for tensor in own}
    for tensor in [*own, *_holders(engine), *states, *grads]:
        if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in kept:
            yield tensor


def _optimizer(engine: Any) -> torch.optim.Optimizer:
    return engine.basic_optimizer


def _moments(state: dict[str, Any]) -> list[str]:
    """Names of the states that are as large as the weights."""
    return sorted(name for name, value in state.items() if torch.is_tensor(value) and value.dim() > 0)


@torch.no_grad()
def _weights_from_masters(engine: Any) -> None:
    """What an optimizer step does at its end: the weights that the forward uses, from those that are updated."""
    outer = engine.optimizer
    if isinstance(outer, DeepSpeedZeroOptimizer_Stage3):
        outer._partition_all_parameters()
        for group in range(len(outer.fp16_groups)):
            outer._reassign_or_swap_out_partitioned_parameters(group)
        outer._post_step(set())
    elif isinstance(outer, DeepSpeedZeroOptimizer | BF16_Optimizer):
        outer.update_lp_params()
    elif isinstance(outer, FP16_UnfusedOptimizer):
        for param, master in _unfused_masters(outer).items():
            param.data.copy_(master.data)


def _set_schedule(engine: Any, position: int) -> None:
    """Put the schedule, one of transformers' closed forms, after that many optimizer steps."""
    schedule = engine.lr_scheduler
    schedule.last_epoch, schedule._step_count = position, position + 1
    for group, rate, factor in zip(
        _optimizer(engine).param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True
    ):
        group["lr"] = rate * factor(position)
    schedule._last_lr = [group["lr"] for group in _optimizer(engine).param_groups]


def _replay(optimizer: Any, updates: int) -> None:
    """DeepSpeed's C++ Adam multiplies up its bias corrections from step to step; take it through the same products."""
    one = [torch.zeros(1) for _ in range(4)]
    group = optimizer.param_groups[0]
    for step in range(1, updates + 1):
        optimizer.ds_opt_adam.adam_update(optimizer.opt_id, step, 0.0, *group["betas"], 1.0, 0.0, True, *one)
