"""Engines that are saved by some ranks under one ZeRO stage go on under others: weights and moments bit for bit."""

from pathlib import Path

import pytest
import torch

from tests.distributed.test_strategy import fixed_samples
from tests.ranks import run_ranks
from tests.tiny import make_model


def make_engine(path, stage, dtype, total_steps=8, **flags):
    from spmdrl.config import DeepSpeedConfig, ModelConfig, OptimConfig
    from spmdrl.distributed.strategy import Strategy
    from spmdrl.models.actor import Actor
    from spmdrl.models.loading import load_causal_lm

    config = DeepSpeedConfig(zero_stage=stage, **flags)
    strategy = Strategy(config, OptimConfig(l2=0.01, lr_scheduler="linear"), dtype=dtype)
    with strategy.loading():
        model = load_causal_lm(ModelConfig(pretrain=path), dtype=dtype)
    return strategy, strategy.trainable(Actor(model), learning_rate=1e-2, total_steps=total_steps)


def train(strategy, engine, num_steps):
    """Optimizer steps on samples that every rank has."""
    from spmdrl.experience import collate

    exp = collate(fixed_samples())
    for _ in range(num_steps):
        for _ in range(2):
            log_probs, _ = engine(exp.sequences, exp.action_mask)
            strategy.backward(engine, -(log_probs * exp.advantages).sum() / 100)
        strategy.step(engine)


def whole_state(engine):
    """Weights that the forward uses, and all fragments of all ranks put together: the same on every rank."""
    from spmdrl.distributed import comm
    from spmdrl.distributed.engine_state import EngineState
    from spmdrl.distributed.weight_sync import iter_weights

    state = {name: w.clone() for name, w in iter_weights(engine, bucket_mb=64)}
    shares = comm.all_gather_object([f.to_save() for f in EngineState(engine).fragments()])
    parts = sorted((f for share in shares for f in share), key=lambda f: (f.name, f.start))
    for name in {f.name for f in parts}:
        state[name] = torch.cat([f.tensor.cpu() for f in parts if f.name == name])
        assert len(state[name]) == next(f.total for f in parts if f.name == name)
    return state


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype
        assert torch.equal(a[name], b[name]), name


def save(folder, engine):
    from spmdrl.config import CheckpointConfig
    from spmdrl.distributed.engine_state import EngineState
    from spmdrl.trainer.checkpoint import Checkpointer

    checkpointer = Checkpointer(CheckpointConfig(ckpt_path=str(folder)), {})
    checkpointer.save("step_000002", {"actor": EngineState(engine)}, {}, {})
    checkpointer.finish()


def load(folder, engine):
    from spmdrl.distributed.engine_state import EngineState
    from spmdrl.trainer.checkpoint import Checkpoint
    from spmdrl.trainer.checkpoint_folder import Manifest

    found = Path(folder, "step_000002")
    Checkpoint(found, Manifest.read(found)).load({"actor": EngineState(engine)})


def save_each(path, folder, dtype, stages, **flags):
    """Train two steps under each stage and save; the state then, and after another step."""
    states = []
    for stage in stages:
        strategy, engine = make_engine(path, stage, dtype, **flags)
        train(strategy, engine, 2)
        save(Path(folder, str(stage)), engine)
        states.append(whole_state(engine))
        train(strategy, engine, 1)
        states[-1] = (states[-1], whole_state(engine), engine.get_lr())
    return states


def load_each(path, folder, dtype, pairs, **flags):
    """For each (saved, now): the state of a new engine of stage `now` after loading, and after another step."""
    states = []
    for saved, now in pairs:
        strategy, engine = make_engine(path, now, dtype, **flags)
        load(Path(folder, str(saved)), engine)
        state = whole_state(engine)
        train(strategy, engine, 1)
        states.append((state, whole_state(engine), engine.get_lr()))
    return states


@pytest.mark.slow
def test_any_stage_and_number_of_ranks_reads_what_two_ranks_saved(tmp_path):
    """From and to every stage on two ranks, and to one rank, in bf16, where weights are not the masters. Another step
    under the same stage and ranks is bitwise that of the run that was not interrupted."""
    dtype = torch.bfloat16
    path = make_model(tmp_path / "model", "llama", tie=True, hidden_size=62, num_heads=1, num_kv_heads=1)
    saved = run_ranks(2, save_each, path, tmp_path, dtype, [0, 1, 2, 3])[0]
    assert {name.rpartition("/")[2] for name in saved[0][0]} > {"weight", "exp_avg", "exp_avg_sq"}
    same = [(stage, stage) for stage in range(4)]
    for ranks, pairs in ((2, [*same, (0, 3), (3, 1), (2, 0)]), (1, [(0, 3), (3, 2), (1, 0)])):
        for loaded in run_ranks(ranks, load_each, path, tmp_path, dtype, pairs):
            for (before, now), (state, later, rates) in zip(pairs, loaded, strict=True):
                assert_same(state, saved[before][0])
                assert rates == saved[before][2]
                if ranks == 2 and before == now:
                    assert_same(later, saved[before][1])


@pytest.mark.slow
def test_two_ranks_read_what_one_saved(tmp_path):
    path = make_model(tmp_path / "model", "llama")
    saved = run_ranks(1, save_each, path, tmp_path, torch.float32, [0, 3])[0]
    for loaded in run_ranks(2, load_each, path, tmp_path, torch.float32, [(0, 3), (3, 2), (3, 3)]):
        for before, (state, _, _) in zip((0, 1, 1), loaded, strict=True):
            assert_same(state, saved[before][0])


def offloaded(path, folder, dtype):
    """With optimizer states in host memory: saved, loaded, and loaded by engines without."""
    saved = save_each(path, folder, dtype, [2, 3], adam_offload=True)
    pairs = [(2, 2), (3, 3)]
    return saved, load_each(path, folder, dtype, pairs, adam_offload=True), load_each(path, folder, dtype, [(2, 0)])


@pytest.mark.slow
def test_offloaded_optimizers_go_on_bit_for_bit(tmp_path):
    """DeepSpeed's C++ Adam has a state of its own, its bias corrections. Compiling it is what takes long."""
    path = make_model(tmp_path / "model", "llama")
    (result,) = run_ranks(1, offloaded, path, tmp_path, torch.bfloat16, timeout=1200)
    saved, loaded, elsewhere = result
    for (state, later, rates), (found, found_later, found_rates) in zip(saved, loaded, strict=True):
        assert_same(found, state)
        assert_same(found_later, later)
        assert found_rates == rates
    assert_same(elsewhere[0][0], saved[0][0])


def test_a_model_of_other_sizes_is_refused(tmp_path, one_rank):
    from spmdrl.errors import UserError

    strategy, engine = make_engine(make_model(tmp_path / "a", "llama"), 0, torch.float32)
    train(strategy, engine, 1)
    save(tmp_path, engine)
    for sizes in ({"hidden_size": 128}, {"num_layers": 3}):
        _, other = make_engine(make_model(tmp_path / "b", "llama", **sizes), 0, torch.float32)
        with pytest.raises(UserError, match=r"its actor is not this run's: \S+ has \d+ elements there, \d+ here"):
            load(tmp_path, other)


def test_a_state_without_updates_takes_an_engine_back_to_its_beginning(tmp_path, one_rank):
    path = make_model(tmp_path / "model", "llama")
    strategy, engine = make_engine(path, 1, torch.float32)
    first = whole_state(engine)
    save(tmp_path, engine)
    train(strategy, engine, 2)
    trained = whole_state(engine)
    load(tmp_path, engine)
    assert_same(whole_state(engine), first)
    train(strategy, engine, 2)
    assert_same(whole_state(engine), trained)


SCHEDULES = (
    *("cosine_with_min_lr", "cosine_warmup_with_min_lr", "cosine", "cosine_with_restarts", "linear", "polynomial"),
    *("constant", "constant_with_warmup", "inverse_sqrt"),
)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_goes_on_where_it_was(name):
    """The learning rates of 3 steps, then of 3 more by a new schedule, are those of 6."""
    from types import SimpleNamespace

    from transformers import get_scheduler

    from spmdrl.distributed.engine_state import _set_schedule

    def make():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        extra = {"min_lr_rate": 0.1} if "with_min_lr" in name else {}
        return SimpleNamespace(
            basic_optimizer=optimizer,
            lr_scheduler=get_scheduler(
                name, optimizer, num_warmup_steps=2, num_training_steps=6, scheduler_specific_kwargs=extra
            ),
        )

    def rates(engine, count):
        found = []
        for _ in range(count):
            engine.basic_optimizer.step()
            engine.lr_scheduler.step()
            found += engine.lr_scheduler.get_last_lr()
        return found

    straight = rates(make(), 6)
    resumed = make()
    _set_schedule(resumed, 3)
    assert resumed.lr_scheduler.get_last_lr() == straight[2:3]
    assert rates(resumed, 3) == straight[3:]
