"""Parts of a run's state that are no object's own, as JSON and tensors: random numbers, the samples under training."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy
import torch
from torch import Tensor

from spmdrl.distributed import comm
from spmdrl.errors import UserError
from spmdrl.experience import Sample
from spmdrl.trainer.update import TrainBatch


# ---- random numbers -------------------------------------------------------------------------------------------------
def rng_state() -> dict[str, Any]:
    """Of Python, numpy and torch, on this rank."""
    name, keys, *rest = numpy.random.get_state()
    numbers = [name, numpy.asarray(keys).tolist(), *rest]
    state = {"python": random.getstate(), "numpy": numbers, "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    numpy.random.set_state(tuple(state["numpy"]))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


# ---- the samples under training -------------------------------------------------------------------------------------
def batch_state(batch: TrainBatch | None) -> dict[str, Any] | None:
    """Without the reports, which are each rank's own."""
    return None if batch is None else {"samples": samples_state(batch.samples), "chunks": batch.chunks}


def restored_batch(state: dict[str, Any] | None, reports_of_ranks: Sequence[dict[str, Any]]) -> TrainBatch | None:
    """The batch, with this rank's share of the reports of the ranks that saved it."""
    if state is None:
        return None
    mine = reports_of_ranks[comm.rank() :: comm.world_size()]
    roles = reports_of_ranks[0].keys()
    empty = [{role: [_nothing(report) for report in reports_of_ranks[0][role]] for role in roles}]
    merged = {
        role: [_merged(reports) for reports in zip(*(share[role] for share in mine or empty), strict=True)]
        for role in roles
    }
    return TrainBatch(samples_from(state["samples"]), state["chunks"], merged)


def check_fields(batch: TrainBatch, needed: Mapping[str, str]) -> None:
    """Raise UserError where samples that were saved in the middle of training on them lack a field that is `needed` by
    now, given with the flag that asks for it."""
    for name, flag in needed.items():
        if any(getattr(sample, name) is None for sample in batch.samples):
            raise UserError(
                "--load_checkpoint: the checkpoint is of the middle of a step, whose samples have no "
                f"{name}, as {flag} needs: finish that step by the former flags first, or remove the "
                "checkpoint to go on from the one before"
            )


def _merged(reports: Sequence[dict[str, float]]) -> dict[str, float]:
    """One report of an optimizer step for those of several ranks, named as update.Metrics says."""
    out = dict(reports[0])
    for report in reports[1:]:
        for name, value in report.items():
            if name.startswith("max/"):
                out[name] = max(out.get(name, value), value)
            elif name.startswith(("sum/", "step/")):
                out[name] = out.get(name, 0.0) + value
    return out


def _nothing(report: dict[str, float]) -> dict[str, float]:
    """What a rank reports that had no part in an optimizer step: the same names as all ranks."""
    return {name: 0.0 if name.startswith(("max/", "sum/", "step/")) else value for name, value in report.items()}


def samples_state(samples: Sequence[Sample]) -> dict[str, Any]:
    """By field: a list of plain values, or the tensors of all samples one after the other, with their lengths."""
    return {field.name: _column([getattr(s, field.name) for s in samples]) for field in fields(Sample)}


def _column(values: list[Any]) -> Any:
    if not any(isinstance(value, Tensor) for value in values):
        return {"values": values}
    return {"lengths": [len(value) for value in values], "tensor": torch.cat(values)}


def samples_from(state: dict[str, Any]) -> list[Sample]:
    columns = {name: _values(column) for name, column in state.items()}
    return [Sample(**dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]


def _values(column: dict[str, Any]) -> Sequence[Any]:
    return column["values"] if "values" in column else torch.split(column["tensor"], column["lengths"])
