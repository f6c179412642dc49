import pytest

from spmdrl.config.registry import Registry, dict_of_strings

SOURCE = """
import torch_is_not_imported

def ppo(log_probs, *, eps_clip=0.2): ...
def mine(log_probs, *, sharpness, eps_clip=0.2): ...

LOSSES: dict[str, object] = {
    "ppo": ppo,
    "mine": partial(mine, sharpness=2),
    "lambda": lambda x: x,
}
ESTIMATORS = {"gae": Estimator(None, whiten=True, needs_critic=True), "rloo": Estimator(loo, min_samples=2)}
REASONS = {"ppo": "because", "mine": "one " "string"}
"""


@pytest.fixture
def table(tmp_path, monkeypatch):
    (tmp_path / "algos.py").write_text(SOURCE)
    monkeypatch.setattr("spmdrl.config.registry.ALGOS", tmp_path)
    return lambda name, **rest: Registry("algos.py", name, **rest)


def test_choices_are_the_keys_in_order(table):
    assert table("LOSSES").choices() == ("ppo", "mine", "lambda")
    assert table("ESTIMATORS", extra=("auto",)).choices() == ("auto", "gae", "rloo")


def test_properties_are_the_constant_keywords_of_an_entry(table):
    assert table("ESTIMATORS").properties("gae") == {"whiten": True, "needs_critic": True}
    assert table("ESTIMATORS").properties("rloo") == {"min_samples": 2}
    assert table("LOSSES").properties("ppo") == {}


def test_parameters_are_the_keyword_only_ones_of_the_function(table):
    assert table("LOSSES").parameters("ppo") == {"eps_clip"}
    assert table("LOSSES").parameters("mine") == {"sharpness", "eps_clip"}
    assert table("LOSSES").parameters("lambda") == set()


def test_a_table_of_texts(table, tmp_path):
    assert dict_of_strings(tmp_path / "algos.py", "REASONS") == {"ppo": "because", "mine": "one string"}


def test_a_missing_table_is_named(table):
    with pytest.raises(AssertionError, match=r"algos\.py has no table KL"):
        table("KL").choices()
