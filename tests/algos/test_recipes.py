"""Every recipe of docs/algorithms.md is a valid command line, and the tables there are the tables of the code."""

import re

import pytest

from spmdrl.algos import advantages, corrections, kl, losses
from spmdrl.config import PPOConfig
from spmdrl.config.checks import check_flags
from spmdrl.config.parse import read_config
from tests.algos.recipes import DOC, RECIPES

BASE = ["--pretrain", "model", "--prompt_data", "prompts.jsonl", "--remote_rm_url", "reward.py"]
NAMES = ["PPO", "REINFORCE++", "REINFORCE++-baseline", "RLOO", "GRPO", "Dr. GRPO", "DAPO", "GSPO", "CISPO"]


def test_the_page_has_the_recipes_it_promises():
    assert list(RECIPES) == NAMES


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_accepted_by_the_command_line(name):
    config = read_config(PPOConfig, BASE + RECIPES[name])
    check_flags(config)
    aggregation = losses.AGGREGATION_OF.get(config.algo.policy_loss)
    assert aggregation is None or config.algo.loss_aggregation in ("auto", aggregation)


@pytest.mark.parametrize(
    "table",
    [
        advantages.ESTIMATORS,
        losses.POLICY_LOSSES,
        losses.AGGREGATIONS,
        kl.KL_ESTIMATORS,
        corrections.CORRECTIONS,
    ],
)
def test_the_page_lists_rows_that_exist(table):
    """Not that it lists all of them: a new row is one entry in one file."""
    listed = [set(cell.split(", ")) for cell in re.findall(r"\| ([\w, -]+) \|$", DOC.read_text(), re.M)]
    assert any(len(names & set(table)) > 2 and names <= set(table) for names in listed), listed
