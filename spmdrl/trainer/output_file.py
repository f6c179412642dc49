"""A file of JSON lines that appears once it is whole, by a program that may be stopped anywhere and started again."""

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import date, time
from pathlib import Path
from typing import Any

from spmdrl.config.generate import unfinished
from spmdrl.config.resume import compare
from spmdrl.data.readers import Row
from spmdrl.distributed import comm, guard
from spmdrl.distributed.preemption import Preempted
from spmdrl.errors import UserError, first_line
from spmdrl.tracking import Progress, make_bar


@dataclass
class Result:
    """What came of one prompt."""

    lines: list[str]  # of the file, each a row in JSON
    rewards: list[float]  # of all its responses; none without a source of rewards
    kept_rewards: list[float]  # of those in `lines`
    num_truncated: int  # responses


@dataclass
class Tally:
    """Of all results."""

    num_prompts: int = 0
    num_left_out: int = 0  # prompts without a line
    num_lines: int = 0
    num_truncated: int = 0
    num_rewards: int = 0
    sum_rewards: float = 0.0
    num_kept_rewards: int = 0
    sum_kept_rewards: float = 0.0

    def add(self, result: Result) -> None:
        self.num_prompts += 1
        self.num_left_out += not result.lines
        self.num_lines += len(result.lines)
        self.num_truncated += result.num_truncated
        self.num_rewards += len(result.rewards)
        self.sum_rewards += sum(result.rewards)
        self.num_kept_rewards += len(result.kept_rewards)
        self.sum_kept_rewards += sum(result.kept_rewards)


class OutputFile:
    """Collects the results of rounds in PATH.partial and makes PATH of them. Every rank calls every method.

    The partial file has a line that describes the run, then one for each round: a list of results. What a killed
    process left of a round is dropped, since a round is the smallest part that comes out the same when it is done
    again: the reward model's micro-batches are those of a round.
    """

    def __init__(self, path: Path, description: dict[str, Any], *, num_prompts: int):
        """Raises UserError where the partial file is that of another run, or of one that is still going."""
        self.path, self.partial, self.num_prompts = path, unfinished(path), num_prompts
        with self._writing():
            mine = self._open(description) if comm.is_main() else (0, 0)
        self.num_rounds, done = comm.all_gather_object(mine)[0]  # that are there already
        self._progress = Progress(make_bar("generate", num_prompts) if comm.is_main() else None)
        self._progress.update(done)

    def _open(self, description: dict[str, Any]) -> tuple[int, int]:
        """Rounds and prompts that are there already."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.partial.open("a+b")
        with suppress(OSError):  # a file system without locks
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"--output_path {self.path}: another run is writing it") from None
        self._file.seek(0)
        end = num_lines = num_done = 0
        for line in self._file:
            if not line.endswith(b"\n"):
                break
            if num_lines == 0:
                self._check(line, description)
            else:
                num_done += len(json.loads(line))
            end, num_lines = end + len(line), num_lines + 1
        self._file.truncate(end)
        if num_lines == 0:
            self._append(description)
        if self.path.exists() and num_done < self.num_prompts:
            raise UserError(f"--output_path {self.path} is there already: remove it, or give another")
        return max(num_lines - 1, 0), num_done

    def _check(self, line: bytes, description: dict[str, Any]) -> None:
        start_over = f"start with the same flags, give another --output_path, or remove {self.partial} to start over"
        try:
            saved = json.loads(line)
            refused, accepted = compare(saved, json.loads(json.dumps(description)))
        except (ValueError, TypeError, KeyError):
            raise UserError(f"{self.partial} is none of this program's: remove it, or change --output_path") from None
        if refused:
            raise UserError(
                f"{self.partial} is of a run that was stopped, with other flags: {'; '.join(refused)}: {start_over}"
            )
        for change in accepted:
            comm.say(f"resuming with {change}")

    def add(self, results: Sequence[Result]) -> None:
        """Keep the results of one round, this rank's share; shares in rank order are in the order of the prompts."""
        shares = comm.all_gather_object(list(results))
        round_of_all = [result for share in shares for result in share]
        if comm.is_main():
            with self._writing():
                self._append([asdict(result) for result in round_of_all])
        self._progress.update(len(round_of_all))

    def _append(self, value: Any) -> None:
        self._file.write(json.dumps(value).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def finish(self) -> Tally:
        """Make the file of all rounds; the main rank's tally counts them."""
        tally = Tally()
        if comm.is_main():
            with self._writing():
                self._finish(tally)
        self._progress.close()
        comm.barrier()
        return tally

    def _finish(self, tally: Tally) -> None:
        made = self.path.with_name(self.path.name + ".new")
        self._file.seek(0)
        next(self._file)
        with made.open("wb") as file:
            for line in self._file:
                for result in (Result(**fields) for fields in json.loads(line)):
                    tally.add(result)
                    file.writelines(encode_line(row) for row in result.lines)
            file.flush()
            os.fsync(file.fileno())
        made.replace(self.path)
        self.partial.unlink()
        self._file.close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = error.strerror or first_line(error)
            raise UserError(f"--output_path {self.path}: cannot write: {reason}; finished rounds are kept") from error

    @contextmanager
    def kept_when_stopped(self) -> Iterator[None]:
        """If the run is asked to stop in this block, it says where it goes on."""
        try:
            yield
        except Preempted as stopped:
            guard.set_phase("save")
            stopped.saved_in, stopped.resume = str(self.partial), "start the same command again"
            raise


def to_json(row: Row) -> str:
    """A row on one line. Raises TypeError for a value that JSON has no form for."""
    return json.dumps(row, ensure_ascii=False, default=_as_text)


def encode_line(line: str) -> bytes:
    """Half of a surrogate pair, which UTF-8 cannot hold, is written as its JSON escape."""
    return line.encode("utf-8", errors="backslashreplace") + b"\n"


def _as_text(value: Any) -> str:
    if isinstance(value, (date, time)):
        return value.isoformat()
    raise TypeError(type(value).__name__)
