"""Before anything is trained: what is computed of a micro-batch must be what the model's own forward says of each of
its sequences alone. Architectures differ in more than their layers: logits are scaled or capped behind the LM head,
states run on from one packed sequence into the next."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from spmdrl.distributed import comm
from spmdrl.distributed.strategy import unwrap
from spmdrl.errors import UserError
from spmdrl.models.actor import Actor
from spmdrl.models.distillation import Teacher
from spmdrl.models.packing import Layout, packed, padded
from spmdrl.models.value_head import RewardModel
from spmdrl.trainer.weight_check import TOLERANCE

LENGTHS, NUM_SHARED = (12, 10, 8), 6  # of the sequences; that many tokens are the same in all


class UnknownForward(UserError):
    """A model that cannot be called as all others. Its cause's traceback says where."""

    show_cause = True


@torch.no_grad()
def check_forward(engine: Any, source: str) -> None:
    """Compare the Actor, Teacher, RewardModel or ValueModel in `engine` with its model's own forward, or with itself
    for each sequence alone; where its layout alone is wrong, take the plain one. Every rank calls it.

    Raises UserError, naming `source`, for a model that would be computed wrongly."""
    module = unwrap(engine)
    wanted = module.layout
    with _named(source):
        alone = torch.cat([_own(engine, row) for row in _sequences(module)])
        gaps = {layout: _gap(engine, layout, alone) for layout in (wanted, padded)}
    module.layout = padded if gaps[wanted] else wanted
    if gaps[padded]:
        raise UserError(
            f"{source}: models of this architecture are not supported: what is computed here is not what its own "
            f"forward says ({gaps[padded]}), as where logits are scaled or capped behind the LM head"
        )
    if wanted is packed and gaps[packed]:
        raise UserError(
            f"--packing_samples: in {source} packed sequences would see one another ({gaps[packed]}): leave it out"
        )


@contextmanager
def _named(source: str) -> Iterator[None]:
    """One line for what a model raises that is called in a way that it does not know."""
    try:
        yield
    except (TypeError, AttributeError, NotImplementedError, ValueError, LookupError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UnknownForward(f"{source}: models of this architecture are not supported: {reason}") from error


def _sequences(module: Any) -> list[Tensor]:
    """Token ids that begin alike, (S,) each, of the model's vocabulary."""
    size = min(module.model.config.get_text_config().vocab_size, 1000)
    rows = (
        [(37 * place + 11 * (row if place >= NUM_SHARED else 0) + 3) % size for place in range(length)]
        for row, length in enumerate(LENGTHS)
    )
    return [torch.tensor(row, device=comm.device()) for row in rows]


def _own(engine: Any, ids: Tensor) -> Tensor:
    """What one sequence alone comes to: the log-probs, by the model's own logits, of the tokens behind what all share;
    of others than causal LMs the scores."""
    module = unwrap(engine)
    if isinstance(module, Actor | Teacher):
        logits = module.model(input_ids=ids[None], use_cache=False).logits[0, NUM_SHARED - 1 : -1]
        return _picked(logits, ids[NUM_SHARED:], getattr(module, "temperature", 1.0))
    module.layout = padded
    return _together(engine, [ids])


def _together(engine: Any, rows: list[Tensor]) -> Tensor:
    """The same of all `rows` in one micro-batch, one after the other."""
    module = unwrap(engine)
    sequences = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    lengths = torch.tensor([len(row) for row in rows], device=sequences.device)
    if isinstance(module, RewardModel):
        return engine(sequences, lengths)
    places = torch.arange(1, sequences.shape[1], device=sequences.device)
    mask = (places >= NUM_SHARED) & (places < lengths[:, None])
    if isinstance(module, Teacher):
        logits: list[Tensor] = []
        engine(engine(sequences, mask), [slice(None)], lambda _, chunk: logits.append(chunk))
        return _picked(logits[0], sequences[:, 1:][mask], 1.0)
    said = engine(sequences, mask)
    return (said[0] if isinstance(module, Actor) else said)[mask]


def _picked(logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
    return (logits.float() / temperature).log_softmax(-1).gather(-1, ids[:, None])[:, 0]


def _gap(engine: Any, layout: Layout, alone: Tensor) -> str | None:
    """By how much all in one micro-batch differ from `alone`; None where rounding explains it."""
    module = unwrap(engine)
    module.layout = layout
    off = (_together(engine, _sequences(module)) - alone).abs().nan_to_num(nan=torch.inf)
    off = off / alone.abs().clamp(min=1.0)  # scores have any scale, and rounding has theirs
    most, mean = comm.all_reduce_max(float(off.max())), comm.all_reduce_max(float(off.mean()))
    dtype = next(module.parameters()).dtype
    limit, mean_limit = TOLERANCE[dtype]
    return f"off by up to {most:.3g} in {dtype}" if most > limit or mean > mean_limit else None
