"""Reward files that cannot be imported or called, and whatever a function may return that is no reward."""

import math

import numpy
import pytest
import torch

from spmdrl.rewards.function import RewardFunction
from spmdrl.rewards.source import RewardBatch

RETURNS = {
    "None": (None, "None"),
    "one number for all": (0.5, "0.5"),
    "text": ("good", "good"),
    "a count too few": ([1.0], "1"),
    "a count too many": ([1.0, 2.0, 3.0], "3"),
    "nothing": ([], "0"),
    "NaN": ([1.0, math.nan], "row 2, sample 0"),
    "infinity": ([math.inf, 1.0], "row 1, sample 0"),
    "more than fp32": ([1e39, 1.0], "row 1, sample 0"),
    "a None among numbers": ([1.0, None], "row 2, sample 0"),
    "a text among numbers": ([1.0, "2"], "row 2, sample 0"),
    "a list among numbers": ([1.0, [2.0, 3.0]], "row 2, sample 0"),
    "complex numbers": ([1.0, 1j], "row 2, sample 0"),
    "huge whole numbers": ([1.0, 10**400], "row 2, sample 0"),
    "a matrix": (numpy.ones((2, 2)), "row 1, sample 0"),
    "a tensor of one": (torch.tensor(1.0), ""),
    "a tensor with NaN": (torch.tensor([1.0, math.nan]), "row 2, sample 0"),
    "an array of texts": (numpy.array(["a", "b"]), ""),
    "an array of objects": (numpy.array([object(), 1.0], dtype=object), "row 1, sample 0"),
    "a set": ({1.0, 2.0}, ""),
    "a generator": ((x for x in (1.0, 2.0)), ""),
    "a function": (len, ""),
    "an empty dict": ({}, "'rewards'"),
    "a dict without rewards": ({"scores": [1, 2]}, "'rewards'"),
    "a dict with more": ({"rewards": [1, 2], "reward": [1, 2]}, "'rewards'"),
    "rewards that are None": ({"rewards": None}, "None"),
    "scores of another count": ({"rewards": [1, 2], "scores": [1]}, "scores"),
    "scores that are NaN": ({"rewards": [1, 2], "scores": [1, math.nan]}, "row 2, sample 0"),
    "logs that are a list": ({"rewards": [1, 2], "extra_logs": [1]}, "extra_logs"),
    "logs of another count": ({"rewards": [1, 2], "extra_logs": {"a": [1, 2, 3]}}, "a"),
    "logs that are text": ({"rewards": [1, 2], "extra_logs": {"a": "x"}}, "a"),
}
FILES = {
    "def reward_func(:": "line 1: invalid syntax",
    "def reward_func(queries, prompts, labels):\nreturn 1": "line 2: expected an indented block",
    "import nosuchmodule": "ModuleNotFoundError: No module named 'nosuchmodule'",
    "1 / 0": "ZeroDivisionError: division by zero",
    "raise SystemExit(3)": "SystemExit",
    "import r": "defines no reward_func",
    "x = 1": "defines no reward_func; no function",
    "def other(queries, prompts, labels): ...": "it defines other: choose with --reward_func ",
    "reward_func = 3": "reward_func in {path} is a int, not a function",
    "class reward_func: ...": "reward_func in {path} is a class, not a function",
    "def reward_func(): ...": "takes (); it is called with (queries, prompts, labels, **columns)",
    "def reward_func(prompts, queries, labels): ...": "takes (prompts, queries, labels); it is called with",
    "def reward_func(completions, **kwargs): ...": "takes (completions, **kwargs); it is called with",
    "def reward_func(queries, prompts): ...": "takes (queries, prompts); it is called with",
}
BATCH = RewardBatch(
    queries=["p a", "p b"],
    prompts=["p ", "p "],
    labels=["a", "b"],
    columns={},
    sample_ids=["row 1, sample 0", "row 2, sample 0"],
)


@pytest.mark.parametrize("text", FILES, ids=lambda text: text[:30])
def test_files(tmp_path, line_of, text):
    path = tmp_path / "r.py"
    path.write_text(text + "\n")
    said = line_of(RewardFunction, str(path))
    assert FILES[text].format(path=path) in said
    assert str(path) in said


@pytest.mark.parametrize("content", [b"\xff\xfe", b"\0", b"x = '\xe9'\n"], ids=["utf-16", "nul", "latin-1"])
def test_files_that_are_no_text(tmp_path, line_of, content):
    (tmp_path / "r.py").write_bytes(content)
    assert f"reward file {tmp_path / 'r.py'}" in line_of(RewardFunction, str(tmp_path / "r.py"))


@pytest.fixture
def function(tmp_path):
    (tmp_path / "r.py").write_text("def reward_func(queries, prompts, labels): ...\n")
    return RewardFunction(str(tmp_path / "r.py"))


@pytest.mark.parametrize("name", RETURNS)
def test_returns(function, line_of, name):
    value, line = RETURNS[name]
    function.function = lambda *lists: value
    said = line_of(function, BATCH)
    assert function.where in said
    assert line in said


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (KeyError("x"), "raised KeyError: 'x' on row 1, sample 0"),
        (SystemExit(2), "raised SystemExit: 2 on row 1, sample 0"),
        (RecursionError(), "raised RecursionError on row 1, sample 0"),
        (StopIteration(), "raised StopIteration on row 1, sample 0"),
    ],
)
def test_errors(function, line_of, error, line):
    def raises(*lists):
        raise error

    function.function = raises
    assert line in line_of(function, BATCH)
