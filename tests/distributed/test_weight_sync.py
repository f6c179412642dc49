"""Weights by name: what is sent, in which buckets, and what a receiver refuses."""

import pytest
import torch
from torch import nn

from spmdrl.config import ModelConfig
from spmdrl.distributed.weight_sync import _buckets, _Piece, check_names, copy_into, iter_weights
from spmdrl.models.actor import Actor
from spmdrl.models.loading import CheckpointWeights
from tests.ranks import run_ranks
from tests.tiny import make_model


def load(path, **options):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options)


@pytest.mark.parametrize(("arch", "tie"), [("llama", False), ("qwen2", True), ("gpt2", True)])
def test_names_are_those_of_a_checkpoint_and_tied_weights_are_sent_once(tmp_path, arch, tie):
    """An actor, whose head is another module, sends what the plain model has."""
    path = make_model(tmp_path / "model", arch, tie=tie)
    model = load(path)
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert ("lm_head.weight" in expected) == (not tie)
    sent = list(iter_weights(Actor(model), bucket_mb=1))
    assert [name for name, _ in sent] == list(expected) == CheckpointWeights(ModelConfig(pretrain=path)).names
    assert all(torch.equal(tensor, expected[name]) for name, tensor in sent)


def test_buckets_close_before_they_overflow_and_a_large_tensor_is_alone():
    """Sizes in bytes 40, 40, 200, 40 with room for 100."""
    pieces = [_Piece(name, nn.Parameter(torch.zeros(n))) for name, n in (("a", 10), ("b", 10), ("c", 50), ("d", 10))]
    assert [[piece.name for piece in bucket] for bucket in _buckets(pieces, 100)] == [["a", "b"], ["c"], ["d"]]


def test_buckets_go_by_the_whole_size_of_a_shard():
    """Under ZeRO-3 `numel()` is 0 and `ds_numel` the size: else all would be gathered at once."""
    pieces = [_Piece(name, nn.Parameter(torch.zeros(0))) for name in "abc"]
    for piece in pieces:
        piece.param.ds_numel = 20  # type: ignore[attr-defined]
    assert [[piece.name for piece in bucket] for bucket in _buckets(pieces, 100)] == [["a"], ["b"], ["c"]]


def test_a_copy_overwrites_every_weight(tmp_path):
    path = make_model(tmp_path / "model", tie=True)
    source, target = load(path), load(path)
    with torch.no_grad():
        for p in source.parameters():
            p += 1
    copy_into(target, ((name, p.detach()) for name, p in source.named_parameters()))
    assert all(torch.equal(a, b) for a, b in zip(source.parameters(), target.parameters(), strict=True))


def test_a_dropped_and_a_renamed_weight_are_both_named():
    with pytest.raises(RuntimeError, match="missing: b, c; unknown: bb"):
        check_names({"a", "bb"}, {"a", "b", "c"})
    with pytest.raises(RuntimeError, match=r"missing: w0, .* and 12 more"):
        check_names(set(), {f"w{i}" for i in range(20)})
    check_names({"a"}, {"a"})


def sent_weights(path, zero_stage, bucket_mb):
    from spmdrl.config import DeepSpeedConfig, ModelConfig, OptimConfig
    from spmdrl.distributed.strategy import Strategy
    from spmdrl.models.loading import load_causal_lm

    strategy = Strategy(DeepSpeedConfig(zero_stage=zero_stage), OptimConfig(), dtype=torch.float32)
    with strategy.loading():
        model = load_causal_lm(ModelConfig(pretrain=path), dtype=torch.float32)
    engine = strategy.trainable(Actor(model), learning_rate=1e-3, total_steps=1)
    kept = list(iter_weights(engine, bucket_mb=bucket_mb))  # longer than any gather lives
    return {name: tensor.clone() for name, tensor in kept}


def all_stages(paths):
    """All stages for one model, ZeRO-3 for the others."""
    return {
        (name, stage): sent_weights(path, stage, 1)
        for name, path in paths.items()
        for stage in (range(4) if name == "untied" else [3])
    }


@pytest.mark.slow
def test_every_zero_stage_sends_the_whole_weights_on_every_rank(tmp_path):
    """Tied, untied and GPT-2, on two ranks. Tensors stay whole after the iteration, when nothing is gathered."""
    paths = {
        "untied": make_model(tmp_path / "untied", "llama", num_layers=6),
        "tied": make_model(tmp_path / "tied", "qwen2", tie=True),
        "gpt2": make_model(tmp_path / "gpt2", "gpt2", tie=True),
    }
    for sent in run_ranks(2, all_stages, paths):
        for (name, stage), weights in sent.items():
            expected = dict(load(paths[name]).named_parameters())
            assert list(weights) == list(expected), f"{name}, ZeRO-{stage}"
            assert all(torch.equal(weights[n], expected[n]) for n in expected), f"{name}, ZeRO-{stage}"


def test_experts_are_named_as_in_files_for_those_who_read_them_so(tmp_path):
    """What transformers itself saves, piece by piece; and the buffers that choose among them are sent too."""
    from safetensors.torch import load_file

    path = make_model(tmp_path / "model", "glm4_moe")
    weights = CheckpointWeights(ModelConfig(pretrain=path))
    sent = list(iter_weights(Actor(load(path)), bucket_mb=1))
    assert [name for name, _ in sent] == weights.names
    assert "model.layers.1.mlp.gate.e_score_correction_bias" in weights.names
    in_files = dict(piece for name, tensor in sent for piece in weights.in_files(name, tensor))
    saved = load_file(tmp_path / "model" / "model.safetensors")
    assert in_files.keys() == saved.keys()
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in saved
    assert all(torch.equal(tensor, saved[name]) for name, tensor in in_files.items())


def test_weights_that_files_have_under_the_same_names_stay_what_they_are(tmp_path):
    weights = CheckpointWeights(ModelConfig(pretrain=make_model(tmp_path / "model")))
    tensor = torch.zeros(2)
    ((name, same),) = weights.in_files("model.norm.weight", tensor)
    assert name == "model.norm.weight" and same is tensor
