"""What this rank is doing, and signs that it moves: for error messages, its peers and the watchdog."""

_phase, _step, _steps_begun, _beats = "start-up", 0, 0, 0


def enter(phase: str) -> None:
    global _phase
    _phase = phase
    beat()


def begin_step(step: int) -> None:
    global _step, _steps_begun
    _step = step
    _steps_begun += 1
    beat()


def beat() -> None:
    """Show that this rank makes progress. Long phases call it as they go on; it costs nothing."""
    global _beats
    _beats += 1


def beats() -> int:
    """Signs of progress so far."""
    return _beats


def steps_begun() -> int:
    """Steps that have begun in this process."""
    return _steps_begun


def where() -> str:
    """ "start-up", or "reward of step 7"."""
    return f"{_phase} of step {_step}" if _step else _phase
