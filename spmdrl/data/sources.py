"""From a flag such as `--prompt_data` to rows: files, directories, hub names, splits, mixtures, and errors that help.

Nothing here knows what the columns mean, so that prompts, supervised and preference sets share it.
"""

import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from spmdrl.config.splits import exists, sources_of
from spmdrl.data.readers import ArrowTable, CsvFile, Reader, Row, read_json
from spmdrl.errors import UserError

logger = logging.getLogger(__name__)
EXTENSIONS = (".jsonl", ".json", ".parquet", ".csv", ".arrow")
SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}


class NoSplit(UserError):
    """A source has no split of the name that was asked for."""


class Rows(Sequence[Row]):
    """Rows picked from one or more readers, in order; each reader gives its rows from the first on."""

    def __init__(self, readers: list[Reader], reader_of: np.ndarray, row_of: np.ndarray, sources: list[str]):
        self.readers, self.sources = readers, sources
        self._reader, self._row = reader_of, row_of

    def __len__(self) -> int:
        return len(self._reader)

    def __getitem__(self, index: int) -> Row:  # type: ignore[override]
        return self.readers[self._reader[index]][int(self._row[index])]

    def __iter__(self) -> Iterator[Row]:
        cursors = [iter(reader) for reader in self.readers]
        for k in self._reader.tolist():
            yield next(cursors[k])

    def where(self, index: int) -> str:
        """How a person finds the row: file and line."""
        return self.readers[self._reader[index]].where(int(self._row[index]))

    @property
    def name(self) -> str:
        return ", ".join(self.sources)

    def require(self, index: int, row: Row, key: str, *, flag: str) -> Any:
        """The value in column `key` of `row`, which is row `index`; an error that helps if there is none."""
        if key in row:
            return row[key]
        reader = self.readers[self._reader[index]]
        if any(key in other for other in reader):
            raise UserError(f"{self.where(index)} has no column {key!r} ({flag}); it has {_names(row)}")
        raise UserError(
            f"no row of {reader.name} has the column {key!r} ({flag}); its columns are {_names(reader[0])}"
        )


def _names(row: Row) -> str:
    return ", ".join(row) or "none"


def load_rows(
    spec: str, probs: str | None, *, split: str, max_samples: int | float, seed: int, flag: str = "--prompt_data"
) -> Rows:
    """Rows of one source, or of several mixed by probability.

    spec: sources separated by commas, each a file, a directory or a hub name, with `@split` at its end to override
    `split`. A single file or a saved `Dataset` has no splits and is taken whole.
    probs: one weight a source; they are scaled to sum to 1. The mixture draws the source of each row with them and
    takes that source's rows in order until the first source has none left, so no row comes twice (the rule of
    `datasets.interleave_datasets` with "first_exhausted"). It is a function of `seed` and the sources' sizes.
    None: every row of every source, one source after the other.
    max_samples: at most this many rows, the first ones of the mixture.
    flag: the name of the flag that gave `spec`, for messages; `{flag}_probs` gave `probs`.
    """
    names = sources_of(spec)
    if not all(names):
        raise UserError(f"{flag} {spec!r} has an empty name between its commas")
    if max_samples < 1:
        raise UserError(f"--max_samples must be at least 1, got {max_samples}")
    weights = None if probs is None else parse_probs(probs, len(names), flag=flag)
    sources = [_open_source(name, split, flag) for name in names]
    sizes = [sum(map(len, readers)) for readers in sources]
    for name, size in zip(names, sizes, strict=True):
        if size == 0:
            raise UserError(f"{flag} {name} has no rows")
    order = _mix(sizes, weights, seed)[: int(max_samples)]
    used = np.bincount(order, minlength=len(names)).tolist()
    labels = [
        name if len(names) == 1 and count == size else f"{name} [{count} of {size} rows]"
        for name, count, size in zip(names, used, sizes, strict=True)
    ]
    return Rows([reader for readers in sources for reader in readers], *_locate(sources, order), labels)


def parse_probs(probs: str, num_sources: int, *, flag: str) -> list[float]:
    """`0.5,0.5` as weights that sum to 1, one for each source."""
    try:
        weights = [float(part) for part in str(probs).split(",")]
    except ValueError as error:
        raise UserError(f"{flag}_probs {probs!r} is not a list of numbers such as 0.5,0.5") from error
    if len(weights) != num_sources:
        raise UserError(
            f"{flag} names {num_sources} source{'s' * (num_sources > 1)}, {flag}_probs {probs!r} has {len(weights)}; "
            f"give one number for each, such as {','.join(['%.2g' % (1 / num_sources)] * num_sources)}"
        )
    if not all(0 <= weight < float("inf") for weight in weights) or sum(weights) == 0:
        raise UserError(f"{flag}_probs {probs!r}: the numbers must be zero or more, and not all zero")
    if len(weights) == 1 and weights != [1.0]:
        raise UserError(f"{flag}_probs {probs!r}: every row comes from the one source of {flag}; leave it out")
    return [weight / sum(weights) for weight in weights]


def _mix(sizes: list[int], weights: list[float] | None, seed: int) -> np.ndarray:
    """The source of each row of the mixture."""
    if len(sizes) == 1 or weights is None:
        return np.repeat(np.arange(len(sizes)), sizes)
    from datasets import Dataset, interleave_datasets

    tagged = [Dataset.from_dict({"source": np.full(size, k)}) for k, size in enumerate(sizes)]
    mixed = interleave_datasets(tagged, probabilities=weights, seed=seed, stopping_strategy="first_exhausted")
    return np.asarray(mixed.with_format("numpy")["source"][:])


def _locate(sources: list[list[Reader]], order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The reader and the row in it of each row; a source of several files gives them one after the other."""
    reader_of, row_of = np.empty(len(order), dtype=np.int32), np.empty(len(order), dtype=np.int64)
    first = 0
    for k, readers in enumerate(sources):
        taken = order == k
        sizes = [len(reader) for reader in readers]
        reader_of[taken] = first + np.repeat(np.arange(len(readers)), sizes)[: taken.sum()]
        row_of[taken] = np.concatenate([np.arange(size) for size in sizes])[: taken.sum()]
        first += len(readers)
    return reader_of, row_of


def _open_source(source: str, split: str, flag: str) -> list[Reader]:
    name, own_split = source, ""
    if "@" in source and not exists(source):
        name, _, own_split = (part.strip() for part in source.rpartition("@"))
        if not (name and own_split):
            raise UserError(f"{flag} {source!r}: expected NAME@SPLIT")
    path = Path(os.path.expanduser(name))
    if not exists(name):
        if path.suffix.lower() in EXTENSIONS or name.startswith(("/", ".", "~")) or name.count("/") > 1:
            raise UserError(f"{flag} {name}: no such file or directory")
        return [_open_hub(name, own_split, split, flag)]
    if path.is_file():
        _refuse_split_of_one(source, own_split, "a single file", flag)
        return [_open_file(path, name)]
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return [_open_saved(path, name, own_split, split, flag)]
    if path.is_dir():
        return _open_directory(path, name, own_split or split, flag)
    raise UserError(f"{flag} {name}: neither a file nor a directory")


def _open_file(path: Path, name: str) -> Reader:
    suffix = path.suffix.lower()
    try:
        if suffix in (".jsonl", ".json"):
            return read_json(path, name)
        if suffix == ".csv":
            return CsvFile(path, name)
    except OSError as error:
        raise UserError(f"{name} cannot be read: {error.strerror or error}") from error
    if suffix not in EXTENSIONS:
        raise UserError(f"{name}: unknown kind of file {suffix!r}, expected one of {', '.join(EXTENSIONS)}")
    if path.stat().st_size == 0:
        raise UserError(f"{name} is empty")
    with _reading(name):
        from datasets import load_dataset

        return ArrowTable(load_dataset(suffix[1:], data_files={"train": [str(path)]}, split="train"), name)


def _open_saved(path: Path, name: str, own_split: str, split: str, flag: str) -> Reader:
    """A directory that `save_to_disk` of a `Dataset` or a `DatasetDict` wrote."""
    with _reading(name):
        from datasets import load_from_disk

        saved = load_from_disk(str(path))
    if isinstance(saved, dict):
        return ArrowTable(_choose_split(saved, own_split or split, name, flag), name)
    _refuse_split_of_one(f"{name}@{own_split}", own_split, "a saved Dataset", flag)
    return ArrowTable(saved, name)


def _refuse_split_of_one(source: str, own_split: str, what: str, flag: str) -> None:
    if own_split not in ("", "train"):
        raise UserError(f"{flag} {source}: {what} has no split {own_split!r}; leave @{own_split} out")


def _open_directory(path: Path, name: str, split: str, flag: str) -> list[Reader]:
    """The files of one split. Names and folders tell splits apart; files that name none are all train."""
    found = [file for file in path.rglob("*") if file.suffix.lower() in EXTENSIONS and file.is_file()]
    files = sorted(file for file in found if not any(part.startswith(".") for part in file.relative_to(path).parts))
    if not files:
        raise UserError(f"{flag} {name}: the directory holds no {', '.join(EXTENSIONS)} file and no saved data set")
    by_split: dict[str, list[Path]] = {}
    for file in files:
        by_split.setdefault(_split_of(file.relative_to(path)), []).append(file)
    unnamed = by_split.pop("", [])
    by_split = by_split or {"train": unnamed}
    by_stem = {file.stem: [file] for file in files}
    chosen = _choose_split({**by_stem, **by_split} if split in by_stem else by_split, split, name, flag)
    return [_open_file(file, f"{name.rstrip('/')}/{file.relative_to(path)}") for file in chosen]


def _split_of(file: Path) -> str:
    """The split that a path inside a data set directory names, '' for none."""
    shard = re.fullmatch(r"(.+)-\d{5}-of-\d{5}", file.stem)
    if shard:
        return shard[1]
    for part in reversed(file.with_suffix("").parts):
        words = re.split(r"[-._ \d]+", part.lower())
        for split, names in SPLIT_WORDS.items():
            if any(word in names for word in words):
                return split
    return ""


def _choose_split(splits: Any, split: str, name: str, flag: str) -> Any:
    if split not in splits:
        raise NoSplit(
            f"{flag} {name} has no split {split!r}, it has: {', '.join(map(str, splits))}; "
            f"choose one with {name}@SPLIT or the split flag"
        )
    return splits[split]


def _open_hub(name: str, own_split: str, split: str, flag: str) -> Reader:
    """A data set of the hub. `@x` is a split if it has one of that name, otherwise a directory in it (`data_dir`)."""
    with _reading(f"{flag} {name} (no such file or directory here, so taken for a hub name)", quiet=False):
        from datasets import load_dataset

        splits = load_dataset(name)
        if own_split and own_split not in splits:
            splits = load_dataset(name, data_dir=own_split)
            own_split = ""
    return ArrowTable(_choose_split(splits, own_split or split, name, flag), name)


@contextmanager
def _reading(name: str, *, quiet: bool = True) -> Iterator[None]:
    """Turns whatever `datasets` raises into one line; without its progress bars if quiet."""
    import datasets

    bars = quiet and not datasets.are_progress_bars_disabled()
    if bars:
        datasets.disable_progress_bars()
    try:
        yield
    except Exception as error:  # HTTP, file system, Arrow and pandas errors, wrapped or not
        root = error
        while root.__cause__ is not None:
            root = root.__cause__
        reason = " ".join(str(root).split())[:300]
        raise UserError(f"{name} cannot be loaded: {type(root).__name__}: {reason}") from error
    finally:
        if bars:
            datasets.enable_progress_bars()
