"""What may change when a run is resumed."""

import pytest

from spmdrl.config import PPOConfig, to_flat_dict
from spmdrl.config.flags import flags_of
from spmdrl.config.generate import GenerateConfig
from spmdrl.config.resume import HARMLESS, LENGTHS, UNMENTIONED, compare
from spmdrl.config.supervised import DPOConfig, KDConfig, KTOConfig, RMConfig, SFTConfig

CONFIGS = (PPOConfig, SFTConfig, RMConfig, DPOConfig, KTOConfig, KDConfig, GenerateConfig)


def described(contents=None, program="PPOConfig", **flags):
    return {"program": program, "flags": to_flat_dict(PPOConfig()) | flags, "contents": contents or {}}


def test_every_name_is_a_flag():
    known = {name for config in CONFIGS for name in flags_of(config)}
    assert known >= HARMLESS | LENGTHS | UNMENTIONED


def test_the_same_run_has_no_changes():
    assert compare(described(), described()) == ([], [])


def test_a_change_is_refused_unless_it_is_known_to_be_harmless():
    refused, accepted = compare(described(), described(temperature=0.5, zero_stage=3, stop=["a", "b"]))
    assert refused == ["--temperature 1.0 -> 0.5", "--stop none -> a b"]
    assert accepted == ["--zero_stage 2 -> 3"]


def test_what_has_a_fingerprint_may_move_and_may_not_change():
    saved = described({"pretrain": "1", "prompt_data": "2"}, pretrain="a", prompt_data="b")
    moved = described({"pretrain": "1", "prompt_data": "2"}, pretrain="c", prompt_data="d")
    assert compare(saved, moved) == ([], [])
    changed = described({"pretrain": "1", "prompt_data": "3"}, pretrain="a", prompt_data="b")
    assert compare(saved, changed) == (["--prompt_data has other contents"], [])
    without = described({"prompt_data": "2"}, pretrain="http", prompt_data="b")
    assert compare(saved, without) == (["--pretrain a -> http"], [])


@pytest.mark.parametrize(("schedule", "is_refused"), [("constant", False), ("linear", True), ("cosine", True)])
def test_more_episodes_need_a_schedule_without_an_end(schedule, is_refused):
    changes = compare(described(lr_scheduler=schedule), described(lr_scheduler=schedule, num_episodes=3))
    assert changes[0 if is_refused else 1] == ["--num_episodes 1 -> 3"]


def test_flags_that_only_one_side_knows_are_of_another_version():
    saved = described()
    del saved["flags"]["temperature"]
    saved["flags"]["bygone"] = 1
    assert compare(saved, described(temperature=0.5)) == ([], [])


def test_another_programs_checkpoint_is_refused():
    refused, _ = compare(described(program="SFTConfig"), described())
    assert refused == ["it is of another program, whose flags are a SFTConfig"]
