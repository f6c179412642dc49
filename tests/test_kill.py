"""Issue 5's kill test, with a few kills: CI has no time for a hundred."""

import sys

import pytest

from tests.launched import ROOT, launch


@pytest.mark.slow
def test_a_run_that_is_killed_and_resumed_is_the_run_that_was_not(tmp_path):
    command = [sys.executable, str(ROOT / "tests" / "kill_test.py"), "--kills", "3", "--seed", "5"]
    run = launch(command, tmp_path / "log", timeout_s=900)
    assert run.code == 0, run.out
    assert len(run.lines(": the same after ")) >= 1, run.out
