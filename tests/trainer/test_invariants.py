"""Invariants of whole runs: the world size, the engine and the seed; ratio and KL before the first update."""

import importlib.util
import os

import pytest
import torch

from tests.ranks import run_ranks
from tests.tiny import write_jsonl
from tests.trainer.runs import PerturbedEngine, build, config_of, run, write_inputs

pytestmark = pytest.mark.timeout(1200)  # the first test that needs them waits for all runs
# 3 prompts and 6 samples a step do not divide among 2 ranks; 2 optimizer steps of 3 samples a rollout, 2 rollouts.
UNEVEN = {
    "rollout_batch_size": 3,
    "train_batch_size": 3,
    "micro_train_batch_size": 2,
    "advantage_estimator": "reinforce_baseline",
    "temperature": 0.8,
}
# A step of one sample leaves the second rank without any.
LONELY = {
    "rollout_batch_size": 1,
    "train_batch_size": 1,
    "advantage_estimator": "reinforce",
    "init_kl_coef": 0,
    "max_samples": 2,
}
VLLM = {"engine": "vllm", "vllm_kv_cache_gb": 1, "enforce_eager": True}
has_vllm = importlib.util.find_spec("vllm") is not None


# ---- runs on one and on two ranks -----------------------------------------------------------------------------------
def session(inputs, twins, folder, with_vllm):
    """Runs on the ranks that this is called on, by name."""
    out = {f"hf{name}": result for name, result in variants(inputs, twins, f"{folder}/hf", {}).items()}
    return out | (vllm_session(inputs, twins, f"{folder}/vllm") if with_vllm else {})


def variants(inputs, twins, folder, flags, engine=None):
    """A run, the same again, and others. ZeRO-0 on one rank; on two each kind of run has another stage."""
    from spmdrl.distributed import comm

    def stage(number):
        return {"zero_stage": 0 if comm.world_size() == 1 else number}

    uneven = inputs | UNEVEN | flags
    return {
        "": run(f"{folder}/run", engine, **uneven, **stage(3)),
        " again": run(f"{folder}/again", engine, **uneven, **stage(3)),
        " other seed": run(f"{folder}/seed", engine, **uneven, **stage(1), seed=7),
        " lonely": run(f"{folder}/lonely", engine, **inputs | LONELY | flags, **stage(2)),
        " twins": run(f"{folder}/twins", engine, **twins | flags),
    }


def vllm_session(inputs, twins, folder):
    """One engine for all runs, which send it their own weights, each checked on a probe; then one with a wrong one."""
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    from spmdrl.trainer import ppo_trainer

    flags = VLLM | {"verify_weight_sync": True}
    config = config_of(folder, **inputs | UNEVEN | flags, n_samples_per_prompt=4)
    engine = ppo_trainer.build_engine(config, None, dtype=torch.float32)
    ENGINES.append(engine)
    out = {f"vllm{name}": result for name, result in variants(inputs, twins, folder, flags, engine).items()}
    try:
        run(f"{folder}/broken", PerturbedEngine(engine), **inputs | UNEVEN | flags)
    except RuntimeError as error:
        out["perturbed"] = str(error)
    return out


ENGINES = []  # vLLM's state is the process's: engines live as long as it does


def tensor_parallel_session(inputs, folder):
    """One engine over two ranks, in processes of their own: vLLM has one layout of ranks a process."""
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    parallel = inputs | VLLM | {"vllm_tensor_parallel_size": 2, "zero_stage": 3}
    from spmdrl.trainer import ppo_trainer

    ENGINES.append(ppo_trainer.build_engine(config_of(folder, **parallel | UNEVEN), None, dtype=torch.float32))
    return {
        "uneven": run(f"{folder}/uneven", ENGINES[0], **parallel | UNEVEN, verify_weight_sync=True),
        "lonely": run(f"{folder}/lonely", ENGINES[0], **parallel | LONELY),
    }


ENGINES = []  # vLLM's state is the process's: engines live as long as it does


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("inputs"), num_prompts=6, tie=True, eos_ids=[*range(40, 80)])


@pytest.fixture(scope="module")
def sessions(inputs, tmp_path_factory):
    """By number of ranks: what every rank returned."""
    same = write_jsonl(tmp_path_factory.mktemp("twins") / "prompts.jsonl", [{"question": "same?", "answer": 0}] * 2)
    twins = inputs | {"prompt_data": same, "rollout_batch_size": 2, "n_samples_per_prompt": 4, "num_episodes": 2}
    out = {}
    for world_size in (1, 2):
        folder = tmp_path_factory.mktemp(f"ranks{world_size}")
        out[world_size] = run_ranks(world_size, session, inputs, twins, str(folder), has_vllm, timeout=500)
    return out


@pytest.fixture(scope="module")
def tensor_parallel(inputs, tmp_path_factory):
    return run_ranks(2, tensor_parallel_session, inputs, str(tmp_path_factory.mktemp("tp")), timeout=500)


needs_vllm = pytest.mark.skipif(not has_vllm, reason="vLLM is not installed")
engines = pytest.mark.parametrize("engine", ["hf", pytest.param("vllm", marks=needs_vllm)])


def assert_same_samples(a, b):
    assert a.ids() == b.ids()
    assert a.rows == b.rows
    assert a.column("rollout/reward") == b.column("rollout/reward")


@pytest.mark.slow
@engines
def test_one_and_two_ranks_sample_the_same_and_train_the_same_weights(sessions, engine):
    """3 prompts on 2 ranks, 2 steps of 2 optimizer steps; ZeRO-0 on one rank, ZeRO-3 on two."""
    one = sessions[1][0][engine]
    assert len(one.rows) == 12
    assert len({tuple(ids) for ids in one.ids()[0]}) == 6
    assert len({row["num_tokens"] for row in one.rows}) > 3, "responses of one length would show less"
    for two in (rank[engine] for rank in sessions[2]):
        assert_same_samples(one, two)
        assert one.weights.keys() == two.weights.keys()
        for name, weight in one.weights.items():
            torch.testing.assert_close(two.weights[name], weight, atol=5e-5, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
        for name in ("loss", "grad_norm", "kl", "entropy", "ratio_first_pass"):
            expected = one.column(f"policy/{name}")
            assert two.column(f"policy/{name}") == pytest.approx(expected, rel=1e-4, abs=1e-5), name


@pytest.mark.slow
@engines
def test_a_run_changes_its_weights(sessions, inputs, engine):
    """Without which the comparison of weights would show nothing."""
    from transformers import AutoModelForCausalLM

    start = dict(AutoModelForCausalLM.from_pretrained(inputs["pretrain"], dtype=torch.float32).named_parameters())
    moved = [float((w - start[n].detach()).abs().max()) for n, w in sessions[1][0][engine].weights.items()]
    assert min(moved) > 1e-3


@pytest.mark.slow
@engines
@pytest.mark.parametrize("world_size", [1, 2])
def test_two_runs_of_one_seed_are_identical_and_another_seed_is_another_run(sessions, engine, world_size):
    first = sessions[world_size][0]
    one, again, other = first[engine], first[f"{engine} again"], first[f"{engine} other seed"]
    assert_same_samples(one, again)
    assert all(torch.equal(one.weights[name], again.weights[name]) for name in one.weights)

    def by_place(run):
        return {(s.row, s.index): s.sequence.tolist() for step in run.samples for s in step}

    assert by_place(one).keys() == by_place(other).keys()
    assert sum(ids == by_place(other)[place] for place, ids in by_place(one).items()) == 0


@pytest.mark.slow
@engines
def test_ranks_with_the_same_prompt_sample_different_responses(sessions, engine):
    """One prompt twice, on a rank each, 4 samples of both: 8 different responses."""
    for rank in sessions[2]:
        samples = rank[f"{engine} twins"].samples[0]
        assert {s.group_id for s in samples} == {0, 1}
        assert len({tuple(s.sequence.tolist()) for s in samples}) == 8
        assert_same_samples(rank[f"{engine} twins"], sessions[1][0][f"{engine} twins"])


@pytest.mark.slow
@engines
def test_a_step_that_leaves_a_rank_without_samples_is_that_of_one_rank(sessions, engine):
    """One prompt and one sample an optimizer step; the second rank has none to sample, score or train."""
    one = sessions[1][0][f"{engine} lonely"]
    for two in (rank[f"{engine} lonely"] for rank in sessions[2]):
        assert_same_samples(two, one)
        assert two.column("policy/entropy") == pytest.approx(one.column("policy/entropy"), rel=1e-5)


@pytest.mark.slow
@needs_vllm
def test_verify_weight_sync_passes_for_every_zero_stage(sessions):
    """Tied embeddings, two ranks, after an update: fp32 noise only."""
    for rank in sessions[2]:
        for zero_stage, name in enumerate(("vllm twins", "vllm other seed", "vllm lonely", "vllm")):
            assert 0 < rank[name].weight_gap < 1e-4, f"ZeRO-{zero_stage}"


@pytest.mark.slow
@needs_vllm
def test_verify_weight_sync_catches_one_weight_that_is_off_in_the_engine(sessions):
    for rank in (*sessions[1], *sessions[2]):
        assert "--verify_weight_sync: engine and trainer disagree by" in rank["perturbed"]
        assert "position" in rank["perturbed"]


@pytest.mark.slow
@needs_vllm
def test_an_engine_over_two_ranks_samples_as_one_engine_a_rank(sessions, tensor_parallel):
    """Tensor parallelism of 2: ranks pool 2 prompts and 1, and each takes its own responses back."""
    single, parallel = sessions[2][0]["vllm"], tensor_parallel[0]["uneven"]
    assert parallel.ids() == single.ids()
    for a, b in zip(parallel.samples[0], single.samples[0], strict=True):
        torch.testing.assert_close(a.rollout_log_probs, b.rollout_log_probs, atol=2e-5, rtol=0)
    assert parallel.column("mismatch/max_abs_diff") == pytest.approx([0, 0], abs=1e-4)
    assert parallel.weight_gap is not None
    assert parallel.weight_gap < 1e-4


@pytest.mark.slow
@needs_vllm
def test_a_rank_of_an_engine_over_two_may_have_no_prompts(sessions, tensor_parallel):
    for rank in tensor_parallel:
        assert_same_samples(rank["lonely"], sessions[1][0]["vllm lonely"])


# ---- before the first update ----------------------------------------------------------------------------------------
DROPOUT = {
    "llama": {"attention_dropout": 0.1},
    "gpt2": {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
}


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
@pytest.mark.parametrize("kl_estimator", ["k1", "k2", "k3", "k3_st", "abs"])
def test_at_learning_rate_0_the_ratio_is_1_and_the_kl_in_the_reward_0(tmp_path, one_rank, arch, kl_estimator):
    """Temperature 0.6, dropout in the config, micro-batches of 2 (scoring) and 3 (training), checkpointing, and the
    second of two optimizer steps as well as the first."""
    inputs = write_inputs(tmp_path / "in", num_prompts=4, arch=arch, config=DROPOUT[arch], tie=arch == "gpt2")
    flags = {"temperature": 0.6, "actor_learning_rate": 0, "train_batch_size": 4, "gradient_checkpointing": True}
    (metrics,) = run(tmp_path / "out", **inputs, **flags, kl_estimator=kl_estimator).metrics
    assert metrics["policy/ratio_first_pass"] < 1e-5
    assert metrics["policy/ratio_dev"] < 1e-5
    assert metrics["mismatch/max_abs_diff"] < 1e-5  # of the engine, at this temperature too
    assert metrics["policy/kl"] == metrics["policy/kl_k1"] == metrics["policy/kl_k3"] == 0


@pytest.mark.parametrize("kl_estimator", ["k2", "k3", "k3_st"])
def test_at_learning_rate_0_the_kl_in_the_loss_is_0(tmp_path, one_rank, kl_estimator):
    """To the rounding of other micro-batches; its square is what these estimate."""
    inputs = write_inputs(tmp_path / "in", num_prompts=4)
    flags = {"temperature": 0.6, "actor_learning_rate": 0, "train_batch_size": 4, "use_kl_loss": True}
    (metrics,) = run(tmp_path / "out", **inputs, **flags, kl_estimator=kl_estimator).metrics
    assert metrics["policy/ratio_first_pass"] < 1e-5
    assert abs(metrics["policy/kl"]) < 1e-10
    assert abs(metrics["policy/kl_k1"]) < 1e-6


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradient_checkpointing_recomputes_each_layer_while_training(tmp_path, one_rank, checkpointing):
    """8 samples in micro-batches of 4 are 2 forwards, and as many recomputations in the backward."""
    inputs = write_inputs(tmp_path / "in", num_prompts=4)
    flags = {"init_kl_coef": 0, "micro_train_batch_size": 4, "gradient_checkpointing": checkpointing}
    trainer = build(tmp_path / "out", **inputs, **flags)
    calls, own = [], trainer.train
    trainer.actor.module.model.model.layers[0].self_attn.register_forward_pre_hook(lambda *_: calls.append(1))
    during = []
    trainer.train = lambda samples: (calls.clear(), own(samples), during.append(len(calls)))[1]
    trainer.fit()
    assert during == [4 if checkpointing else 2]
