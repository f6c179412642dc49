"""A short soak, and that its judgement sees growth. The long one: python tests/soak.py --steps 300."""

import sys

import pytest

from tests.launched import ROOT, launch
from tests.soak import Reading, growth


def readings(count, **changes):
    """Steps of a run that holds the same all the time, but for what `changes` make of it by step."""
    base = {"rss_mb": 500.0, "num_files": 17, "num_threads": 13, "num_checkpoints": 2, "seconds": 0.3}
    base["cpu_seconds"] = 0.3
    return [Reading(**base | {name: change(step) for name, change in changes.items()}) for step in range(count)]


def test_nothing_has_grown_in_a_run_that_stays_as_it_is():
    assert growth(readings(300))[1] == []


def test_growth_in_the_first_half_is_start_up():
    assert (
        growth(readings(300, rss_mb=lambda step: 500 + min(step, 140), num_threads=lambda step: min(step, 99)))[1]
        == []
    )


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("rss_mb", lambda step: 500 + 0.2 * step),  # 24 MB from step 165 to 285; 20 are allowed
        ("num_files", lambda step: 17 + step // 50),
        ("num_threads", lambda step: 13 + step // 50),
        ("num_checkpoints", lambda step: step // 10),
        ("cpu_seconds", lambda step: 0.3 + step / 300),
        ("seconds", lambda step: 0.3 if step < 200 else 1.5),
    ],
)
def test_growth_of_each_quantity_is_seen(name, change):
    assert growth(readings(300, **{name: change}))[1] == [name]


def test_a_few_slow_steps_are_no_growth():
    assert growth(readings(300, seconds=lambda step: 9.0 if step % 2 else 0.3))[1] == []


@pytest.mark.slow
def test_forty_steps_with_saving_evaluation_and_logging_grow_nothing(tmp_path):
    run = launch([sys.executable, str(ROOT / "tests" / "soak.py"), "--steps", "40"], tmp_path / "log")
    assert run.code == 0, run.out
    assert run.lines("soak: result: steps 40, grown nothing")
