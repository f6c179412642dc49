"""All programs: their flags against the record of OpenRLHF's scripts, and against what is said of them elsewhere."""

import ast
import re

import pytest

from spmdrl.config import PPOConfig
from spmdrl.config.chat import ChatConfig
from spmdrl.config.flags import flags_of
from spmdrl.config.foreign import ACCEPTED_ALIASES
from spmdrl.config.generate import GenerateConfig
from spmdrl.config.help import field_docs
from spmdrl.config.merge import MergeLoraConfig
from spmdrl.config.parse import foreign_of
from spmdrl.config.serve import ServeRMConfig
from spmdrl.config.supervised import DPOConfig, KDConfig, KTOConfig, RMConfig, SFTConfig
from tests.config.conftest import ROOT
from tests.config.test_migration import DOCS, LAUNCHER_FLAGS, RECORD

PROGRAMS = {
    "train_ppo": PPOConfig,
    "train_sft": SFTConfig,
    "train_rm": RMConfig,
    "train_dpo": DPOConfig,
    "train_kto": KTOConfig,
    "train_kd": KDConfig,
    "generate": GenerateConfig,
    "chat": ChatConfig,
    "serve_rm": ServeRMConfig,
    "merge_lora": MergeLoraConfig,
}
# The record's other sections than train_ppo.py's: OpenRLHF's script, and how many flags are written there.
SCRIPTS = {
    "train_sft": ("train_sft", 21),
    "train_rm": ("train_rm", 20),
    "train_dpo": ("train_dpo", 22),
    "train_kto": ("train_kto", 18),
    "train_kd": ("train_kd", 18),
    "generate": ("batch_inference", 25),
    "chat": ("interactive_chat", 9),
    "serve_rm": ("serve_rm", 4),
    "merge_lora": ("lora_combiner", 4),
}
# Defaults that differ from OpenRLHF's, with the reason in docs/migration.md.
CHANGED = {
    **{program: {"wandb_project"} for program in ("train_sft", "train_rm", "train_dpo", "train_kd")},
    "train_kto": {"wandb_project", "dataset", "pretrain"},
    "generate": {"value_head_prefix", "rollout_batch_size", "post_processor"},
    "chat": {"max_len", "repetition_penalty", "input_template"},
    "serve_rm": {"host", "batch_size", "max_len"},
}
# Of spmdrl/config: they turn flags into what the programs ask for.
READERS = {"sizes.py", "ppo.py", "generate.py", "supervised.py"}
READ = {
    word
    for path in (ROOT / "spmdrl").rglob("*.py")
    if path.parent.name != "config" or path.name in READERS
    for line in path.read_text().splitlines()
    for word in re.findall(r"\w+", re.sub(r"^    \w+: ", "", line))  # but for declarations of fields
}
BY_CLASS = pytest.mark.parametrize("cls", PROGRAMS.values(), ids=PROGRAMS)


def recorded(program):
    """Flag name → default of OpenRLHF's script, beyond those that it shares with train_ppo.py unchanged."""
    script, count = SCRIPTS[program]
    section = re.search(rf"^## {script}\.py.*?\n(.*?)(?=^## |\Z)", RECORD.read_text(), flags=re.M | re.S)
    assert section is not None
    own, _, other = section[1].partition("Other defaults:")
    flags = re.findall(r"`--(\w+)` \w+ = ((?:'[^']*')|[^,\s]+)", own) + re.findall(
        r"`--(\w+)` ('[^']*'|\S+?)(?:,|$)", other, flags=re.M
    )
    assert len(flags) == count
    return {name: None if "(" in default else ast.literal_eval(default) for name, default in flags}


@pytest.mark.skipif(not RECORD.exists(), reason="no record of OpenRLHF's flags beside the repository")
@pytest.mark.parametrize("program", SCRIPTS)
def test_each_flag_of_openrlhfs_script_is_taken_as_it_was_or_refused_by_name(program):
    cls = PROGRAMS[program]
    flags, foreign = flags_of(cls), foreign_of(cls)
    for name, default in recorded(program).items():
        tables = (flags, foreign.not_yet, foreign.refused, foreign.other_names, ACCEPTED_ALIASES)
        assert sum(name in table for table in tables) == 1, name
        if name in flags and name not in CHANGED.get(program, ()):
            assert flags[name].default == default, name


@BY_CLASS
def test_what_is_named_instead_exists_and_what_is_refused_does_not(cls):
    flags, foreign = set(flags_of(cls)), foreign_of(cls)
    for reason in (*foreign.not_yet.values(), *foreign.refused.values()):
        assert set(re.findall(r"--(\w+)", reason)) <= flags | LAUNCHER_FLAGS, reason
    assert set(foreign.other_names.values()) <= flags
    assert not flags & {*foreign.not_yet, *foreign.refused, *foreign.other_names}


def test_an_alias_stands_for_a_flag():
    assert {target for target, _ in ACCEPTED_ALIASES.values()} <= set(flags_of(PPOConfig))


@pytest.mark.parametrize("program", ["generate", "chat", "serve_rm", "train_sft"])
def test_the_migration_page_names_what_differs(program):
    foreign = foreign_of(PROGRAMS[program])
    named = {*foreign.not_yet, *foreign.refused, *CHANGED[program]}
    named |= set(foreign.other_names) if program in ("generate", "chat") else set()
    assert not [name for name in named if f"`--{name}`" not in DOCS and f"`{name}`" not in DOCS]


@BY_CLASS
def test_every_flag_is_explained_and_read_by_some_code(cls):
    """A flag that is only declared and checked would be accepted and change nothing."""
    assert not [name for name in flags_of(cls) if name not in READ]
    docs = {}
    for section in {cls, *(type(value) for value in vars(cls()).values() if hasattr(value, "__dataclass_fields__"))}:
        docs |= field_docs(section)
    assert set(flags_of(cls)) <= set(docs)
