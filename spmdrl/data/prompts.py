"""The prompt set: rows rendered, tokenised, filtered and counted, the same on every rank."""

import hashlib
import json
import os
import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, overload

from tqdm import tqdm

from spmdrl.data.readers import Row
from spmdrl.data.rendering import TOOLS, Renderer, make_renderer
from spmdrl.data.sources import Rows, load_rows
from spmdrl.errors import UserError
from spmdrl.models.tokenizer import encode_texts

if TYPE_CHECKING:
    from spmdrl.config import EvalConfig, PromptDataConfig

BATCH_ROWS = 1000  # rows tokenised in one call
PROGRESS_ROWS = 20_000  # from so many rows on, rank 0 shows a progress bar


@dataclass(frozen=True)
class Prompt:
    """One row of the data set. Every rank, role and engine gets `prompt_ids`; text is for rewards and logs."""

    row: int  # index in the filtered data set, the same for every world size
    prompt: str  # rendered text
    prompt_ids: list[int]  # with one BOS in front where the tokenizer or its template brings one
    label: Any  # the value of --label_key, None without the flag
    columns: dict[str, Any]  # every other column of the row
    cell: Any = None  # of --input_key, unchanged: what `prompt` was rendered from


class PromptDataset(Sequence[Prompt]):
    """The prompts that passed the filters. Labels and columns are read from the source when asked for."""

    def __init__(self, rows: Rows, config: "PromptDataConfig"):
        self.num_too_long = self.num_empty = 0
        self._rows, self._config = rows, config
        self._kept = array("q")  # index in `rows` of each prompt
        self._texts: list[str] = []
        self._ids, self._ends = array("i"), array("q", [0])  # ids of all prompts, one after the other
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, index: int, row: Row, text: str, ids: list[int]) -> None:
        """Takes row `index` with its prompt, or counts why not."""
        if not text or not ids:
            self.num_empty += 1
        elif len(ids) > self._config.prompt_max_len:
            self.num_too_long += 1
        else:
            self._kept.append(index)
            self._texts.append(text)
            self._ids.extend(ids)
            self._ends.append(len(self._ids))
            self._hash.update(json.dumps([row, len(ids)], sort_keys=True, default=_stable_text).encode())
            self._hash.update(self._ids[-len(ids) :].tobytes())

    @property
    def fingerprint(self) -> str:
        """Hash of the kept rows and their ids in order: another one means another data set, template or tokenizer."""
        return self._hash.hexdigest()

    def __len__(self) -> int:
        return len(self._kept)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        keys = (self._config.input_key, self._config.label_key)
        row = self._rows[self._kept[index]]
        columns = {name: value for name, value in row.items() if name not in keys}
        label = None if self._config.label_key is None else row[self._config.label_key]
        ids = self._ids[self._ends[index] : self._ends[index + 1]].tolist()
        cell = row[self._config.input_key]
        return Prompt(row=index, prompt=self._texts[index], prompt_ids=ids, label=label, columns=columns, cell=cell)

    def source_row(self, index: int) -> Row:
        """The row that prompt `index` was made of, every column in its place."""
        return self._rows[self._kept[index]]

    def where(self, index: int) -> str:
        """How a person finds that row."""
        return self._rows.where(self._kept[index])

    def check_ids(self, vocab_size: int) -> None:
        """Raise UserError for a prompt with a token that a model of `vocab_size` tokens does not have."""
        largest = max(self._ids)
        if largest >= vocab_size:
            index = bisect_right(self._ends, self._ids.index(largest)) - 1
            raise UserError(
                f"{self._rows.where(self._kept[index])}: its prompt has token {largest}, the model of --pretrain has "
                f"{vocab_size}: the tokenizer there is of another model"
            )

    def describe(self) -> str:
        """One line: how many prompts from where, and how many were dropped and why."""
        return f"{len(self)} prompts from {self._rows.name}{self._dropped()}"

    def _dropped(self) -> str:
        reasons = []
        if self.num_too_long:
            reasons.append(f"{self.num_too_long} too long > {self._config.prompt_max_len} tokens")
        if self.num_empty:
            reasons.append(f"{self.num_empty} empty")
        return f" ({', '.join(reasons)} dropped)" if reasons else ""


def load_prompts(config: "PromptDataConfig", tokenizer: Any, *, seed: int) -> PromptDataset:
    """Reads `--prompt_data`, renders and tokenises every row, drops and counts empty and over-long prompts.

    Length is counted on the final ids: template and BOS included.
    """
    if not config.prompt_data:
        raise UserError("--prompt_data is missing: give a file, a directory or a hub name")
    rows = load_rows(
        config.prompt_data,
        config.prompt_data_probs,
        split=config.prompt_split,
        max_samples=config.max_samples,
        seed=seed,
    )
    return render_prompts(rows, config, tokenizer)


def load_eval_prompts(
    evaluation: "EvalConfig", config: "PromptDataConfig", tokenizer: Any, *, seed: int
) -> PromptDataset | None:
    """Every row of `--eval_dataset`, read as the training prompts are; None without the flag."""
    if not evaluation.eval_dataset:
        return None
    split, flag = evaluation.eval_split, "--eval_dataset"
    rows = load_rows(evaluation.eval_dataset, None, split=split, max_samples=sys.maxsize, seed=seed, flag=flag)
    return render_prompts(rows, config, tokenizer)


def render_prompts(rows: Rows, config: "PromptDataConfig", tokenizer: Any) -> PromptDataset:
    """The prompts of `rows` that are neither empty nor too long."""
    render = make_renderer(config, tokenizer)
    show_progress = os.environ.get("RANK", "0") == "0" and len(rows) >= PROGRESS_ROWS
    dataset = PromptDataset(rows, config)
    with tqdm(total=len(rows), desc="Tokenising prompts", disable=not show_progress) as bar:
        for batch in _batches(rows, BATCH_ROWS):
            texts = [_render_row(rows, index, row, config, render) for index, row in batch]
            ids = iter(encode_texts(tokenizer, [text for text in texts if text]))
            for (index, row), text in zip(batch, texts, strict=True):
                dataset.add(index, row, text, next(ids) if text else [])
            bar.update(len(batch))
    if not len(dataset):
        raise UserError(f"no prompt is left: {dataset.describe()}; see --prompt_max_len and --input_key")
    return dataset


def _batches(rows: Rows, size: int) -> Iterator[list[tuple[int, Row]]]:
    numbered = enumerate(rows)
    while batch := list(islice(numbered, size)):
        yield batch


def _render_row(rows: Rows, index: int, row: Row, config: "PromptDataConfig", render: Renderer) -> str:
    """The prompt's text; errors name file, row and column."""
    cell = rows.require(index, row, config.input_key, flag="--input_key")
    if config.label_key is not None:
        rows.require(index, row, config.label_key, flag="--label_key")
    try:
        return render(cell, row.get(TOOLS))
    except UserError as error:
        raise UserError(f"{rows.where(index)}: {config.input_key!r} (--input_key) {error}") from error


def _stable_text(value: Any) -> str:
    """For the fingerprint: a value that JSON lacks, without the memory address that some print."""
    text = repr(value)
    return type(value).__name__ if " at 0x" in text else text
