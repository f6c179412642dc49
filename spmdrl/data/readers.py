"""Row readers: one file or Arrow table each, rows parsed when asked for, values as the file has them.

JSON and CSV are read here rather than by `datasets`, which names no line, fills missing keys with None and changes
the type of values to fit a column. Text files are indexed once and stay on disk, so a rank holds 24 bytes a row.
"""

import csv
import json
import os
from abc import abstractmethod
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from spmdrl.errors import UserError

Row = dict[str, Any]
UTF8_BOM = b"\xef\xbb\xbf"


class Reader(Protocol):
    """The rows of one file or table. `where(i)` says how a person finds row i."""

    name: str

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Row: ...
    def __iter__(self) -> Iterator[Row]: ...
    def where(self, index: int) -> str: ...


class _LineFile(Sequence[Row]):
    """A text file whose rows are found by byte offset; subclasses index and parse."""

    def __init__(self, path: Path, name: str):
        self.name = name
        self._starts, self._sizes, self._lines = array("q"), array("q"), array("q")
        self._file = open(path, "rb")  # noqa: SIM115 (kept: rows are read for as long as the run lasts)
        self._stamp = self._version()
        self._index(self._file)

    @abstractmethod
    def _index(self, file: BinaryIO) -> None: ...

    @abstractmethod
    def _parse(self, text: str, index: int) -> Row: ...

    def _add(self, start: int, size: int, line: int) -> None:
        self._starts.append(start)
        self._sizes.append(size)
        self._lines.append(line)

    def _version(self) -> tuple[int, int]:
        status = os.fstat(self._file.fileno())
        return status.st_size, status.st_mtime_ns

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Row:  # type: ignore[override]
        if index >= len(self):
            raise IndexError(index)
        raw = os.pread(self._file.fileno(), self._sizes[index], self._starts[index])
        if self._version() != self._stamp:
            raise UserError(f"{self.name} was changed while it was in use; start again")
        return self._parse(_decode(raw, self.where(index)), index)

    def where(self, index: int) -> str:
        return f"{self.name} line {self._lines[index]}"


class JsonLines(_LineFile):
    """One JSON object a line; blank lines are skipped."""

    def _index(self, file: BinaryIO) -> None:
        start = 0
        for line, raw in enumerate(file, 1):
            bom = len(UTF8_BOM) if line == 1 and raw.startswith(UTF8_BOM) else 0
            if raw[bom:].strip():
                self._add(start + bom, len(raw) - bom, line)
            start += len(raw)

    def _parse(self, text: str, index: int) -> Row:
        try:
            value = json.loads(text.rstrip("\r\n"))
        except (ValueError, RecursionError) as error:
            raise UserError(f"{self.where(index)} is not valid JSON: {_json_reason(error)}") from error
        return _as_row(value, self, index)


class CsvFile(_LineFile):
    """A header line, then one row a record.

    A column is numbers (or True/False) if every cell of it is one exactly as Python writes it. Any other column stays
    text, so that '01', '1/2' and an empty cell reach the reward unchanged.
    """

    def _index(self, file: BinaryIO) -> None:
        csv.field_size_limit(2**31 - 1)
        self._header: list[str] | None = None
        self._types: list[list] = []
        lines = _CountedLines(file, self.name)
        records = csv.reader(lines, strict=True)
        start, line = 0, 1
        try:
            for record in records:
                if not self._is_blank(record):
                    self._take(record, start, lines.num_bytes - start, line)
                start, line = lines.num_bytes, records.line_num + 1
        except csv.Error as error:
            raise UserError(f"{self.name} line {line} is not valid CSV: {error}") from error

    def _is_blank(self, record: list[str]) -> bool:
        one_column = self._header is not None and len(self._header) == 1
        return not record or (len(record) == 1 and not one_column and not record[0].strip())

    def _take(self, record: list[str], start: int, size: int, line: int) -> None:
        if self._header is None:
            if len(set(record)) != len(record):
                raise UserError(f"{self.name} line {line}: the header names a column twice: {', '.join(record)}")
            self._header = record
            self._types = [[int, float, _parse_bool] for _ in record]
            return
        if len(record) != len(self._header):
            raise UserError(
                f"{self.name} line {line} has {len(record)} cells, the header has {len(self._header)} "
                f"({', '.join(self._header)})"
            )
        for types, cell in zip(self._types, record, strict=True):
            types[:] = [convert for convert in types if _is_lossless(convert, cell)]
        self._add(start, size, line)

    def _parse(self, text: str, index: int) -> Row:
        assert self._header is not None, f"{self.name} has rows but no header"
        cells = next(csv.reader([text], strict=True))
        typed = (types[0](cell) if types else cell for types, cell in zip(self._types, cells, strict=True))
        return dict(zip(self._header, typed, strict=True))


class _CountedLines:
    """The text lines of a binary file, with the number of bytes handed out so far."""

    def __init__(self, file: BinaryIO, name: str):
        self.num_bytes = 0
        self._file, self._name = file, name

    def __iter__(self) -> Iterator[str]:
        for line, raw in enumerate(self._file, 1):
            self.num_bytes += len(raw)
            yield _decode(raw.removeprefix(UTF8_BOM) if line == 1 else raw, f"{self._name} line {line}")


class JsonArray(Sequence[Row]):
    """A .json file that is one array of objects. The text is held, the objects are parsed when asked for."""

    def __init__(self, path: Path, name: str):
        self.name = name
        self._text = _decode(path.read_bytes().removeprefix(UTF8_BOM), name)
        self._decoder = json.JSONDecoder()
        self._starts = array("q")
        self._index()

    def _index(self) -> None:
        position = self._skip_space(self._skip_space(0) + 1)
        while self._text[position : position + 1] != "]" or self._starts:
            self._starts.append(position)
            position = self._skip_space(self._decode_at(position)[1])
            separator = self._text[position : position + 1]
            if separator == "]":
                break
            if separator != ",":
                raise UserError(f"{self._at(position)}: expected ',' or ']' after item {len(self)} of the array")
            position = self._skip_space(position + 1)
        rest = self._skip_space(position + 1)
        if rest < len(self._text):
            raise UserError(f"{self._at(rest)}: there is text after the end of the array")

    def _skip_space(self, position: int) -> int:
        while self._text[position : position + 1] in (" ", "\t", "\r", "\n"):
            position += 1
        return position

    def _decode_at(self, position: int) -> tuple[Any, int]:
        try:
            return self._decoder.raw_decode(self._text, position)
        except (ValueError, RecursionError) as error:
            at = self._at(error.pos if isinstance(error, json.JSONDecodeError) else position)
            raise UserError(f"{at} is not valid JSON: {_json_reason(error)}") from error

    def _at(self, position: int) -> str:
        return f"{self.name} line {self._text.count(chr(10), 0, position) + 1}"

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Row:  # type: ignore[override]
        if index >= len(self):
            raise IndexError(index)
        return _as_row(self._decode_at(self._starts[index])[0], self, index)

    def where(self, index: int) -> str:
        return f"{self._at(self._starts[index])} (item {index + 1})"


class ArrowTable:
    """Rows of a `datasets.Dataset`: Parquet, save_to_disk or hub."""

    def __init__(self, dataset: Any, name: str):
        self.name = name
        self._dataset = dataset.with_format(None)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Row:
        return self._dataset[index]

    def __iter__(self) -> Iterator[Row]:
        for batch in self._dataset.iter(batch_size=1000):
            names = list(batch)
            for values in zip(*batch.values(), strict=True):
                yield dict(zip(names, values, strict=True))

    def where(self, index: int) -> str:
        return f"{self.name} row {index + 1}"


def read_json(path: Path, name: str) -> Reader:
    """An array if the first character is '[', otherwise one object a line, whatever the file is called."""
    with open(path, "rb") as file:
        first = file.read(4096).removeprefix(UTF8_BOM).lstrip()[:1]
    return JsonArray(path, name) if first == b"[" else JsonLines(path, name)


def _as_row(value: Any, reader: Reader, index: int) -> Row:
    if not isinstance(value, dict):
        raise UserError(f"{reader.where(index)} is {describe_value(value)}, expected an object with the row's columns")
    return value


def describe_value(value: Any) -> str:
    """A value in a message: its JSON type and the start of it."""
    kinds = {dict: "an object", list: "a list", str: "text", bool: "a truth value", int: "a number", float: "a number"}
    if value is None:
        return "null"
    shown = repr(value)
    return f"{kinds.get(type(value), type(value).__name__)} ({shown if len(shown) <= 60 else shown[:57] + '...'})"


def _decode(raw: bytes, where: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{where} is not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8"
        ) from error


def _json_reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at column {error.colno}"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def _parse_bool(cell: str) -> bool:
    return {"True": True, "False": False}[cell]


def _is_lossless(convert: Any, cell: str) -> bool:
    try:
        return str(convert(cell)) == cell
    except (ValueError, KeyError):
        return False
