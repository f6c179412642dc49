"""The reward files in examples/, loaded as a run loads them."""

import json
import os
from pathlib import Path

import pytest

from spmdrl.rewards.function import RewardFunction
from spmdrl.rewards.source import RewardBatch, RewardError

ROOT = Path(__file__).parents[2]
REWARDS = ROOT / "examples" / "rewards"
GSM8K = Path(os.environ.get("SPMDRL_SHARED", ROOT.parent / "shared")) / "data" / "gsm8k_test.jsonl"


def rewards_of(name: str, responses: list[str], labels: list, prompt: str = "Q: ") -> list[float]:
    count = len(responses)
    function = RewardFunction(str(REWARDS / name))
    queries, ids = [prompt + r for r in responses], [f"row {i}" for i in range(count)]
    return function(RewardBatch(queries, [prompt] * count, labels, {}, ids)).rewards.tolist()


def test_gsm8k_compares_the_final_numbers():
    responses = [
        "... #### 1,200",
        "It costs $1200.00.",
        r"\boxed{1200}",
        "1200, no: 12",
        "no idea",
        "#### -1200<|im_end|>",
    ]
    assert rewards_of("gsm8k.py", responses, ["so it is\n#### 1200"] * 6) == [1, 1, 1, 0, 0, 0]


@pytest.mark.skipif(not GSM8K.is_file(), reason="needs the shared data")
def test_gsm8k_solutions_of_the_data_set_are_right_and_those_of_the_next_row_are_not():
    rows = [json.loads(line) for line in GSM8K.read_text().splitlines()]
    answers = [row["answer"] for row in rows]
    assert rewards_of("gsm8k.py", answers, answers) == [1.0] * len(rows)
    shifted = rewards_of("gsm8k.py", answers[1:] + answers[:1], answers)
    assert sum(shifted) < 0.05 * len(rows)  # a few neighbours share their number


def test_gsm8k_label_without_a_number_stops_the_run_and_names_the_row():
    with pytest.raises(RewardError, match="no number in the label 'none' on row 1"):
        rewards_of("gsm8k.py", ["1", "2"], ["1", "none"])


def test_format_wants_each_part_once_and_nothing_around_them():
    good = "<think>a\nb</think>\n<answer>1</answer>\n"
    bad = [
        "1",
        "<think></think><answer>1</answer>",
        f"x{good}",
        f"{good}y",
        good * 2,
        "<answer>1</answer><think>a</think>",
    ]
    assert rewards_of("format_reward.py", [good, *bad], [None] * 7) == [1, 0, 0, 0, 0, 0, 0]


def test_format_behind_a_prompt_that_opens_the_thought():
    assert rewards_of("format_reward.py", ["a</think><answer>1</answer>"], [None], prompt="Q<think>\n") == [1]


def test_arithmetic_pays_for_the_right_number_and_nothing_else():
    responses = [" 12", "12.\n", " 12<|im_end|>", " 13", "The answer is 12", " 12 or 13", "", " -12"]
    assert rewards_of("arithmetic.py", responses, ["12"] * 8) == [1, 1, 1, 0, 0, 0, 0, 0]


def test_math_verify_reward():
    pytest.importorskip("math_verify")
    assert rewards_of("math_verify_reward.py", [r"\boxed{\frac{3}{4}}", "0.7"], ["0.75", "0.75"]) == [1, 0]
