"""Supervised sets: rows rendered, tokenised, filtered and counted, the same on every rank.

A row is one sequence or a pair of them that share a forward: the two sides of a preference pair, or a response and
another row's response to the same prompt.
"""

import hashlib
import json
import math
import os
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from tqdm import tqdm

from spmdrl.algos.losses import BatchCounts
from spmdrl.config.splits import with_splits
from spmdrl.config.supervised import DatasetConfig, LabelledDataConfig, PairDataConfig, TextDataConfig
from spmdrl.data.conversations import (
    ChatTemplate,
    TextTemplate,
    common_beginning,
    plain_text,
    repeats,
    response_messages,
)
from spmdrl.data.readers import Row, describe_value
from spmdrl.data.rendering import TOOLS, Message, is_blank, to_messages
from spmdrl.data.sources import NoSplit, Rows, load_rows
from spmdrl.errors import UserError
from spmdrl.experience import Sample
from spmdrl.models.tokenizer import Encoded, Marked, encode_marked

BATCH_ROWS = 1000  # rows tokenised in one call
PROGRESS_ROWS = 20_000  # from so many rows on, rank 0 shows a progress bar
EMPTY, EQUAL, TOO_LONG = "empty", "with two equal responses", "without room for a response"
LABELS = {"true": 1.0, "false": 0.0}  # that are text
REPEATING_ROWS = 10  # fewer may begin with their prompts by chance
MAX_SHIFT = 100  # rows after a row that are looked at for another prompt's response


@dataclass(frozen=True)
class RowAt:
    """A row with its place, for errors that name file, row and column."""

    rows: Rows
    index: int
    row: Row

    def cell(self, key: str, flag: str) -> Any:
        return self.rows.require(self.index, self.row, key, flag=flag)

    def unexpected(self, key: str, flag: str, cell: Any, wanted: str) -> UserError:
        where = f"{self.rows.where(self.index)}: {key!r} ({flag})"
        return UserError(f"{where} is {describe_value(cell)}, expected {wanted}")

    @contextmanager
    def naming(self, key: str, flag: str) -> Iterator[None]:
        """Put the place in front of what is wrong with the cell."""
        try:
            yield
        except UserError as error:
            raise UserError(f"{self.rows.where(self.index)}: {key!r} ({flag}) {error}") from error


@dataclass(frozen=True)
class Rendered:
    """The sequences of one row, and the numbers that its loss reads."""

    texts: list[Marked]
    targets: dict[str, float]
    must_differ: bool = False  # or there is nothing to learn from them
    repeats_prompt: bool = False  # at the beginning of what is learned, though it stands in front of that


# A row's sequences, or why it is left out.
RowRenderer = Callable[[RowAt], Rendered | str]


class TextRows:
    """One sequence a row: a plain text, a prompt with its response, or a conversation."""

    def __init__(self, config: TextDataConfig, shape: TextTemplate | ChatTemplate):
        self.config, self.shape = config, shape

    def __call__(self, at: RowAt) -> Rendered | str:
        config, key = self.config, (self.config.input_key, "--input_key")
        cell = at.cell(*key)
        if config.output_key is not None and not config.pretrain_mode:
            return exchange(at, self.shape, key, (config.output_key, "--output_key"))
        with at.naming(*key):
            if isinstance(self.shape, ChatTemplate):
                return self._conversation(self.shape, to_messages(cell), at.row.get(TOOLS))
            text = plain_text(cell)
            return _row([Marked(text, ((0, len(text)),))]) if text.strip() else EMPTY

    def _conversation(self, chat: ChatTemplate, messages: list[Message], tools: Any) -> Rendered | str:
        if _is_empty(messages):
            return EMPTY
        check_ends_with_response(messages)
        first = 1 if self.config.multiturn else len(messages) - 1
        return _row([chat.conversation(messages, first=first, tools=tools)])


def check_ends_with_response(messages: list[Message]) -> None:
    if messages[-1]["role"] != "assistant":
        raise UserError(
            "does not end with an assistant turn, which is what is learned; name a response in a column of its own "
            "with --output_key"
        )


def exchange(
    at: RowAt, shape: TextTemplate | ChatTemplate, prompt: tuple[str, str], response: tuple[str, str]
) -> Rendered | str:
    """The sequence of a prompt and a response column, each given as (key, flag)."""
    prompt_cell, response_cell = at.cell(*prompt), at.cell(*response)
    if isinstance(shape, TextTemplate):
        with at.naming(*prompt):
            text = shape.prompt(prompt_cell)
        with at.naming(*response):
            answer = plain_text(response_cell)
        if not (prompt_cell.strip() and answer.strip()):
            return EMPTY
        return Rendered([shape.joined(text, answer)], {}, repeats_prompt=repeats(answer, prompt_cell, text))
    with at.naming(*prompt):
        messages = to_messages(prompt_cell)
    with at.naming(*response):
        answers = response_messages(response_cell, messages)
        if _is_empty(messages) or _is_empty(answers):
            return EMPTY
        marked = shape.conversation(messages + answers, first=len(messages), tools=at.row.get(TOOLS))
        return Rendered([marked], {}, repeats_prompt=repeats(response_cell, messages[-1]["content"]))


class PairRows:
    """Two sequences a row: the chosen and the rejected response to a prompt."""

    def __init__(self, config: PairDataConfig, shape: TextTemplate | ChatTemplate, *, with_margin: bool):
        self.config, self.shape, self.with_margin = config, shape, with_margin

    def __call__(self, at: RowAt) -> Rendered | str:
        sides = self._conversations(at) if isinstance(self.shape, ChatTemplate) else self._texts(at)
        if isinstance(sides, str):
            return sides
        targets = {"margin": self._margin(at)} if self.with_margin else {}
        return Rendered(sides, targets, must_differ=True, repeats_prompt=self._repeats_prompt(at))

    def _keys(self) -> tuple[tuple[str, str], tuple[str, str]]:
        return (self.config.chosen_key, "--chosen_key"), (self.config.rejected_key, "--rejected_key")

    def _repeats_prompt(self, at: RowAt) -> bool:
        if self.config.prompt_key is None:
            return False
        prompt = at.row[self.config.prompt_key]
        if isinstance(self.shape, ChatTemplate):
            prompts = [to_messages(prompt)[-1]["content"]]
        else:
            prompts = [prompt, self.shape.prompt(prompt)]
        return all(repeats(at.row[key], *prompts) for key, _ in self._keys())

    def _conversations(self, at: RowAt) -> list[Marked] | str:
        assert isinstance(self.shape, ChatTemplate)
        key = self.config.prompt_key
        prompt: list[Message] = []
        if key is not None:
            cell = at.cell(key, "--prompt_key")
            with at.naming(key, "--prompt_key"):
                prompt = to_messages(cell)
        whole = []
        for column in self._keys():
            cell = at.cell(*column)
            with at.naming(*column):
                answers = response_messages(cell, prompt)
                if _is_empty(answers):
                    return EMPTY
                if not prompt and len(answers) == 1:
                    raise UserError("has no prompt in front of it: name the prompt's column with --prompt_key")
                whole.append(prompt + answers)
        if whole[0] == whole[1]:
            return EQUAL
        first = min(common_beginning(*whole), len(whole[0]) - 1, len(whole[1]) - 1)
        if key is not None and _is_empty(prompt):
            return EMPTY
        out = []
        for column, messages in zip(self._keys(), whole, strict=True):
            with at.naming(*column):
                out.append(self.shape.conversation(messages, first=first, tools=at.row.get(TOOLS)))
        return out

    def _texts(self, at: RowAt) -> list[Marked] | str:
        assert isinstance(self.shape, TextTemplate)
        key, prompt, is_blank_prompt = self.config.prompt_key, "", False
        if key is not None:
            cell = at.cell(key, "--prompt_key")
            with at.naming(key, "--prompt_key"):
                prompt = self.shape.prompt(cell)
            is_blank_prompt = not cell.strip()
        answers = []
        for column in self._keys():
            cell = at.cell(*column)
            with at.naming(*column):
                if isinstance(cell, list):
                    raise UserError("is a list of messages: add --apply_chat_template")
                answers.append(plain_text(cell))
        if is_blank_prompt or not all(answer.strip() for answer in answers):
            return EMPTY
        if answers[0] == answers[1]:
            return EQUAL
        if key is not None:
            return [self.shape.joined(prompt, answer) for answer in answers]
        start = _word_start(answers[0], common_beginning(*answers))
        return [Marked(answer, ((start, len(answer)),)) for answer in answers]

    def _margin(self, at: RowAt) -> float:
        margin = _number(cell := at.cell("margin", "--margin_loss"))
        if margin is None:
            raise at.unexpected("margin", "--margin_loss", cell, "a number")
        return margin


class LabelledRows:
    """Two sequences a row: a response with its label, and the response of a row with another prompt, for the KL."""

    def __init__(self, config: LabelledDataConfig, shape: TextTemplate | ChatTemplate):
        self.config, self.shape = config, shape

    def __call__(self, at: RowAt) -> Rendered | str:
        own = self._sequence(at, at.row)
        label = self._label(at)
        if isinstance(own, str):
            return own
        other = self._mismatched(at)
        return Rendered([*own.texts, *other.texts], {"label": label}, repeats_prompt=own.repeats_prompt)

    def _label(self, at: RowAt) -> float:
        key = (self.config.label_key, "--label_key")
        cell = at.cell(*key)
        label = LABELS.get(cell.strip().lower()) if isinstance(cell, str) else None
        label = _number(cell) if label is None else label
        if label not in (0, 1):
            raise at.unexpected(*key, cell, "true or false, 1 or 0")
        return label

    def _sequence(self, at: RowAt, row: Row) -> Rendered | str:
        config, key = self.config, (self.config.input_key, "--input_key")
        at = RowAt(at.rows, at.index, row)
        if config.output_key is not None:
            return exchange(at, self.shape, key, (config.output_key, "--output_key"))
        cell = at.cell(*key)
        with at.naming(*key):
            if not isinstance(self.shape, ChatTemplate):
                raise UserError("holds the prompt alone: name the response's column with --output_key")
            messages = to_messages(cell)
            if _is_empty(messages):
                return EMPTY
            check_ends_with_response(messages)
            return _row([self.shape.conversation(messages, first=len(messages) - 1, tools=at.row.get(TOOLS))])

    def _mismatched(self, at: RowAt) -> Rendered:
        """This row's prompt with the response of the next row that has another one; its own where there is none."""
        for shift in range(1, min(MAX_SHIFT, len(at.rows))):
            other = at.rows[(at.index + shift) % len(at.rows)]
            try:
                if self._prompt_of(other) == self._prompt_of(at.row):
                    continue
                sequence = self._sequence(at, self._with_response_of(at.row, other))
            except (UserError, KeyError):  # what is wrong with the other row is said when its own turn comes
                continue
            if isinstance(sequence, Rendered):
                return sequence
        own = self._sequence(at, at.row)
        assert isinstance(own, Rendered)
        return own

    def _prompt_of(self, row: Row) -> Any:
        cell = row[self.config.input_key]
        return cell if self.config.output_key is not None else to_messages(cell)[:-1]

    def _with_response_of(self, row: Row, other: Row) -> Row:
        key, output = self.config.input_key, self.config.output_key
        if output is not None:
            return {**row, output: other[output]}
        return {**row, key: [*to_messages(row[key])[:-1], *to_messages(other[key])[-1:]]}


def _row(texts: list[Marked]) -> Rendered:
    return Rendered(texts, {})


def _is_empty(messages: list[Message]) -> bool:
    return not messages or is_blank(messages[-1])


def _number(cell: Any) -> float | None:
    """A finite number, also one that is spelled, as cells of CSV are; None for anything else."""
    try:
        number = float(cell) if isinstance(cell, int | float | str) else math.nan
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _word_start(text: str, place: int) -> int:
    """The last place up to `place` at which a word begins, the space in front of it included."""
    return max(0, *(text.rfind(space, 0, place) for space in (" ", "\n")))


class SupervisedSet:
    """The rows that passed the filters, as token ids with a mask of what is learned; `group_size` sequences a row."""

    def __init__(self, rows: Rows, *, group_size: int, max_len: int):
        self.group_size, self.max_len = group_size, max_len
        self.num_cut = 0  # sequences
        self.dropped: Counter[str] = Counter()
        self.targets: dict[str, array] = {}  # by name, one number a sequence
        self._rows = rows
        self._ids, self._mask, self._ends = array("i"), array("b"), array("q", [0])
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, sequences: Sequence[Encoded], targets: dict[str, float]) -> None:
        for sequence in sequences:
            ids, mask = array("i", sequence.ids), array("b", sequence.mask)
            self._ids.extend(ids)
            self._mask.extend(mask)
            self._ends.append(len(self._ids))
            for name, value in targets.items():
                self.targets.setdefault(name, array("d")).append(value)
            self._hash.update(json.dumps([len(ids), targets]).encode() + ids.tobytes() + mask.tobytes())

    def __len__(self) -> int:
        return self.num_sequences // self.group_size

    @property
    def num_sequences(self) -> int:
        return len(self._ends) - 1

    @property
    def fingerprint(self) -> str:
        """Hash of ids, masks and targets in order: another one means another data set, template or tokenizer."""
        return self._hash.hexdigest()

    @property
    def counts(self) -> BatchCounts:
        """Of the whole set, as one step."""
        unpredicted = sum(self._mask[start] for start in self._ends[:-1])  # nothing stands in front of a first token
        num_learned = sum(self._mask) - unpredicted
        return BatchCounts(num_tokens=num_learned, num_sequences=self.num_sequences)

    def samples(self, rows: Sequence[int]) -> list[Sample]:
        """`group_size` samples for each row."""
        return [self._sample(row, index) for row in rows for index in range(self.group_size)]

    def _sample(self, row: int, index: int) -> Sample:
        number = row * self.group_size + index
        start, end = self._ends[number], self._ends[number + 1]
        mask = torch.tensor(self._mask[start + 1 : end], dtype=torch.bool)
        return Sample(
            sequence=torch.tensor(self._ids[start:end], dtype=torch.int64),
            action_mask=mask,
            rollout_log_probs=torch.zeros(len(mask)),  # nothing was sampled
            finish_reason="stop",
            group_id=row,
            index=index,
            row=row,
            targets={name: values[number] for name, values in self.targets.items()},
        )

    def describe(self) -> str:
        """One line: how many rows from where, and how many were dropped or cut and why."""
        reasons = [f"{count} {reason}" for reason, count in sorted(self.dropped.items())]
        dropped = f" ({', '.join(reasons)} dropped)" if reasons else ""
        cut = f"; {self.num_cut} of {self.num_sequences} sequences cut at --max_len {self.max_len}"
        return f"{len(self)} row{'s' * (len(self) != 1)} from {self._rows.name}{dropped}{cut if self.num_cut else ''}"


def build_set(
    rows: Rows, render: RowRenderer, config: DatasetConfig, tokenizer: Any, *, group_size: int, end_ids: Sequence[int]
) -> SupervisedSet:
    """Renders and tokenises every row; drops and counts those that have nothing to learn."""
    out = SupervisedSet(rows, group_size=group_size, max_len=config.max_len)
    show_progress = os.environ.get("RANK", "0") == "0" and len(rows) >= PROGRESS_ROWS
    num_rendered, repeating = 0, array("q")  # indices of rows
    with tqdm(total=len(rows), desc="Tokenising rows", disable=not show_progress) as bar:
        for batch in _batches(rows, BATCH_ROWS):
            rendered = [render(RowAt(rows, index, row)) for index, row in batch]
            kept = [row for row in rendered if isinstance(row, Rendered)]
            num_rendered += len(kept)
            repeating.extend(i for (i, _), row in zip(batch, rendered, strict=True) if _repeats_prompt(row))
            out.dropped.update(row for row in rendered if isinstance(row, str))
            encoded = iter(encode_marked(tokenizer, [text for row in kept for text in row.texts]))
            for row in kept:
                ended = [_ended(next(encoded), tokenizer.eos_token_id, end_ids) for _ in row.texts]
                sequences = [_cut(sequence, config.max_len, tokenizer.eos_token_id) for sequence in ended]
                if not all(any(sequence.mask[1:]) for sequence in sequences):
                    out.dropped[TOO_LONG if any(len(s.ids) > config.max_len for s in ended) else EMPTY] += 1
                elif row.must_differ and sequences[0].ids == sequences[1].ids:
                    out.dropped[EQUAL] += 1
                else:
                    out.add(sequences, row.targets)
                    out.num_cut += sum(len(sequence.ids) > config.max_len for sequence in ended)
            bar.update(len(batch))
    if len(repeating) >= max(REPEATING_ROWS, 0.9 * num_rendered):
        raise UserError(_repetition(rows, repeating, num_rendered, config))
    if not len(out):
        raise UserError(f"no row is left: {out.describe()}; see --max_len and the key flags")
    return out


def _repeats_prompt(row: Rendered | str) -> bool:
    return isinstance(row, Rendered) and row.repeats_prompt


def _repetition(rows: Rows, repeating: Sequence[int], num_rows: int, config: DatasetConfig) -> str:
    is_pair = isinstance(config, PairDataConfig) and not config.apply_chat_template
    remedy = ", or leave --prompt_key out: what both sides begin with is their prompt then" if is_pair else ""
    if config.apply_chat_template:
        remedy = "; if they are to say it again, give them as lists of messages"
    return (
        f"{rows.where(repeating[0])}: the response begins with its prompt, and so it is in {len(repeating)} of "
        f"{num_rows} rows: the prompt would come twice. Cut it off from the responses{remedy}"
    )


def _batches(rows: Rows, size: int) -> Iterator[list[tuple[int, Row]]]:
    numbered = enumerate(rows)
    while batch := list(islice(numbered, size)):
        yield batch


def _ended(sequence: Encoded, eos: int | None, end_ids: Sequence[int]) -> Encoded:
    """The sequence with an EOS at its end, learned, unless it ends in one already."""
    if eos is None or not sequence.ids or sequence.ids[-1] in end_ids or not sequence.mask[-1]:
        return sequence
    return Encoded([*sequence.ids, eos], [*sequence.mask, True])


def _cut(sequence: Encoded, max_len: int, eos: int | None) -> Encoded:
    """At most `max_len` tokens. A cut sequence still ends in EOS, where scores are read, but does not learn it: its
    text went on."""
    if len(sequence.ids) <= max_len:
        return sequence
    if eos is None:
        return Encoded(sequence.ids[:max_len], sequence.mask[:max_len])
    return Encoded([*sequence.ids[: max_len - 1], eos], [*sequence.mask[: max_len - 1], False])


def make_shape(config: DatasetConfig, tokenizer: Any, end_ids: Sequence[int]) -> TextTemplate | ChatTemplate:
    if config.apply_chat_template:
        return ChatTemplate(tokenizer, tokenizer.convert_ids_to_tokens(list(end_ids)))
    return TextTemplate(config.input_template)


def load_train_rows(config: DatasetConfig, *, seed: int) -> Rows:
    return load_rows(
        str(config.dataset),
        config.dataset_probs,
        split=config.train_split,
        max_samples=config.max_samples,
        seed=seed,
        flag="--dataset",
    )


def load_eval_rows(config: DatasetConfig, *, seed: int) -> Rows | None:
    """Of --eval_dataset, or of --eval_split of the sources of --dataset that have splits, since the others are trained
    on whole; None where there is neither."""
    options: dict[str, Any] = {"split": config.eval_split, "max_samples": config.max_samples, "seed": seed}
    if config.eval_dataset is not None:
        return load_rows(config.eval_dataset, None, flag="--eval_dataset", **options)
    if not (spec := with_splits(str(config.dataset))):
        return None
    try:
        return load_rows(spec, None, flag="--dataset", **options)
    except NoSplit:
        if config.eval_split != DatasetConfig.eval_split:
            raise
        return None
