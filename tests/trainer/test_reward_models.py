"""PPO with a reward model: what is scored and logged, what the critic starts from, and all four roles on two ranks."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from spmdrl.errors import UserError
from spmdrl.models.value_head import HF_HEAD
from tests.launched import TRAIN, slurm_tasks, start_ranks, tiny_flags
from tests.ranks import run_ranks
from tests.rewards.reward_models import edit_config, make_reward_model, plain_scores
from tests.rewards.servers import RewardServer, lengths
from tests.trainer.runs import FakeEngine, build, canned, completion, run, write_inputs

GAE = {"advantage_estimator": "gae", "critic_learning_rate": 1e-3}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Prompts for one step and a policy, without a reward."""
    return write_inputs(tmp_path_factory.mktemp("inputs")) | {"remote_rm_url": None, "max_samples": 4}


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory):
    return make_reward_model(tmp_path_factory.mktemp("rm") / "judge", mean=0.5, std=2.0, seed=3)


def scores_of_ids(path, rows):
    return plain_scores(path, [ids for _, _, ids, _ in rows])


def scores_of(path, samples):
    return plain_scores(path, [s.sequence for s in samples])


# ---- one rank -------------------------------------------------------------------------------------------------------
def test_rewards_are_the_models_scores_of_what_was_sampled(tmp_path, one_rank, inputs, reward_model):
    """Also of a response that was cut, whose last token stays what it was: 4 ids, none of them EOS (U20)."""
    answers = completion([9, 10, 2]), completion([40, 41, 42, 43], "length"), completion([2])
    engine = FakeEngine(canned(*answers))
    flags = {**inputs, "generate_max_len": 4, "reward_pretrain": reward_model}
    result = run(tmp_path / "out", engine, **flags)
    samples = result.samples[0]
    cut = [s for s in samples if s.truncated]
    assert cut and all(s.sequence[-4:].tolist() == [40, 41, 42, 43] for s in cut)
    assert [s.rewards for s in samples] == pytest.approx(scores_of(reward_model, samples), abs=1e-5)
    mean = sum(s.rewards for s in samples) / len(samples)
    assert result.metrics[0]["rollout/reward"] == pytest.approx(mean)
    assert "reward/judge" not in result.metrics[0]  # the only one


def test_models_and_functions_are_added_up_and_logged_apart(tmp_path, one_rank, inputs, reward_model):
    """2 x the first model - the second one + 0.5 x the function."""
    second = make_reward_model(tmp_path / "other", seed=8)
    function = tmp_path / "length.py"
    function.write_text("def size(queries, prompts, labels):\n    return [len(q) for q in queries]\n")
    flags = {**inputs, "reward_pretrain": f"{reward_model},{second}", "reward_func": f"{function}:size"}
    result = run(tmp_path / "out", **flags, reward_weights=(2, -1, 0.5))
    samples = result.samples[0]
    parts = scores_of(reward_model, samples), scores_of(second, samples), [s.info["reward/size"] for s in samples]
    for sample, a, b, c in zip(samples, *parts, strict=True):
        assert sample.rewards == pytest.approx(2 * a - b + 0.5 * c, abs=1e-4)
    for name, values in zip(("judge", "other", "size"), parts, strict=True):
        assert result.metrics[0][f"reward/{name}"] == pytest.approx(sum(values) / len(values), abs=1e-4)


def test_scores_are_normalised_by_the_config_of_the_model(tmp_path, one_rank, inputs, reward_model, capsys):
    trainer = build(tmp_path / "out", **inputs, reward_pretrain=reward_model, normalize_reward=True)
    assert "scores are normalised by mean 0.5 and std 2 of its config" in capsys.readouterr().out
    trainer.fit()
    samples = trainer.result().samples[0]
    expected = [(score - 0.5) / 2 for score in scores_of(reward_model, samples)]
    assert [s.rewards for s in samples] == pytest.approx(expected, abs=1e-5)
    assert trainer.rewarder.moments.count == 0


def head_of(critic):
    return getattr(critic.module.model, HF_HEAD).weight.detach()


def test_the_critic_starts_from_the_reward_model_like_openrlhfs(tmp_path, one_rank, inputs, reward_model, capsys):
    flags = {**inputs, **GAE, "save_value_network": True}
    trainer = build(tmp_path / "out", **flags, reward_pretrain=reward_model)
    assert f"critic: starts from --reward_pretrain {reward_model}" in capsys.readouterr().out
    torch.testing.assert_close(
        head_of(trainer.critic), load_file(Path(reward_model, "model.safetensors"))["score.weight"]
    )
    trainer.fit()
    assert (tmp_path / "out" / "critic" / "config.json").exists()
    other = build(tmp_path / "other", **flags, reward_pretrain=reward_model, critic_pretrain=inputs["pretrain"])
    assert f"critic: starts from --critic_pretrain {inputs['pretrain']}" in capsys.readouterr().out
    assert float(head_of(other.critic).abs().max()) < 0.1  # a new one, which is small


def test_the_critic_does_not_start_from_a_reward_model_with_other_ids(tmp_path, one_rank, inputs, capsys):
    path = make_reward_model(tmp_path / "rm")
    content = Path(path, "tokenizer.json").read_text()
    Path(path, "tokenizer.json").write_text(content.replace('"<|im_end|>"', '"<|stop|>"'))
    config = Path(path, "tokenizer_config.json")
    config.write_text(config.read_text().replace("<|im_end|>", "<|stop|>"))
    build(tmp_path / "out", **inputs, **GAE, reward_pretrain=path)
    out = capsys.readouterr().out
    assert f"reward model {path}: its tokenizer is another one: responses are decoded" in out
    assert f"critic: starts from --pretrain {inputs['pretrain']}" in out


def test_reward_models_that_cannot_be_are_refused_at_the_start(tmp_path, one_rank, inputs):
    with pytest.raises(UserError, match=r"--reward_pretrain .*model: no trained head in it"):
        build(tmp_path / "out", **inputs, reward_pretrain=inputs["pretrain"])
    short = make_reward_model(tmp_path / "short")
    edit_config(short, max_position_embeddings=40)
    with pytest.raises(UserError, match=r"--reward_pretrain .* has 40 positions, prompt and response up to 56 tokens"):
        build(tmp_path / "out", **inputs, reward_pretrain=short)


def test_a_reward_server_is_asked_with_the_eos_that_was_sampled(tmp_path, one_rank, inputs):
    engine = FakeEngine(canned(completion([9, 10, 2]), completion([40, 41, 42], "length")))
    with RewardServer(lengths) as server:
        result = run(tmp_path / "out", engine, **{**inputs, "remote_rm_url": server.url})
    queries = [query for body in server.bodies for query in body["query"]]
    assert sum(query.endswith("<|im_end|>") for query in queries) == len(queries) / 2
    prompts = [prompt for body in server.bodies for prompt in body["prompts"]]
    assert all(query.startswith(prompt) for query, prompt in zip(queries, prompts, strict=True))
    assert {type(label) for body in server.bodies for label in body["labels"]} == {dict}
    assert sorted(s.rewards for step in result.samples for s in step) == sorted(map(len, queries))


# ---- two ranks ------------------------------------------------------------------------------------------------------
def four_roles(folder, inputs, settings):
    """For each of the settings: samples with rewards and the metrics of a run, on this rank."""
    out = []
    for number, setting in enumerate(settings):
        flags = {**inputs, **GAE, "rollout_batch_size": 3, "train_batch_size": 6, **setting}
        trainer = build(f"{folder}/{number}", **flags)
        trainer.fit()
        result = trainer.result()
        rewards = [[(s.group_id, s.index, s.sequence.tolist(), s.rewards) for s in step] for step in result.samples]
        out.append((rewards, result.metrics))
    return out


@pytest.mark.slow
def test_all_four_roles_on_two_ranks_are_as_on_one_whatever_their_zero_stages(tmp_path, inputs, reward_model):
    """Three prompts a step: the ranks have different numbers of samples, of forwards too with 2 samples in each.

    ZeRO-0 and ZeRO-3 for all, and a mixture: critic 1, reference and reward model sharded. Last a step of one prompt,
    of which the second rank has none.
    """
    inputs = {**inputs, "reward_pretrain": reward_model, "stop": list("aeiounrst"), "max_samples": 6}
    alone = run_ranks(1, four_roles, str(tmp_path / "one"), inputs, [{"zero_stage": 0}])[0][0]
    stages = [
        {"zero_stage": 0},
        {"zero_stage": 3, "ref_reward_offload": True},
        {"zero_stage": 2, "critic_zero_stage": 1, "ref_reward_zero_stage": 3},
        {"zero_stage": 3, "rollout_batch_size": 1, "train_batch_size": 2, "max_samples": 1},
    ]
    *runs, (lonely, _) = run_ranks(2, four_roles, str(tmp_path / "two"), inputs, stages)[0]
    assert [row[3] for row in lonely[0]] == pytest.approx(scores_of_ids(reward_model, lonely[0]), abs=1e-5)
    for rewards, metrics in runs:
        assert len(metrics) == len(alone[1]) == 2
        for step, other in zip(alone[0][:1], rewards[:1], strict=True):
            assert [row[:3] for row in step] == [row[:3] for row in other]
            expected = scores_of_ids(reward_model, step)
            for found in (step, other):
                assert [row[3] for row in found] == pytest.approx(expected, abs=1e-5)
        for name in ("rollout/reward", "critic/loss", "policy/kl", "policy/loss"):
            assert metrics[0][name] == pytest.approx(alone[1][0][name], rel=1e-3, abs=1e-4), name


@pytest.mark.slow
def test_a_server_that_answers_one_rank_wrongly_stops_both(tmp_path):
    """NaN for the rows of the second rank: both end with one line, at once."""

    def answer(server, body, handler):
        wrong = any("3 plus 3" in prompt for prompt in body["prompts"])
        return {"rewards": [float("nan") if wrong else 1.0] * len(body["query"])}

    with RewardServer(answer) as server:
        flags = tiny_flags(tmp_path, save_path=tmp_path / "out", remote_rm_url=server.url)
        environments = [{**task, "HTTP_PROXY": "http://127.0.0.1:9"} for task in slurm_tasks(2)]
        runs = start_ranks([TRAIN, *flags], environments, tmp_path / "log").wait()
    assert [ended.code for ended in runs] == [2, 2], runs[0].out
    assert runs[0].lines(f"error: reward server {server.url}", "returned nan for row "), runs[0].out
    assert "Traceback" not in runs[0].out
