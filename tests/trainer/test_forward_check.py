"""Models that are computed otherwise than is taken for granted are refused before anything is trained."""

import pytest
import torch

from spmdrl.errors import UserError
from spmdrl.models.actor import Actor
from spmdrl.models.distillation import Teacher
from spmdrl.models.packing import layout_for, packed, padded, shared
from spmdrl.models.value_head import RewardModel, ValueHead, ValueModel
from spmdrl.trainer.forward_check import UnknownForward, check_forward
from tests.trainer import runs, supervised

SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def model_of(kind, *, auto="AutoModelForCausalLM", **changes):
    """A random model of that architecture, with logits far apart."""
    import transformers

    granite = {"logits_scaling": 4.0} if kind == "granite" else {}
    config = transformers.AutoConfig.for_model(kind, **SIZES | granite | changes)
    torch.manual_seed(0)
    return getattr(transformers, auto).from_config(config, dtype=torch.float32).eval()


def reward_model(kind, layout, **changes):
    model = model_of(kind, auto="AutoModelForSequenceClassification", num_labels=1, **changes)
    model.score = ValueHead(model.score.weight.detach(), None)
    return RewardModel(model, layout=layout)


@pytest.mark.parametrize("layout", [padded, shared, packed])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3_moe", "granite"])
def test_known_architectures_pass_in_every_layout(one_rank, kind, layout):
    actor = Actor(model_of(kind), temperature=0.7, layout=layout)
    check_forward(actor, "--pretrain x")
    assert actor.layout is layout


@pytest.mark.parametrize("layout", [padded, shared, packed])
def test_a_reward_model_passes_in_every_layout(one_rank, layout):
    model = reward_model("qwen2", layout)
    check_forward(model, "--pretrain x")
    assert model.layout is layout


@pytest.mark.parametrize("layout", [padded, shared, packed])
def test_a_critic_passes_in_every_layout(one_rank, layout):
    critic = ValueModel(reward_model("qwen2", padded).model, layout=layout)
    check_forward(critic, "--pretrain x")
    assert critic.layout is layout


@pytest.mark.parametrize("layout", [padded, packed])
@pytest.mark.parametrize("kind", ["qwen2", "granite"])
def test_a_teacher_passes_in_every_layout(one_rank, kind, layout):
    teacher = Teacher(model_of(kind), layout=layout)
    check_forward(teacher, "--teacher_model x")
    assert teacher.layout is layout


def test_a_teacher_whose_packed_sequences_see_one_another_is_refused(one_rank):
    opt = {"ffn_dim": 128, "word_embed_proj_dim": 64, "max_position_embeddings": 64, "init_std": 0.2}
    with pytest.raises(UserError, match="--packing_samples: in --teacher_model x"):
        check_forward(Teacher(model_of("opt", **opt), layout=packed), "--teacher_model x")


@pytest.mark.parametrize("kind", [ValueModel, RewardModel])
def test_a_model_that_looks_ahead_is_refused(one_rank, kind):
    """As those that were made of causal ones for embeddings."""
    model = reward_model("qwen2", padded).model
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    model.config.is_causal = False
    with pytest.raises(UserError, match="--reward_pretrain x: models of this architecture are not supported"):
        check_forward(kind(model), "--reward_pretrain x")


@pytest.mark.parametrize(
    ("kind", "changes"),
    [("nanochat", {"final_logit_softcapping": 15.0}), ("cohere", {"logit_scale": 0.1})],
)
def test_logits_that_are_capped_or_scaled_behind_the_head_are_refused(one_rank, kind, changes):
    with pytest.raises(UserError, match=r"--pretrain x: models of this architecture are not supported.*off by"):
        check_forward(Actor(model_of(kind, **changes)), "--pretrain x")


def test_packing_is_refused_where_a_state_runs_on_into_the_next_sequence(one_rank):
    """Qwen 3.5's linear attention. Padded, the same model passes."""
    kinds = ["linear_attention", "full_attention"]
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16}
    model = model_of("qwen3_5_text", layer_types=kinds, linear_value_head_dim=16, **linear)
    assert layout_for(model) is padded
    with pytest.raises(UserError, match=r"--packing_samples: in --pretrain x packed sequences would see one another"):
        check_forward(Actor(model, layout=packed), "--pretrain x")
    check_forward(Actor(model), "--pretrain x")


def test_packing_is_refused_for_a_reward_model_that_knows_no_positions_of_packed_rows(one_rank):
    opt = {"ffn_dim": 128, "word_embed_proj_dim": 64, "max_position_embeddings": 64, "init_std": 0.2}
    with pytest.raises(UserError, match="--packing_samples"):
        check_forward(reward_model("opt", packed, **opt), "--pretrain x")
    check_forward(reward_model("opt", padded, **opt), "--pretrain x")


def test_a_layout_of_ours_that_is_wrong_for_a_model_is_not_taken(one_rank):
    def wrong(decoder, sequences, lengths):
        return 2 * padded(decoder, sequences, lengths)

    actor = Actor(model_of("qwen2"), layout=wrong)
    check_forward(actor, "--pretrain x")
    assert actor.layout is padded


def test_a_model_that_cannot_be_called_as_others_is_refused_in_one_line(one_rank):
    with pytest.raises(UnknownForward, match="--pretrain x: models of this architecture are not supported: TypeError"):
        check_forward(Actor(uncallable()), "--pretrain x")


def uncallable():
    return model_of("modernbert-decoder", layer_types=["full_attention"] * 2, initializer_cutoff_factor=3.0)


@pytest.mark.parametrize(
    ("program", "flag"),
    [("ppo", "pretrain"), ("sft", "pretrain"), ("dpo", "pretrain"), ("kto", "pretrain"), ("kd", "teacher_model")],
)
def test_trainers_ask_before_they_train(tmp_path, one_rank, program, flag, monkeypatch):
    """Before the reference of all rows too."""
    monkeypatch.setattr("spmdrl.trainer.dpo.sequence_sums", lambda *_: pytest.fail("rows are scored"))
    helpers = runs if program == "ppo" else supervised
    flags = helpers.write_inputs(tmp_path / "inputs")
    uncallable().save_pretrained(flags[flag])
    with pytest.raises(UserError, match="models of this architecture are not supported"):
        if program == "ppo":
            runs.build(tmp_path / "run", **flags)
        else:
            supervised.build(program, tmp_path / "run", **flags)
