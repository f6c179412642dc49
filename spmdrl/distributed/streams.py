"""What a run prints may be lost; the run may not: where a log's disk is full, or `tee` has ended before it."""

import sys
from contextlib import suppress
from typing import Any


def survive_lost_readers() -> None:
    """From now on stdout and stderr take what they cannot write for written."""
    sys.stdout, sys.stderr = _Lossy(sys.stdout), _Lossy(sys.stderr)


class _Lossy:
    def __init__(self, stream: Any):
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except (OSError, ValueError):  # ValueError: it has been closed
            return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
