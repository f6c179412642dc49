"""What cli/merge_lora.py looks for before anything loads."""

import json

import pytest

from spmdrl.config.merge import MergeLoraConfig
from spmdrl.config.parse import read_config
from spmdrl.errors import UserError


@pytest.fixture
def folders(tmp_path):
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    for folder in (base, adapter):
        folder.mkdir()
    (base / "config.json").write_text("{}")
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
    return base, adapter


def validate(**flags):
    read_config(
        MergeLoraConfig, [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    ).validate(1)


def test_neither_base_nor_adapter_is_overwritten(tmp_path, folders):
    base, adapter = folders
    (tmp_path / "link").symlink_to(base)
    validate(lora_path=adapter, output_path=tmp_path / "merged")
    for given in ({}, {"model_path": base}):
        with pytest.raises(UserError, match=f"--output_path {tmp_path}/link would overwrite --model_path {base}: "):
            validate(lora_path=adapter, output_path=tmp_path / "link", **given)
    with pytest.raises(UserError, match=f"--output_path {adapter} would overwrite --lora_path {adapter}: "):
        validate(lora_path=adapter, output_path=adapter)


def test_an_adapter_is_not_left_beside_the_merged_model(tmp_path, folders):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match=f"--output_path {tmp_path}/out has an adapter in it"):
        validate(lora_path=folders[1], output_path=tmp_path / "out")


def test_a_damaged_adapter_is_left_to_whoever_reads_it(tmp_path, folders):
    (folders[1] / "adapter_config.json").write_text("[]")
    validate(lora_path=folders[1], output_path=tmp_path / "merged")


def test_a_base_that_is_gone_is_named(tmp_path, folders):
    (folders[0] / "config.json").unlink()
    with pytest.raises(UserError, match=f"--model_path {folders[0]}: there is no config.json in it"):
        validate(lora_path=folders[1], output_path=tmp_path / "merged")
