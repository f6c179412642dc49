"""The critic's values, its heads in and out of checkpoints, against transformers' own sequence classifier."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from spmdrl.config import ModelConfig
from spmdrl.errors import UserError
from spmdrl.models.value_head import HF_HEAD, load_value_model
from tests.tiny import make_model

HIDDEN = 64
MODEL = ModelConfig()


def load(path, *, prefix="score", seed=1):
    return load_value_model(
        str(path), MODEL, flag="--critic_pretrain", value_head_prefix=prefix, dtype=torch.float32, seed=seed
    )


def add_weights(path, weights):
    """Put more tensors into the checkpoint's file, or take them out with None."""
    file = path / "model.safetensors"
    merged = load_file(file) | weights
    save_file({name: tensor for name, tensor in merged.items() if tensor is not None}, file, metadata={"format": "pt"})


def head(value=0.5, width=1):
    return torch.full((width, HIDDEN), value) * torch.arange(HIDDEN) / HIDDEN


@pytest.fixture
def checkpoint(tmp_path):
    make_model(tmp_path / "model", "llama")
    return tmp_path / "model"


@pytest.mark.parametrize("arch", ["llama", "qwen2", "gpt2"])
def test_the_value_of_a_step_is_the_score_of_the_sequence_before_its_token(tmp_path, arch):
    """transformers scores the last token: that of the sequence cut after token t is the value of step t."""
    from transformers import AutoModelForSequenceClassification

    make_model(tmp_path / "model", arch)
    add_weights(tmp_path / "model", {"score.weight": head()})
    critic = load(tmp_path / "model")
    assert not critic.has_new_head
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model", num_labels=1)
    sequences = torch.randint(4, 300, (1, 7), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[False, True, True, False, True, True]])
    values = critic(sequences, mask)
    for t in range(6):
        score = classifier(input_ids=sequences[:, : t + 1]).logits[0, 0]
        torch.testing.assert_close(values[0, t], score if mask[0, t] else torch.zeros(()), atol=1e-5, rtol=1e-5)


def test_values_do_not_depend_on_what_the_pad_token_is(tmp_path):
    """pad == eos against a pad of its own, on responses that hold EOS in the middle and at the end."""
    sequences = torch.tensor([[5, 6, 7, 2, 8, 2], [5, 9, 2, 0, 0, 0]])  # 2 is EOS; the second row is padded
    mask = torch.tensor([[False, True, True, True, True], [True, True, False, False, False]])
    path = tmp_path / "model"
    make_model(path, "llama")
    add_weights(path, {"score.weight": head()})
    values = []
    for pad_of_the_model in (2, 0, None):
        config = json.loads((path / "config.json").read_text()) | {"pad_token_id": pad_of_the_model}
        (path / "config.json").write_text(json.dumps(config))
        for pad_id in (0, 2, 77):
            padded = sequences.clone()
            padded[1, 3:] = pad_id
            values.append(load(path)(padded, mask))
    alone = load(path)(sequences[1:, :3], mask[1:, :2])
    for other in values[1:]:
        torch.testing.assert_close(other, values[0], atol=0, rtol=0)
    torch.testing.assert_close(values[0][1:, :2], alone, atol=1e-6, rtol=1e-5)
    assert values[0][mask].abs().min() > 1e-3


@pytest.mark.parametrize(
    ("weights", "bias"),
    [
        ({"score.weight": head()}, None),
        ({"value_head.weight": head()}, None),
        ({"v_head.weight": head(), "v_head.bias": torch.tensor([0.25])}, 0.25),
        ({"v_head.summary.weight": head(), "v_head.summary.bias": torch.tensor([-1.0])}, -1.0),
        ({"critic_head.weight": head(), "score.weight": head(9.0)}, None),
    ],
)
def test_heads_of_other_trainers_are_found(checkpoint, weights, bias):
    """Named by transformers, OpenRLHF, DeepSpeed-Chat and TRL; the one of --value_head_prefix comes first."""
    add_weights(checkpoint, weights)
    critic = load(checkpoint, prefix="critic_head")
    found = getattr(critic.model, HF_HEAD)
    torch.testing.assert_close(found.weight.detach(), head())
    assert found.bias is None if bias is None else found.bias.item() == bias
    assert not critic.has_new_head


def test_heads_in_pickled_and_in_sharded_checkpoints_are_found(tmp_path):
    from transformers import AutoModelForSequenceClassification

    make_model(tmp_path / "model", "llama")
    add_weights(tmp_path / "model", {"value_head.weight": head()})
    file = tmp_path / "model" / "model.safetensors"
    torch.save(load_file(file), tmp_path / "model" / "pytorch_model.bin")
    file.unlink()
    pickled = load(tmp_path / "model")
    torch.testing.assert_close(getattr(pickled.model, HF_HEAD).weight.detach(), head())

    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model", num_labels=1)
    model.score.weight.data = head()
    model.save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    assert (tmp_path / "sharded" / "model.safetensors.index.json").exists()
    torch.testing.assert_close(getattr(load(tmp_path / "sharded").model, HF_HEAD).weight.detach(), head())


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"score.weight": head(width=3)}, "its head 'score' has width 3, not 1"),
        ({"v_head.0.weight": head(), "v_head.2.weight": head()}, "its head 'v_head' is not one linear layer"),
        ({"value_head.weight": torch.ones(1, 32)}, "its head reads 32 numbers, its backbone writes 64"),
        ({"model.norm.weight": None}, "weights are missing: model.norm.weight, 1 in all"),
    ],
)
def test_checkpoints_that_are_no_critic_are_refused(checkpoint, weights, message):
    add_weights(checkpoint, weights)
    with pytest.raises(UserError) as error:
        load(checkpoint)
    assert str(error.value).startswith(f"--critic_pretrain {checkpoint}: {message}")


def test_a_missing_head_is_drawn_from_the_seed(checkpoint):
    """Small: with hidden states of size 1, values have a standard deviation of sqrt(64) / 65."""
    critics = [load(checkpoint, seed=seed) for seed in (1, 1, 2)]
    weights = [getattr(critic.model, HF_HEAD).weight.detach() for critic in critics]
    assert all(critic.has_new_head for critic in critics)
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert 0.5 / 65 < float(weights[0].std()) < 2 / 65


def test_bf16_values_have_the_precision_of_fp32(checkpoint):
    """Hidden states rounded to bf16 times weights of bf16, added up and returned in fp32."""
    add_weights(checkpoint, {"score.weight": head()})
    critic = load_value_model(
        str(checkpoint), MODEL, flag="--pretrain", value_head_prefix="score", dtype=torch.bfloat16, seed=0
    )
    sequences, mask = torch.randint(4, 300, (2, 9)), torch.ones(2, 8, dtype=torch.bool)
    values = critic(sequences, mask)
    hidden = critic.model.base_model(input_ids=sequences).last_hidden_state[:, :-1]
    exact = (hidden.double() @ getattr(critic.model, HF_HEAD).weight.double().t())[..., 0]
    assert values.dtype == torch.float32
    torch.testing.assert_close(values.double(), exact, atol=1e-5, rtol=1e-5)


def test_a_batch_without_actions_still_reaches_every_parameter(checkpoint):
    """What keeps ZeRO-3 ranks in step."""
    critic = load(checkpoint)
    critic(torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.bool)).sum().backward()
    for name, p in critic.named_parameters():
        assert p.grad is not None, name
        assert not p.grad.any(), name
