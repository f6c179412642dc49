"""math-verify behind a time limit that holds in any thread."""

import subprocess
import sys
import threading
import time

import pytest

from spmdrl.errors import UserError
from spmdrl.rewards.maths import MathVerifier

pytest.importorskip("math_verify")


@pytest.fixture(scope="module")
def verifier():
    verifier = MathVerifier(timeout_s=20.0)  # a busy machine needs seconds for a first sympy expression
    yield verifier
    verifier.close()


@pytest.mark.parametrize(
    ("label", "response", "expected"),
    [
        (r"\frac{1}{2}", r"It is $\boxed{0.5}$", True),
        ("#### 72", r"\boxed{72}", True),
        ("72", "The answer is 73.", False),
        ("$x^2+1$", "$1+x^2$", True),
        ("3", "no idea", False),
    ],
)
def test_equal_by_value_not_by_spelling(verifier, label, response, expected):
    assert verifier.equal(label, response) is expected


@pytest.mark.parametrize(("label", "complaint"), [("", "no expression in the label ''"), (None, "--label_key")])
def test_label_without_mathematics_is_an_error(verifier, label, complaint):
    with pytest.raises(ValueError, match=complaint):
        verifier.equal(label, "3")


def test_works_outside_the_main_thread(verifier):
    results = []
    thread = threading.Thread(target=lambda: results.append(verifier.equal("2", "2")))
    thread.start()
    thread.join(60)
    assert results == [True]


@pytest.fixture
def short_of_time():
    verifier = MathVerifier(timeout_s=2.0)
    yield verifier
    verifier.close()


def test_huge_power_ends_in_time_and_the_next_comparison_works(short_of_time):
    verifier = short_of_time
    start = time.monotonic()
    assert verifier.equal("5", r"\boxed{10^{10^{10}}}") is None
    assert time.monotonic() - start < 10
    assert verifier.equal("5", "5") is True


def test_child_ends_by_itself_when_its_parent_is_gone_in_the_middle_of_a_comparison():
    command = [sys.executable, "-m", "spmdrl.rewards.maths", "1.0"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    child.communicate('["5", "\\\\boxed{10^{10^{10}}}"]\n', timeout=60)
    assert child.returncode == -14  # SIGALRM


def test_absence_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install math-verify"):
        MathVerifier()
