import pytest

from spmdrl.config import PPOConfig, describe_sizes, sizes
from spmdrl.config.parse import read_config
from spmdrl.config.sizes import warmup_steps
from spmdrl.errors import UserError


def config(flags):
    return read_config(PPOConfig, flags.split())


DEMO = "--rollout_batch_size 8 --n_samples_per_prompt 4 --train_batch_size 16 --micro_train_batch_size 4"


def test_sizes_of_a_run():
    """100 prompts make 12 steps of 8 and leave 4; 32 samples are 2 optimizer steps of 16, twice for 2 epochs."""
    counts = sizes(
        config(f"{DEMO} --max_epochs 2 --num_episodes 3 --lr_warmup_ratio 0.1"), world_size=2, num_prompts=100
    )
    assert (counts.steps_per_episode, counts.num_dropped, counts.total_steps) == (12, 4, 36)
    assert (counts.samples_per_step, counts.optimizer_steps_per_step) == (32, 4)
    assert counts.total_optimizer_steps == 144
    assert counts.warmup_steps == 15  # a tenth of 144, rounded up
    assert counts.micro_batches_per_rank == 2  # 16 samples on 2 ranks are 8 each, 4 at a time


def test_uneven_shares_make_as_many_passes_as_the_largest():
    """16 samples on 3 ranks: 6, 5 and 5; with 5 at a time the first rank needs 2 passes, so all make 2."""
    counts = sizes(config(f"{DEMO} --micro_train_batch_size 5"), world_size=3, num_prompts=8)
    assert counts.micro_batches_per_rank == 2
    assert counts.num_dropped == 0


def test_more_ranks_than_samples():
    assert sizes(config(DEMO), world_size=32, num_prompts=8).micro_batches_per_rank == 1


def test_too_few_prompts_for_a_step():
    with pytest.raises(UserError, match="--rollout_batch_size 8 is more than the 7 prompts of --prompt_data"):
        sizes(config(DEMO), world_size=1, num_prompts=7)


def test_the_start_of_a_run_says_what_the_sizes_come_to():
    run = config(f"{DEMO} --advantage_estimator reinforce --lr_warmup_ratio 0.1 --actor_learning_rate 3e-5")
    lines = describe_sizes(run, 3, sizes(run, world_size=3, num_prompts=100))
    assert lines == [
        "step: 8 prompts x 4 samples = 32 samples, over 3 ranks",
        "training: 2 optimizer steps a step of 16 samples (1 epoch), each 2 micro-batches of up to 4 on every rank "
        "for its 5 or 6 samples; ranks with fewer samples fill up with passes of no weight",
        "run: 12 steps (1 episode of 12), 24 optimizer steps; 4 of an episode's 100 prompts are dropped, they do "
        "not fill a step",
        "learning rate: up to 3e-05 in 3 optimizer steps, then cosine_with_min_lr over the other 21",
    ]


def test_an_actor_that_starts_later_has_a_schedule_of_its_own_steps():
    """12 steps of 2 optimizer steps; the actor misses 5 x 2 of the 24 and warms up over a tenth of its 14."""
    run = config(f"{DEMO} --lr_warmup_ratio 0.1 --freezing_actor_steps 5")
    counts = sizes(run, world_size=1, num_prompts=100)
    assert (counts.total_optimizer_steps, counts.frozen_optimizer_steps, counts.actor_optimizer_steps) == (24, 10, 14)
    assert (counts.warmup_steps, counts.critic_warmup_steps) == (2, 3)
    assert describe_sizes(run, 1, counts)[-2:] == [
        "learning rate: up to 1e-06 in 2 optimizer steps, then cosine_with_min_lr over the other 12",
        "critic: learning rate up to 9e-06 in 3 of 24 optimizer steps; it trains alone for the first 5 steps",
    ]


def test_an_actor_that_would_never_start_is_refused():
    with pytest.raises(UserError, match="--freezing_actor_steps 12 would never train the actor: the run has 12 steps"):
        sizes(config(f"{DEMO} --freezing_actor_steps 12"), world_size=1, num_prompts=100)


def test_dynamic_filtering_makes_the_number_of_steps_a_bound():
    run = config(f"{DEMO} --dynamic_filtering")
    assert "run: at most 12 steps" in "\n".join(describe_sizes(run, 1, sizes(run, world_size=1, num_prompts=96)))


def test_a_run_of_one_step_does_not_spend_it_on_the_warmup():
    assert [warmup_steps(num_steps, 0.03) for num_steps in (0, 1, 2, 33, 34, 100)] == [0, 0, 1, 1, 2, 3]
    assert warmup_steps(10, 1.0) == 9
