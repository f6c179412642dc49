"""What this rank is doing, and signs that it moves: for error messages, its peers and the watchdog."""

_phase, _step, _beats = "start-up", 0, 0


def enter(phase: str) -> None:
    global _phase
    _phase = phase
    beat()


def begin_step(step: int) -> None:
    global _step
    _step = step
    beat()


def beat() -> None:
    """Show that this rank makes progress. Long phases call it as they go on; it costs nothing."""
    global _beats
    _beats += 1


def beats() -> int:
    """Signs of progress so far."""
    return _beats


def in_step() -> bool:
    """Whether the first step has begun."""
    return _step > 0


def where() -> str:
    """ "start-up", or "reward of step 7"."""
    return f"{_phase} of step {_step}" if _step else _phase
