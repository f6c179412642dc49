"""The contract of reward functions: what they get, what they may return, and how they fail."""

import textwrap
import threading
import traceback

import pytest
import torch

from spmdrl.errors import UserError
from spmdrl.rewards.function import RewardFunction
from spmdrl.rewards.source import RewardBatch, RewardError

QUERIES, PROMPTS, LABELS = ["p1 a", "p2 b", "p3 c"], ["p1 ", "p2 ", "p3 "], ["A", 2, {"x": None}]
IDS = ["row 5, sample 0", "row 5, sample 1", "row 9, sample 0"]
COLUMNS = {"level": [1, 2, 3], "source": ["s", "t", None]}


@pytest.fixture
def load(tmp_path):
    """Write a reward file and load it: `load(source, "name")`."""

    def load(source: str, name: str | None = None) -> RewardFunction:
        path = tmp_path / "reward.py"
        path.write_text("import numpy as np\nimport torch\n" + textwrap.dedent(source))
        return RewardFunction(f"{path}:{name}" if name else str(path))

    return load


def rewards_of(function: RewardFunction) -> list[float]:
    output = function(RewardBatch(QUERIES, PROMPTS, LABELS, COLUMNS, IDS))
    assert output.rewards.dtype == torch.float32
    assert output.rewards.shape == (3,)
    return output.rewards.tolist()


def returning(load, expression: str) -> RewardFunction:
    return load(f"def reward_func(queries, prompts, labels):\n    return {expression}\n")


# ---- what it gets ---------------------------------------------------------------------------------------------------
def test_openrlhf_form_gets_texts_and_the_labels_original_values(load):
    function = load(
        "seen = []\ndef reward_func(queries, prompts, labels):\n    seen.append((queries, prompts, labels))\n"
        "    return [float(len(q)) for q in queries]"
    )
    assert rewards_of(function) == [4.0, 4.0, 4.0]
    assert function.function.__globals__["seen"] == [(QUERIES, PROMPTS, LABELS)]


def test_only_the_columns_it_names_are_passed(load):
    function = load("def reward_func(queries, prompts, labels, level):\n    return level")
    assert rewards_of(function) == [1.0, 2.0, 3.0]


def test_kwargs_get_every_column(load):
    function = load(
        "def reward_func(queries, prompts, labels, **kw):\n    assert set(kw) == {'level', 'source'}, kw\n"
        "    return kw['level']"
    )
    assert rewards_of(function) == [1.0, 2.0, 3.0]


def test_a_column_called_like_an_argument_does_not_replace_it(load):
    function = load(
        "def reward_func(queries, prompts, labels, **kw):\n    assert not kw, kw\n    return [len(p) for p in prompts]"
    )
    assert function(RewardBatch(QUERIES, PROMPTS, LABELS, {"prompts": [0, 0, 0]}, IDS)).rewards.tolist() == [
        3.0,
        3.0,
        3.0,
    ]


def test_parameter_names_of_the_three_are_free_and_defaults_stand_in_for_absent_columns(load):
    function = load("def reward_func(q, p, l, weight=0.5):\n    return [weight] * len(q)")
    assert rewards_of(function) == [0.5, 0.5, 0.5]


def test_a_needed_column_that_the_data_lacks_is_named_with_those_there_are(load):
    function = load("def reward_func(queries, prompts, labels, *, difficulty):\n    return difficulty")
    with pytest.raises(UserError, match=r"takes 'difficulty'.*columns it can take: level, source"):
        function.check_columns(["level", "source"])
    with pytest.raises(UserError, match="'difficulty'"):
        rewards_of(function)


def test_what_an_async_function_keeps_is_of_the_same_loop_in_the_next_call(load):
    """A client with open connections is: in another loop it would fail with "Event loop is closed"."""
    function = load(
        """
        import asyncio
        kept = []
        async def reward_func(queries, prompts, labels):
            kept.append(asyncio.get_running_loop())
            return [float(loop is kept[0] and not loop.is_closed()) for loop in kept[-1:] * 3]
        """
    )
    assert rewards_of(function) == rewards_of(function) == [1.0, 1.0, 1.0]


def test_async_function_is_awaited(load):
    function = load(
        "import asyncio\nasync def reward_func(q, p, l):\n    await asyncio.sleep(0)\n    return [1, 2, 3]"
    )
    assert rewards_of(function) == [1.0, 2.0, 3.0]


def test_mutating_its_arguments_does_no_harm(load):
    function = load(
        "def reward_func(queries, prompts, labels):\n    queries.pop(); labels.clear()\n    return [0, 0, 0]"
    )
    labels = list(LABELS)
    function(RewardBatch(list(QUERIES), PROMPTS, labels, {}, IDS))
    assert labels == LABELS


def test_no_samples_is_no_call(load):
    function = load("def reward_func(queries, prompts, labels):\n    raise AssertionError")
    assert function(RewardBatch([], [], [], {}, [])).rewards.shape == (0,)


# ---- what it may return ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "expression",
    [
        "[1, 0, 0.5]",
        "(1.0, False, 0.5)",
        "np.array([1, 0, 0.5], dtype=np.float16)",
        "[np.float64(1), np.int32(0), np.float32(0.5)]",
        "torch.tensor([1, 0, 0.5], dtype=torch.bfloat16, requires_grad=True)",
        "torch.tensor([[1], [0], [0.5]])",
        "torch.tensor([[1, 0, 0.5]])",
        "[torch.tensor(1.0), torch.tensor(0), torch.tensor([0.5])]",
    ],
)
def test_one_number_a_sample_in_any_container(load, expression):
    assert rewards_of(returning(load, expression)) == [1.0, 0.0, 0.5]


@pytest.mark.parametrize(
    "expression", ["[True, False, True]", "np.array([1, 0, 1])", "torch.tensor([True, False, True])"]
)
def test_bools_and_ints_are_numbers(load, expression):
    assert rewards_of(returning(load, expression)) == [1.0, 0.0, 1.0]


def test_dict_with_scores_and_logs(load):
    function = returning(
        load,
        "{'rewards': [1, 2, 3], 'scores': np.array([0, 1, 1]),"
        " 'extra_logs': {'length': torch.tensor([4, 5, 6]), 'mean': 2.5}}",
    )
    output = function(RewardBatch(QUERIES, PROMPTS, LABELS, {}, IDS))
    assert output.rewards.tolist() == [1.0, 2.0, 3.0]
    assert output.scores is not None
    assert output.scores.tolist() == [0.0, 1.0, 1.0]
    logs = {name: values.tolist() for name, values in output.extra_logs.items()}
    assert logs == {"length": [4.0, 5.0, 6.0], "mean": [2.5, 2.5, 2.5]}


@pytest.mark.parametrize(
    ("expression", "complaint"),
    [
        ("[1, 0]", "returned 2 numbers for 3 samples"),
        ("[1.0]", "returned 1 numbers for 3 samples"),  # never spread over the batch
        ("torch.tensor([1.0])", "returned 1 numbers for 3 samples"),
        ("1", r"returned 1 \(int\) for 3 samples"),
        ("True", r"returned True \(bool\)"),
        ("torch.tensor(1.0)", r"returned 1.0 \(Tensor\)"),
        ("None", r"returned None \(NoneType\)"),
        ("'1 0 1'", r"returned '1 0 1' \(str\)"),
        ("{1, 2, 3}", r"returned \{1, 2, 3\} \(set\)"),
        ("(r for r in [1, 2, 3])", r"\(generator\) for 3 samples"),
        ("torch.zeros(3, 2)", r"returned \[0.0, 0.0\] for row 5, sample 0, not a number"),
        ("[1, None, 0]", "returned None for row 5, sample 1, not a number"),
        ("[1, 0, '1']", "returned '1' for row 9, sample 0, not a number"),
        ("[1, 0, 1j]", "returned 1j for row 9, sample 0"),
        ("[1, float('nan'), 0]", "returned nan for row 5, sample 1, not a finite"),
        ("np.array([1, 0, -np.inf])", "returned -inf for row 9, sample 0"),
        ("[1e39, 0, 0]", "returned 1e[+]39 for row 5, sample 0"),  # infinite in fp32
        ("[10**400, 0, 0]", "for row 5, sample 0, not a finite"),
        ("{'reward': [1, 2, 3]}", "returned a dict with 'reward'; it may have 'rewards'"),
        ("{'rewards': [1, 2, 3], 'score': [1, 2, 3]}", "'score'; it may have"),
        ("{'rewards': [1, 2]}", "'rewards' returned 2 numbers"),
        ("{'rewards': [1, 2, 3], 'scores': [1, 2, None]}", "'scores' returned None for row 9"),
        ("{'rewards': [1, 2, 3], 'extra_logs': {'x': [1, 2]}}", r"extra_logs\['x'\] returned 2 numbers"),
        ("{'rewards': [1, 2, 3], 'extra_logs': [1, 2, 3]}", "extra_logs of type list"),
    ],
)
def test_anything_else_is_an_error_that_names_function_file_and_sample(load, expression, complaint):
    with pytest.raises(RewardError, match=complaint) as error:
        rewards_of(returning(load, expression))
    assert "reward_func in " in str(error.value)
    assert "reward.py" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_single_sample_needs_a_list_too(load):
    """What works for one sample must work for more."""
    with pytest.raises(RewardError, match="for 1 samples"):
        returning(load, "0.5")(RewardBatch(["a"], [""], [None], {}, ["row 1"]))
    assert returning(load, "[[0.5]]")(RewardBatch(["a"], [""], [None], {}, ["row 1"])).rewards.tolist() == [0.5]


# ---- how it fails ---------------------------------------------------------------------------------------------------
def test_exception_names_the_sample_and_keeps_the_users_traceback(load):
    function = load(
        "def reward_func(queries, prompts, labels):\n    return [grade(l) for l in labels]\n\n"
        "def grade(label):\n    return 1 / len(label)"
    )
    with pytest.raises(
        RewardError, match=r"reward_func in .*reward.py raised TypeError: .* on row 5, sample 1"
    ) as error:
        rewards_of(function)
    assert error.value.show_cause
    assert "in grade" in "".join(traceback.format_exception(error.value.__cause__))


def test_exception_without_label_key_says_that_there_are_no_labels(load):
    function = load("def reward_func(queries, prompts, labels):\n    return [len(label) for label in labels]")
    with pytest.raises(RewardError, match=r"on row 1; all labels are None, as without --label_key$"):
        function(RewardBatch(["a"], [""], [None], {}, ["row 1"]))
    with pytest.raises(RewardError, match=r"on row 1$"):
        function(RewardBatch(["a"], [""], [1], {}, ["row 1"]))


def test_exception_that_no_sample_raises_alone_names_the_call(load):
    function = load(
        "def reward_func(queries, prompts, labels):\n    assert len(queries) < 3\n    return [0] * len(queries)"
    )
    with pytest.raises(RewardError, match="AssertionError on one of 3 samples, row 5, sample 0 to row 9, sample 0"):
        rewards_of(function)


def test_exit_inside_it_does_not_end_a_rank_quietly(load):
    function = load("def reward_func(queries, prompts, labels):\n    exit(0)")
    with pytest.raises(RewardError, match="SystemExit"):
        rewards_of(function)


# ---- loading --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("where", ["in the file", "in a call"])
def test_what_it_sets_for_all_of_torch_is_so_in_its_calls_alone(load, monkeypatch, where):
    monkeypatch.setattr("spmdrl.rewards.function._theirs", [])
    calls = "set_grad_enabled(False)", "set_default_dtype(torch.float64)", "set_default_device('meta')"
    settings = "; ".join(f"torch.{call}" for call in calls)
    read = "torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_default_device().type"
    score = load(
        f"""
        import torch
        first = True
        {settings if where == "in the file" else "pass"}

        def reward_func(queries, prompts, labels):
            global first
            if first and {where == "in a call"}:
                {settings}
            assert ({read}) == (False, torch.float64, "meta")
            first = False
            return [0.0] * len(queries)
        """
    )
    before = torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_default_device()
    for _ in range(2):
        assert rewards_of(score) == [0.0, 0.0, 0.0]
        assert (torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_default_device()) == before


def test_another_name_is_chosen_behind_the_colon(load):
    function = load(
        "def reward_func(*a):\n    return 0\n\ndef strict(queries, prompts, labels):\n    return [7, 8, 9]", "strict"
    )
    assert rewards_of(function) == [7.0, 8.0, 9.0]


@pytest.mark.parametrize(
    ("source", "name", "complaint"),
    [
        ("def score(q, p, l): ...\ndef helper(): ...", None, "defines no reward_func; it defines score, helper"),
        ("x = 1", "grade", "defines no grade; no function"),
        ("reward_func = 3", None, "is a int, not a function"),
        ("class reward_func: ...", None, "is a class, not a function"),
        ("def reward_func(q, p, l:\n    pass", None, r"reward.py, line 3: "),
        ("import nowhere_to_be_found", None, "failed: ModuleNotFoundError: No module named 'nowhere_to_be_found'"),
        ("raise SystemExit('no')", None, "failed: SystemExit: no"),
        ("def reward_func(queries, prompts): ...", None, r"called with \(queries, prompts, labels, \*\*columns\)"),
        ("def reward_func(prompts, completions, **kw): ...", None, "it is called with"),  # TRL's order
        ("def reward_func(completions, answer, **kw): ...", None, "it is called with"),
        ("def reward_func(prompts, queries, labels): ...", None, "it is called with"),
    ],
)
def test_what_cannot_be_called_is_refused_when_loaded(load, source, name, complaint):
    with pytest.raises(UserError, match=complaint):
        load(source, name)


@pytest.mark.parametrize("spec", ["http://localhost:5000/get", "reward", "reward.py:", ":f", ""])
def test_spec_must_name_a_python_file(spec):
    with pytest.raises(UserError, match=r"give path.py"):
        RewardFunction(spec)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"nothing.py: no such file"):
        RewardFunction(f"{tmp_path}/nothing.py")


def test_files_beside_it_can_be_imported_and_two_files_of_one_name_stay_apart(tmp_path):
    for folder, value in (("a", 1), ("b", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"sibling_{folder}.py").write_text(f"VALUE = {value}\n")
        (tmp_path / folder / "reward.py").write_text(
            f"from sibling_{folder} import VALUE\ndef reward_func(q, p, l):\n    return [VALUE] * len(q)\n"
        )
    functions = [RewardFunction(f"{tmp_path}/{folder}/reward.py") for folder in "ab"]
    assert [rewards_of(f) for f in functions] == [[1.0] * 3, [2.0] * 3]


def test_a_file_beside_it_does_not_hide_an_installed_module_later(load, tmp_path):
    (tmp_path / "colorsys.py").write_text("raise RuntimeError('imported instead of the standard library')\n")
    function = load(
        "def reward_func(q, p, l):\n    import colorsys\n    return [colorsys.rgb_to_yiq(1, 1, 1)[0]] * len(q)"
    )
    assert rewards_of(function) == [1.0, 1.0, 1.0]


def test_a_failure_as_the_run_is_asked_to_stop_is_none(load, monkeypatch):
    """The signal has ended the function's helper processes too. A safe point follows: nothing sees the zeros."""
    from spmdrl.distributed import preemption

    function = load("def reward_func(queries, prompts, labels):\n    raise BrokenPipeError('the pool is gone')")
    flag = threading.Event()
    monkeypatch.setattr(preemption, "_asked", flag)
    with pytest.raises(RewardError, match="the pool is gone"):
        rewards_of(function)
    flag.set()
    assert rewards_of(function) == [0.0, 0.0, 0.0]
