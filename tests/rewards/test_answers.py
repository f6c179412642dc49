"""Finding numbers and answers in text."""

from decimal import Decimal

import pytest

from spmdrl.rewards.answers import final_number, last_boxed, numbers_in, required_number, responses


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("7 + 5 = 12.", [7, 5, 12]),
        ("10-5", [10, 5]),
        ("(5)-3", [5, 3]),
        ("x = -5", [-5]),
        ("from −7 to 3", [-7, 3]),
        ("$1,234.50 or -$5 or $-5", ["1234.50", -5, -5]),
        (r"\$3 and 1{,}000", [3, 1000]),
        ("1,2,3", [1, 2, 3]),
        ("50% of .5", [50, "0.5"]),
        ("version v2 of 3.14.15", ["3.14"]),
        ("none", []),
    ],
)
def test_numbers_as_a_reader_sees_them(text, expected):
    assert numbers_in(text) == [Decimal(x) for x in expected]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("He has 3 left.\n#### 42", 42),
        ("#### 7\nno: #### 1,000 dollars, of 2,000", 1000),
        (r"so 5, \boxed{-42} after 3 steps", -42),
        (r"\boxed{1}, rather \boxed{x = \$2.50}", "2.5"),
        ("It is 12 of 20%.", 20),
        ("#### unknown, but 3 before", 3),
    ],
)
def test_final_number(text, expected):
    assert final_number(text) == Decimal(expected)


@pytest.mark.parametrize("text", ["", "no number", "5 so far #### none", r"1 \boxed{\frac{1}{2}}", r"2 \boxed{}"])
def test_no_final_number(text):
    assert final_number(text) is None


def test_boxed_keeps_inner_braces_and_ignores_one_that_is_cut_off():
    assert last_boxed(r"\boxed{1} and \boxed{\frac{1}{2}} end") == r"\frac{1}{2}"
    assert last_boxed(r"\boxed{\frac{1}{2}") is None
    assert last_boxed("none") is None


def test_label_without_a_number_is_an_error():
    assert required_number(72) == required_number("text #### 72") == 72
    with pytest.raises(ValueError, match="no number in the label 'none'"):
        required_number("none")


def test_response_is_the_query_without_prompt_and_end_tokens():
    assert responses(["Q: 1? A 2<|im_end|>\n<|endoftext|>", "Qx</s>"], ["Q: 1? ", "Q"]) == ["A 2", "x"]
    with pytest.raises(ValueError, match="does not begin with its prompt"):
        responses(["abc"], ["b"])
