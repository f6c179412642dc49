"""Against the record of OpenRLHF's flags, and against what docs/migration.md says about them."""

import ast
import os
import re
from pathlib import Path

import pytest

from spmdrl.config import PPOConfig
from spmdrl.config.chat import ChatConfig
from spmdrl.config.flags import flags_of
from spmdrl.config.foreign import ACCEPTED_ALIASES, NOT_YET, OTHER_NAMES, REFUSED
from spmdrl.config.generate import GenerateConfig
from spmdrl.config.serve import ServeRMConfig
from spmdrl.config.supervised import DPOConfig, KDConfig, KTOConfig, RMConfig, SFTConfig
from tests.config.conftest import ROOT

SHARED = Path(os.environ.get("SPMDRL_SHARED", ROOT.parent / "shared"))
RECORD = SHARED / "openrlhf_flags.md"
DOCS = (ROOT / "docs" / "migration.md").read_text()
FLAGS = flags_of(PPOConfig)
LAUNCHER_FLAGS = {"nproc_per_node", "nnodes", "num_gpus", "module"}
KINDS = {"flag": bool, "int": int, "float": float, "str": str}


def recorded_flags():
    """(name, type, default, choices) of each flag of train_ppo.py and of its Ray twin."""
    if not RECORD.exists():
        return []
    tables = RECORD.read_text().partition("## train_sft.py")[0]
    rows = re.findall(r"^\| `--(\w+)` \| (.*?) \| (.*?) \| (.*?) ?\|$", tables, flags=re.M)
    return [pytest.param(*row, id=row[0]) for row in rows]


def changed_defaults():
    table = DOCS.partition("### Changed defaults")[2].partition("\n\n`--advantage_estimator`")[0]
    return set(re.findall(r"^\| `--(\w+)` \|", table, flags=re.M))


@pytest.mark.skipif(not RECORD.exists(), reason="no record of OpenRLHF's flags beside the repository")
def test_the_record_is_complete():
    assert len(recorded_flags()) == 88 + 25


@pytest.mark.parametrize(("name", "kind", "default", "choices"), recorded_flags())
def test_each_flag_of_openrlhf_is_taken_as_it_was_or_refused_by_name(name, kind, default, choices):
    assert sum(name in table for table in (FLAGS, NOT_YET, REFUSED, ACCEPTED_ALIASES)) == 1
    if name not in FLAGS:
        return
    flag = FLAGS[name]
    kind, _, count = kind.partition(" × ")
    assert flag.kind is KINDS[kind]
    assert flag.num_values == (None if count == "'*'" else int(count or 1))
    assert set(ast.literal_eval(choices or "[]")) <= set(flag.choices)
    if name not in changed_defaults():
        assert flag.default in (ast.literal_eval(default), (ast.literal_eval(default),))


@pytest.mark.skipif(not RECORD.exists(), reason="no record of OpenRLHF's flags beside the repository")
def test_nothing_else_is_refused_by_name():
    assert set(NOT_YET) | set(REFUSED) | set(ACCEPTED_ALIASES) <= {row.id for row in recorded_flags()}


def test_every_flag_in_the_migration_page_exists():
    named = set(re.findall(r"--(\w+)", DOCS))
    known = {*FLAGS, *NOT_YET, *REFUSED, *ACCEPTED_ALIASES, *LAUNCHER_FLAGS, "config", "help"}
    for cls in (SFTConfig, RMConfig, DPOConfig, KTOConfig, KDConfig, ServeRMConfig, GenerateConfig, ChatConfig):
        known |= {*flags_of(cls), *cls.foreign.not_yet, *cls.foreign.refused, *cls.foreign.other_names}
    switches = {f"no_{flag.name}" for flag in FLAGS.values() if flag.kind is bool}
    assert named <= known | switches, named - known - switches


def test_every_refused_flag_is_in_the_migration_page():
    named = set(re.findall(r"--(\w+)", DOCS))
    assert set(NOT_YET) | set(REFUSED) <= named
    assert set(OTHER_NAMES) <= set(re.findall(r"`(\w+)`", DOCS))


def test_values_that_the_page_names_are_choices():
    for name in ("advantage_estimator", "policy_loss", "loss_aggregation"):
        for row in re.findall(rf"\| `--{name}` ((?:`[\w-]+`[,;] )*`[\w-]+`) \|", DOCS):
            assert set(re.findall(r"`([\w-]+)`", row)) <= set(FLAGS[name].choices), row
