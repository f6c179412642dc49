"""--share_backbone: policy, critic and reward model as adapters on one frozen model, which is the reference too."""

from pathlib import Path

import pytest
import torch

from spmdrl.config import LoraConfig, ModelConfig
from spmdrl.config.merge import MergeLoraConfig
from spmdrl.errors import UserError
from spmdrl.models.backbone import Backbone
from spmdrl.models.loading import load_causal_lm
from spmdrl.models.lora import add_lora
from spmdrl.models.merge import merge_lora
from spmdrl.models.tokenizer import load_tokenizer
from spmdrl.models.value_head import RewardModel, load_reward_model
from spmdrl.trainer.export import hf_config_to_save, save_hf
from tests.ranks import run_ranks
from tests.tiny import make_model
from tests.trainer.runs import config_of, run, write_inputs

SEQUENCES = torch.tensor([[5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 2, 2]])
LENGTHS = torch.tensor([6, 4])
ROLES = {"advantage_estimator": "gae", "lora_rank": 2, "init_kl_coef": 0.1, "critic_learning_rate": 1e-3}


def make_judge(path, folder):
    """The adapter of a reward model that was trained on the model in `path`; its scores."""
    options = {"flag": "", "value_head_prefix": "score", "dtype": torch.float32, "seed": 5}
    judge = load_reward_model(path, ModelConfig(), **options)
    add_lora(judge.model, LoraConfig(lora_rank=3, target_modules=("q_proj", "up_proj")), seed=5)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in judge.parameters():
            if p.requires_grad:
                p += torch.randn(p.shape, generator=generator) / 10
    config = ModelConfig(pretrain=path)
    own = hf_config_to_save(path, config, dtype=torch.float32, num_labels=1)
    own.mean, own.std = 0.5, 2.0
    save_hf(judge, load_tokenizer(config), folder, hf_config=own)
    return judge(SEQUENCES, LENGTHS)


@pytest.fixture
def inputs(tmp_path):
    """Flags of a policy with a judge on it."""
    flags = write_inputs(tmp_path, hidden_size=128) | {"remote_rm_url": None}
    make_judge(flags["pretrain"], tmp_path / "judge")
    return flags | ROLES | {"reward_pretrain": str(tmp_path / "judge"), "critic_pretrain": flags["pretrain"]}


@pytest.mark.parametrize(("arch", "tie"), [("llama", False), ("gpt2", True)])
def test_roles_share_every_weight_but_adapters_and_heads(tmp_path, arch, tie):
    path = make_model(tmp_path / "model", arch, tie=tie)
    model = load_causal_lm(ModelConfig(pretrain=path), dtype=torch.float32)
    logits = model(SEQUENCES).logits
    backbone, config = Backbone(model), LoraConfig(lora_rank=2)
    policy, critic = backbone.causal_lm(), backbone.new_classifier(config, seed=1)
    add_lora(policy, config, seed=1)
    base = {id(p) for p in model.parameters()}
    for role, extra in ((policy, 0), (critic, 1)):
        own = [p for p in role.parameters() if id(p) not in base]
        assert own == [p for p in role.parameters() if p.requires_grad]
        assert len(own) == 2 * sum(hasattr(module, "lora_A") for module in role.modules()) + extra
    with torch.no_grad():
        for p in (*policy.parameters(), *critic.parameters()):
            if p.requires_grad:
                p.fill_(0.1)
        assert not torch.equal(policy(SEQUENCES).logits, logits)
    assert torch.equal(model(SEQUENCES).logits, logits)


def test_a_reward_model_on_the_backbone_scores_as_it_did_in_training(tmp_path):
    path = make_model(tmp_path / "model", "llama")
    scores = make_judge(path, tmp_path / "judge")
    backbone = Backbone(load_causal_lm(ModelConfig(pretrain=path), dtype=torch.float32))
    judge = RewardModel(backbone.load_classifier(str(tmp_path / "judge"), source="--reward_pretrain judge"))
    assert judge.normalization == (0.5, 2.0)
    torch.testing.assert_close(judge(SEQUENCES, LENGTHS), scores, atol=1e-6, rtol=0)
    other = Backbone(
        load_causal_lm(ModelConfig(pretrain=make_model(tmp_path / "deep", num_layers=3)), dtype=torch.float32)
    )
    with pytest.raises(UserError, match="--reward_pretrain judge: cannot load the adapter"):
        other.load_classifier(str(tmp_path / "judge"), source="--reward_pretrain judge")


def test_four_roles_on_one_model_do_what_four_models_do(one_rank, tmp_path, inputs):
    """The same samples, scores, values and updates; the judge of the four models is the merged one."""
    merge_lora(MergeLoraConfig(lora_path=str(tmp_path / "judge"), output_path=str(tmp_path / "merged"), is_rm=True))
    apart = run(tmp_path / "apart", **inputs | {"reward_pretrain": str(tmp_path / "merged")})
    shared = run(tmp_path / "shared", **inputs, share_backbone=True, verify_weight_sync=True, save_value_network=True)
    assert shared.ids() == apart.ids()
    for name in (
        "rollout/reward",
        "policy/kl_k3",
        "critic/loss",
        "policy/loss",
        "policy/grad_norm",
        "critic/grad_norm",
    ):
        assert shared.column(name) == pytest.approx(apart.column(name), rel=1e-3, abs=1e-5), name
    for name, weight in apart.weights.items():
        torch.testing.assert_close(shared.weights[name], weight, atol=1e-5, rtol=0)
    assert (tmp_path / "shared" / "critic" / "adapter_config.json").exists()


def each_stage(inputs, folder):
    flags = inputs | {"share_backbone": True, "gradient_checkpointing": True, "verify_weight_sync": True}
    return [run(Path(folder, str(stage)), **flags, zero_stage=stage) for stage in range(4)]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_four_roles_on_one_model_under_every_zero_stage(one_rank, tmp_path, inputs):
    alone = run(tmp_path / "alone", **inputs, share_backbone=True)
    for stage, together in enumerate(run_ranks(2, each_stage, inputs, str(tmp_path))[0]):
        assert together.ids() == alone.ids(), stage
        for name in ("critic/loss", "policy/grad_norm", "critic/grad_norm"):
            assert together.column(name) == pytest.approx(alone.column(name), rel=1e-3), (stage, name)
        for name, weight in alone.weights.items():
            torch.testing.assert_close(together.weights[name], weight, atol=1e-4, rtol=0)


def test_what_is_no_adapter_on_the_model_is_refused_by_flag(tmp_path, inputs):
    flags = inputs | {"share_backbone": True}
    config_of(tmp_path / "out", **flags).validate(1)
    with pytest.raises(UserError, match="with --share_backbone: no adapter, there is no"):
        config_of(tmp_path / "out", **flags | {"reward_pretrain": inputs["pretrain"]}).validate(1)
    other = make_model(tmp_path / "other")
    with pytest.raises(UserError, match=f"judge with --share_backbone: an adapter on .*, not on --pretrain {other}"):
        config_of(tmp_path / "out", **flags | {"pretrain": other, "critic_pretrain": None}).validate(1)
    for wrong, message in (
        ({"lora_rank": 0}, "--share_backbone changes nothing without --lora_rank"),
        ({"critic_zero_stage": 0}, "--critic_zero_stage is for models of their own"),
        ({"ref_reward_offload": True}, "--ref_reward_offload is for models of their own"),
    ):
        with pytest.raises(UserError, match=message):
            config_of(tmp_path / "out", **flags | wrong)
