"""Plain texts for a language-model loss beside the policy's: an endless stream in an order that the seed decides."""

import hashlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from spmdrl.data.readers import Row, describe_value
from spmdrl.data.sources import Rows, load_rows
from spmdrl.errors import UserError
from spmdrl.experience import Sample, make_sample
from spmdrl.models.tokenizer import encode_texts

if TYPE_CHECKING:
    from spmdrl.config import PPOConfig

NUM_HASHED = 1000  # rows for the fingerprint


class TextStream:
    """Rows of text, pass after pass, each pass a fresh permutation; tokenised when they are taken.

    Every rank takes the same texts at the same time, so the position is the whole state.
    """

    def __init__(self, rows: Rows, key: str, tokenizer: Any, *, max_len: int, seed: int, flag: str = "--pretrain_key"):
        self.rows, self.key, self.tokenizer, self.flag = rows, key, tokenizer, flag
        self.max_len, self.seed = max_len, seed
        self.position = 0  # rows read
        self._pass, self._order = -1, np.empty(0)
        self._text(0, rows[0])  # a wrong column shows before the first step

    def take(self, count: int) -> list[Sample]:
        """The next `count` texts of two tokens or more; every token after the first is one to learn.

        A text ends in EOS, unless that lies beyond `max_len`, where it is cut.
        """
        samples: list[Sample] = []
        num_short = 0  # in a row
        while len(samples) < count:
            indices = list(self._next(count - len(samples)))
            encoded = encode_texts(self.tokenizer, [self._text(i, self.rows[i]) for i in indices])
            for index, ids in zip(indices, encoded, strict=True):
                ids = self._ended(ids)[: self.max_len]
                num_short = num_short + 1 if len(ids) < 2 else 0
                if len(ids) >= 2:
                    samples.append(_to_sample(index, ids))
            if num_short >= len(self.rows):
                raise UserError(f"{self.rows.name}: no {self.key!r} ({self.flag}) has two tokens or more")
        return samples

    @property
    def fingerprint(self) -> str:
        """Hash of rows from all over the set: another one means another set."""
        step = max(len(self.rows) // NUM_HASHED, 1)
        rows = [self.rows[i] for i in range(0, len(self.rows), step)]
        return hashlib.blake2b(repr((len(self.rows), self.key, rows)).encode(), digest_size=16).hexdigest()

    def describe(self) -> str:
        """One line: how many texts from where."""
        return f"{len(self.rows)} texts from {self.rows.name}, column {self.key!r}"

    def _next(self, count: int) -> Iterator[int]:
        for _ in range(count):
            number, place = divmod(self.position, len(self.rows))
            self.position += 1
            yield int(self._permutation(number)[place])

    def _permutation(self, number: int) -> np.ndarray:
        if self._pass != number:
            self._order = np.random.default_rng([self.seed % 2**64, number]).permutation(len(self.rows))
            self._pass = number
        return self._order

    def _ended(self, ids: list[int]) -> list[int]:
        eos = self.tokenizer.eos_token_id
        return ids if not ids or eos is None or ids[-1] == eos else [*ids, eos]

    def _text(self, index: int, row: Row) -> str:
        text = self.rows.require(index, row, self.key, flag=self.flag)
        if not isinstance(text, str):
            where = self.rows.where(index)
            raise UserError(f"{where}: {self.key!r} ({self.flag}) is {describe_value(text)}, expected text")
        return text

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position, "seed": self.seed, "num_rows": len(self.rows)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes on at a saved position; refuses a state whose order of texts was another one."""
        for name, now in (("seed", self.seed), ("num_rows", len(self.rows))):
            if state[name] != now:
                raise UserError(
                    f"the checkpoint's texts of {self.rows.name} had {name} {state[name]}, now it is {now}"
                )
        self.position = state["position"]


def load_texts(config: "PPOConfig", tokenizer: Any) -> TextStream | None:
    """The texts of `--pretrain_data`; None without the flag."""
    ptx = config.ptx
    if ptx.pretrain_data is None:
        return None
    rows = load_rows(
        ptx.pretrain_data,
        ptx.pretrain_data_probs,
        split=ptx.pretrain_split,
        max_samples=sys.maxsize,
        seed=config.seed,
        flag="--pretrain_data",
    )
    key, flag = (ptx.pretrain_key, "--pretrain_key") if ptx.pretrain_key else (config.data.input_key, "--input_key")
    return TextStream(rows, key, tokenizer, max_len=config.max_total_len, seed=config.seed, flag=flag)


def _to_sample(row: int, ids: list[int]) -> Sample:
    zeros = [0.0] * (len(ids) - 1)
    return make_sample(ids[:1], ids[1:], zeros, finish_reason="stop", group_id=0, index=0, row=row)
