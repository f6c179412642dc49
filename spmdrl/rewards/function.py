"""Rewards from a Python function of the user's: `reward_func(queries, prompts, labels, **columns)`.

The contract, which README and examples repeat:

- Every argument is a list with one entry a sample. `queries` is prompt + response as text and `prompts` the prompt as
  it went to the model (template applied), so `query[len(prompt):]` is the response. `labels` are the values of
  `--label_key`, unchanged, None without it. These three are passed by position.
- Any other column of the data is passed by name to a function that has a parameter of that name, or `**kwargs`.
- It returns one number a sample: a list, numpy array or tensor (any device) of shape (B,), (B, 1) or (1, B), of
  floats, ints or bools; or a dict with `rewards`, optionally `scores` (B, what `--dynamic_filtering` goes by) and
  `extra_logs` (name → B numbers, or one number for the whole call). `async def` is awaited.
- Anything else stops the run with the function, the sample and what was returned: a wrong count (a single number is
  not spread over samples), None, text, NaN, inf, an exception. No reward is ever made up.

Every rank calls it with its own samples, once a rollout.
"""

import asyncio
import functools
import hashlib
import importlib.util
import inspect
import numbers
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from spmdrl.distributed import preemption
from spmdrl.errors import UserError
from spmdrl.rewards.source import NOTHING, RewardBatch, RewardError, RewardOutput

POSITIONAL = ("queries", "prompts", "labels")
DEFAULT_NAME = "reward_func"
SEARCH_S = 5.0  # all ranks stop within seconds of an error
FP32_MAX = torch.finfo(torch.float32).max


class RewardFunction:
    """A function in a Python file, given as "path.py" (its `reward_func`) or "path.py:name"."""

    normalizes = False

    def __init__(self, spec: str):
        path, name = parse_spec(spec)
        self.function = load_function(path, name)
        self.where = f"{name} in {path}"
        self.parameters = inspect.signature(self.function).parameters
        check_signature(self.function, self.where)

    def check_columns(self, available: Sequence[str]) -> None:
        """Raise UserError when the function needs a column that the data does not have."""
        missing = [name for name in self._named_columns(required=True) if name not in available]
        if missing:
            raise UserError(
                f"{self.where} takes {', '.join(map(repr, missing))}, which no column of the data is called; "
                f"columns it can take: {', '.join(available) or 'none'}"
            )

    def __call__(self, batch: RewardBatch) -> RewardOutput:
        """Rewards of B samples; none where the function fails as the run is asked to stop, see preemption.excused."""
        if not batch.queries:
            return NOTHING
        with preemption.excused():
            return self._ask(batch)
        return RewardOutput(torch.zeros(len(batch)))

    def _ask(self, batch: RewardBatch) -> RewardOutput:
        self.check_columns(list(batch.columns))
        positional = [batch.queries, batch.prompts, batch.labels]
        arguments = positional, {k: v for k, v in batch.columns.items() if self._accepts(k)}
        try:
            returned = call(self.function, *arguments)
        except (Exception, SystemExit) as error:
            culprit = find_culprit(self.function, *arguments, error)
            unlabelled = all(label is None for label in batch.labels)
            hint = "; all labels are None, as without --label_key" if unlabelled else ""
            raise RewardError(
                f"{self.where} raised {describe(error)} on {_name(batch.sample_ids, culprit)}{hint}"
            ) from error
        return read_output(returned, batch.sample_ids, self.where)

    def _accepts(self, column: str) -> bool:
        takes_any = any(p.kind is p.VAR_KEYWORD for p in self.parameters.values())
        return column in self._named_columns() or (
            takes_any and column not in self.parameters and column not in POSITIONAL
        )

    def _named_columns(self, required: bool = False) -> list[str]:
        """Parameters after the first three that are filled by name; only those without a default if `required`."""
        positional = [p for p in self.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        keyword_only = [p for p in self.parameters.values() if p.kind is p.KEYWORD_ONLY]
        return [p.name for p in positional[3:] + keyword_only if not required or p.default is p.empty]


def parse_spec(spec: str) -> tuple[Path, str]:
    """ "path.py" or "path.py:name" → file, name."""
    path, name = (spec, DEFAULT_NAME) if spec.endswith(".py") else spec.rpartition(":")[::2]
    if not path.endswith(".py") or not name:
        raise UserError(f"reward function {spec!r}: give path.py, which defines {DEFAULT_NAME}, or path.py:name")
    return Path(path).expanduser(), name


def load_function(path: Path, name: str) -> Callable[..., Any]:
    """Import the file and return what it calls `name`."""
    module = load_module(path)
    if not hasattr(module, name):
        defined = [k for k, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__]
        raise UserError(
            f"reward file {path} defines no {name}; "
            + (f"it defines {', '.join(defined)}: choose with --reward_func {path}:NAME" if defined else "no function")
        )
    function = getattr(module, name)
    if not callable(function) or inspect.isclass(function):
        kind = "class" if callable(function) else type(function).__name__
        raise UserError(f"{name} in {path} is a {kind}, not a function")
    return function


def load_module(path: Path) -> ModuleType:
    """Import a file under a name of its own; files beside it can be imported by it, then and later."""
    if not path.is_file():
        raise UserError(f"reward file {path}: no such file")
    folder = str(path.resolve().parent)
    module_name = f"spmdrl_reward_{path.stem}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    sys.path.insert(0, folder)
    try:
        with _torch_of_functions():
            spec.loader.exec_module(module)
    except UserError:
        raise
    except SyntaxError as error:
        where = f"{error.filename}, line {error.lineno}" if error.lineno else str(path)
        raise UserError(f"reward file {where}: {error.msg}") from None
    except (Exception, SystemExit) as error:
        raise RewardError(f"importing reward file {path} failed: {describe(error)}") from error
    finally:
        sys.path.remove(folder)
        sys.path.append(folder)  # last from here on, so that no file beside it hides an installed module
    return module


def check_signature(function: Callable[..., Any], where: str) -> None:
    """Refuse what cannot be called, or would be called with lists in the wrong places, before any model loads."""
    signature = inspect.signature(function)
    kinds = [p for p in signature.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    first = [p.name for p in kinds[:3]]
    misplaced = any(name in POSITIONAL and POSITIONAL[i] != name for i, name in enumerate(first))
    try:
        signature.bind_partial(*POSITIONAL)
    except TypeError:
        misplaced = True
    if misplaced or "completions" in first:
        raise UserError(f"{where} takes {signature}; it is called with (queries, prompts, labels, **columns)")


def call(function: Callable[..., Any], positional: list[Sequence[Any]], named: Mapping[str, Sequence[Any]]) -> Any:
    """Call with copies, so that a function that sorts or pops does no harm; wait for an `async def`."""
    with _torch_of_functions():
        returned = function(*map(list, positional), **{name: list(values) for name, values in named.items()})
        if inspect.isawaitable(returned):
            return _event_loop().run_until_complete(_wait_for(returned))
    return returned


_theirs: list[tuple[bool, torch.dtype, torch.device]] = []


@contextmanager
def _torch_of_functions() -> Iterator[None]:
    """What a reward file sets for all of torch, as one that computes with a model may, is so in its calls and nowhere
    else: without gradients nothing could be trained."""
    own = _torch_settings()
    if _theirs:
        _set_torch(*_theirs.pop())
    try:
        yield
    finally:
        _theirs[:] = [_torch_settings()]
        _set_torch(*own)


def _torch_settings() -> tuple[bool, torch.dtype, torch.device]:
    return torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_default_device()


def _set_torch(has_grad: bool, dtype: torch.dtype, device: torch.device) -> None:
    torch.set_grad_enabled(has_grad)
    torch.set_default_dtype(dtype)
    if torch.get_default_device() != device:
        torch.set_default_device(None if device.type == "cpu" else device)


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """One for all calls: a client that a function keeps has connections that are the loop's."""
    return asyncio.new_event_loop()


async def _wait_for(awaitable: Any) -> Any:
    return await awaitable


def find_culprit(
    function: Callable[..., Any],
    positional: list[Sequence[Any]],
    named: Mapping[str, Sequence[Any]],
    error: BaseException,
) -> int | None:
    """The first sample that alone raises the same kind of error, or None. The run ends, so calling again is fine."""
    deadline = time.monotonic() + SEARCH_S
    for i in range(len(positional[0])):
        if time.monotonic() > deadline:
            return None
        try:
            call(function, [x[i : i + 1] for x in positional], {k: v[i : i + 1] for k, v in named.items()})
        except type(error):
            return i
        except (Exception, SystemExit):
            continue
    return None


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _name(sample_ids: Sequence[str], i: int | None) -> str:
    """How errors call sample `i` of a call, or all of them."""
    if i is not None:
        return sample_ids[i]
    return (
        f"one of {len(sample_ids)} samples, {sample_ids[0]} to {sample_ids[-1]}"
        if len(sample_ids) > 1
        else sample_ids[0]
    )


def read_output(returned: Any, sample_ids: Sequence[str], where: str) -> RewardOutput:
    """What the function returned, checked, in fp32 on the CPU."""
    if not isinstance(returned, dict):
        return RewardOutput(read_numbers(returned, sample_ids, where))
    known = ("rewards", "scores", "extra_logs")
    unknown = [key for key in returned if key not in known]
    if "rewards" not in returned or unknown:
        raise RewardError(
            f"{where} returned a dict with {', '.join(map(repr, returned)) or 'nothing'}; "
            f"it may have 'rewards', and optionally 'scores' and 'extra_logs'"
        )
    scores, extra_logs = returned.get("scores"), returned.get("extra_logs")
    extra_logs = {} if extra_logs is None else extra_logs
    if not isinstance(extra_logs, dict):
        raise RewardError(f"{where} returned extra_logs of type {type(extra_logs).__name__}, not a dict of numbers")
    return RewardOutput(
        rewards=read_numbers(returned["rewards"], sample_ids, f"{where}, 'rewards'"),
        scores=None if scores is None else read_numbers(scores, sample_ids, f"{where}, 'scores'"),
        extra_logs={
            str(name): read_numbers(_spread(values, len(sample_ids)), sample_ids, f"{where}, extra_logs[{name!r}]")
            for name, values in extra_logs.items()
        },
    )


def _spread(values: Any, count: int) -> Any:
    """A log that is one number stands for every sample of the call."""
    values = _plain(values)
    return [values] * count if isinstance(values, numbers.Real) else values


def _plain(value: Any) -> Any:
    """Tensors, numpy arrays and scalars, and pandas columns as Python numbers and lists."""
    return value.tolist() if hasattr(value, "tolist") else value


def read_numbers(values: Any, sample_ids: Sequence[str], where: str) -> Tensor:
    """One finite number a sample → (B,) fp32. Shapes (B,), (B, 1) and (1, B); nothing is broadcast or guessed."""
    kind, count, rows = type(values).__name__, len(sample_ids), _plain(values)
    if not isinstance(rows, (list, tuple)):
        raise RewardError(f"{where} returned {_shown(rows)} ({kind}) for {count} samples; return {count} numbers")
    if count != 1 and len(rows) == 1 and isinstance(inner := _plain(rows[0]), (list, tuple)):
        rows = inner
    if len(rows) != count:
        raise RewardError(f"{where} returned {len(rows)} numbers for {count} samples")
    return torch.tensor([read_number(x, where, _name(sample_ids, i)) for i, x in enumerate(rows)], dtype=torch.float32)


def read_number(value: Any, where: str, sample: str) -> float:
    """A finite number, alone or as the one entry of a list."""
    value = _plain(value)
    if isinstance(value, (list, tuple)) and len(value) == 1:
        value = _plain(value[0])
    if not isinstance(value, numbers.Real):
        raise RewardError(f"{where} returned {_shown(value)} for {sample}, not a number")
    if not abs(value) <= FP32_MAX:
        raise RewardError(f"{where} returned {_shown(value)} for {sample}, not a finite fp32 number")
    return float(value)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
