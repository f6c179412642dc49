import pytest

from spmdrl.config import AlgoConfig, OptimConfig, PPOConfig, RolloutConfig
from spmdrl.config.checks import NEEDS, RANGES
from spmdrl.config.flags import flags_of
from spmdrl.config.parse import read_config
from spmdrl.errors import UserError


def read(flags):
    return read_config(PPOConfig, flags.split())


def refusal(flags):
    with pytest.raises(UserError) as error:
        read(flags)
    return str(error.value)


def test_defaults_are_consistent():
    assert PPOConfig().samples_per_step == 512
    assert PPOConfig().max_total_len == 2048


def test_tables_name_flags_that_exist():
    assert set(RANGES) <= set(flags_of(PPOConfig))
    assert set(NEEDS) | set(NEEDS.values()) <= set(flags_of(PPOConfig))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--temperature 0", "--temperature must be above 0: a greedy choice has no probability to train, got 0.0"),
        ("--top_p 0", "--top_p must be above 0 and at most 1, got 0.0"),
        ("--top_k 0", "--top_k must be -1 (all tokens) or at least 1, got 0"),
        ("--zero_stage 4", "--zero_stage must be 0, 1, 2 or 3, got 4"),
        ("--value_head_prefix=", "--value_head_prefix must be the name of a module, such as score, got "),
        ("--value_head_prefix ../x", "--value_head_prefix must be the name of a module, such as score, got ../x"),
        ("--micro_train_batch_size 0", "--micro_train_batch_size must be at least 1, got 0"),
        ("--reward_clip_range 10 -10", "--reward_clip_range must be two numbers, the lower first, got 10 -10"),
        ("--adam_betas 0.9 1", "--adam_betas must be two numbers from 0 to below 1, got 0.9 1"),
        (
            "--eps_clip_low_high 2 0.2",
            "--eps_clip_low_high must be two widths above 0, the first at most 1, got 2 0.2",
        ),
        ("--dual_clip 1", "--dual_clip must be above 1, got 1.0"),
        ("--lr_warmup_ratio 3", "--lr_warmup_ratio must be from 0 to 1, got 3.0"),
        ("--lora_rank -1", "--lora_rank must be 0 or more, got -1"),
        ("--lora_dropout 1", "--lora_dropout must be from 0 to below 1, got 1.0"),
    ],
)
def test_values_out_of_range_are_refused(flags, message):
    assert refusal(flags) == message


@pytest.mark.parametrize(
    ("flags", "nearest"),
    [
        # 6 prompts x 1 sample: 1, 2, 3 and 6 divide; 5 lies between 3 and 6.
        ("--rollout_batch_size 6 --train_batch_size 5", "the nearest that does is 3 or 6"),
        ("--rollout_batch_size 6 --train_batch_size 7", "the nearest that does is 6"),
        # 16 prompts x 8 samples = 128: 96 lies between 64 and 128.
        (
            "--rollout_batch_size 16 --n_samples_per_prompt 8 --train_batch_size 96",
            "the nearest that does is 64 or 128",
        ),
    ],
)
def test_a_batch_that_does_not_divide_the_samples_names_the_nearest_that_do(flags, nearest):
    message = refusal(flags)
    assert message.endswith(nearest)
    for flag in ("--train_batch_size", "--rollout_batch_size", "--n_samples_per_prompt"):
        assert flag in message
    number = nearest.split()[-1]
    assert read(flags.replace(flags.split()[-1], number)).optim.train_batch_size == int(number)


@pytest.mark.parametrize("estimator", ["rloo", "group_norm", "reinforce_baseline", "dr_grpo", "opo"])
def test_group_estimators_need_groups(estimator):
    message = refusal(f"--advantage_estimator {estimator} --n_samples_per_prompt 1")
    assert message == (
        f"--advantage_estimator {estimator} compares the samples of one prompt: it needs --n_samples_per_prompt 2 or "
        f"more, got 1"
    )
    assert read(f"--advantage_estimator {estimator} --n_samples_per_prompt 2").rollout.n_samples_per_prompt == 2


def test_reinforce_needs_no_group():
    assert read("--advantage_estimator reinforce").rollout.n_samples_per_prompt == 1


@pytest.mark.parametrize(
    "flags",
    [
        "--critic_pretrain model",
        "--critic_learning_rate 1e-5",
        "--value_clip 0.5",
        "--value_clip None",
        "--value_head_prefix value_head",
        "--freezing_actor_steps 2",
        "--save_value_network",
        "--lambd 1",
    ],
)
def test_flags_of_the_critic_are_refused_without_one(flags):
    assert refusal(f"--advantage_estimator reinforce {flags}") == (
        f"{flags.split()[0]} is for a critic, and --advantage_estimator reinforce has none: drop it, or take "
        f"--advantage_estimator gae"
    )
    assert read(f"--advantage_estimator gae {flags}").needs_critic


@pytest.mark.parametrize("estimator", ["k1", "abs"])
def test_kl_losses_without_a_useful_gradient_are_refused(estimator):
    message = refusal(f"--use_kl_loss --kl_estimator {estimator}")
    assert message.startswith(f"--use_kl_loss with --kl_estimator {estimator}: ")
    assert "use k2 or k3_st" in message
    assert read(f"--kl_estimator {estimator}").algo.kl_estimator == estimator  # in the reward


def test_kl_losses_with_a_useful_gradient_are_taken():
    for estimator in ("k2", "k3", "k3_st"):
        assert read(f"--use_kl_loss --kl_estimator {estimator}").algo.use_kl_loss


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--use_kl_loss --kl_estimator k2 --init_kl_coef 0", ["--use_kl_loss", "--init_kl_coef"]),
        ("--kl_target 0.1 --init_kl_coef 0", ["--kl_target", "--init_kl_coef"]),
        ("--kl_horizon 5", ["--kl_horizon", "--kl_target"]),
        ("--dynamic_filtering", ["--dynamic_filtering", "--n_samples_per_prompt"]),
        ("--dynamic_filtering_range 0.1 0.9", ["--dynamic_filtering_range", "--dynamic_filtering;"]),
        ("--old_log_probs engine --top_p 0.9", ["--old_log_probs", "--top_p"]),
        ("--rollout_correction tis --top_k 20", ["--rollout_correction", "--top_k"]),
        ("--old_log_probs engine --rollout_correction icepop", ["--old_log_probs", "--rollout_correction"]),
        ("--generate_min_len 2000", ["--generate_min_len", "--generate_max_len"]),
        ("--max_len 1024", ["--max_len", "--prompt_max_len"]),
        ("--overlong_buffer_len 1024", ["--overlong_buffer_len", "--generate_max_len"]),
        ("--overlong_penalty_factor 0.5", ["--overlong_penalty_factor", "--overlong_buffer_len"]),
        ("--adam_offload --zero_stage 0", ["--adam_offload", "--zero_stage"]),
        ("--zpg 2", ["--zpg", "--zero_stage"]),
        (
            "--gradient_checkpointing_use_reentrant",
            ["--gradient_checkpointing_use_reentrant", "--gradient_checkpointing;"],
        ),
        ("--flash_attn --no_bf16", ["--flash_attn", "--no_bf16"]),
        ("--lora_alpha 32", ["--lora_alpha", "--lora_rank"]),
        ("--target_modules q_proj v_proj", ["--target_modules", "--lora_rank"]),
        ("--load_in_4bit", ["--load_in_4bit", "--lora_rank"]),
        ("--load_in_4bit --lora_rank 8 --zero_stage 3", ["--load_in_4bit", "--zero_stage"]),
        ("--min_lr_ratio 0.5 --lr_scheduler linear", ["--min_lr_ratio", "--lr_scheduler"]),
        ("--lr_scheduler polynomial --actor_learning_rate 1e-7", ["ends at 1e-07", "--actor_learning_rate"]),
        ("--lr_scheduler polynomial --critic_learning_rate 0", ["ends at 1e-07", "--critic_learning_rate"]),
        ("--apply_chat_template --input_template Q:{}", ["--apply_chat_template", "--input_template"]),
    ],
)
def test_flags_that_contradict_one_another_are_both_named(flags, named):
    message = refusal(flags)
    assert all(flag in message for flag in named), message


@pytest.mark.parametrize(
    ("flags", "readers"),
    [
        ("--policy_loss gpg --eps_clip 0.3", "--eps_clip is not read by --policy_loss gpg, only by ppo, gspo"),
        ("--policy_loss cispo --dual_clip 3", "--dual_clip is not read by --policy_loss cispo, only by ppo, gspo"),
        ("--sapo_tau_pos 2", "--sapo_tau_pos is not read by --policy_loss ppo, only by sapo"),
        (
            "--rollout_correction none --rollout_correction_range 0 3",
            "--rollout_correction_range is not read by --rollout_correction none, only by tis, icepop",
        ),
        ("--rollout_token_cap 3", "--rollout_token_cap is not read by --rollout_correction tis, only by seq-mask-tis"),
    ],
)
def test_settings_that_the_chosen_function_does_not_take_are_refused(flags, readers):
    assert refusal(flags).startswith(readers)


def test_settings_that_the_chosen_function_takes_are_accepted():
    assert read("--policy_loss cispo --eps_clip_low_high 1 4").algo.eps_clip_low_high == (1, 4)
    assert read("--rollout_correction_range 0 3").algo.rollout_correction_range == (0, 3)  # auto may be tis


def test_auto_correction_is_tis_only_where_it_corrects_rightly():
    assert PPOConfig().correction_for(engine_is_trainer=False) == "tis"
    assert PPOConfig().correction_for(engine_is_trainer=True) == "none"
    assert read("--top_p 0.9").correction_for(engine_is_trainer=False) == "none"
    assert read("--old_log_probs engine").correction_for(engine_is_trainer=False) == "none"
    assert read("--rollout_correction icepop").correction_for(engine_is_trainer=True) == "icepop"


def test_a_reward_model_has_a_head_without_a_critic_too():
    config = read("--advantage_estimator reinforce --reward_pretrain model --value_head_prefix value_head")
    assert config.critic.value_head_prefix == "value_head"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--critic_zero_stage 4", "--critic_zero_stage must be 0, 1, 2 or 3, got 4"),
        ("--critic_zero_stage 0 --adam_offload", "--adam_offload needs --critic_zero_stage 1, 2 or 3, got 0"),
        ("--critic_zero_stage 1 --advantage_estimator reinforce", "--critic_zero_stage is for a critic, and"),
        ("--critic_adam_offload --advantage_estimator reinforce", "--critic_adam_offload is for a critic, and"),
        ("--critic_adam_offload --zero_stage 0", "--critic_adam_offload needs --zero_stage 1, 2 or 3, got 0"),
        ("--critic_adam_offload --critic_zero_stage 0", "--critic_adam_offload needs --critic_zero_stage 1, 2 or 3"),
        ("--ref_reward_zero_stage -1", "--ref_reward_zero_stage must be 0, 1, 2 or 3, got -1"),
    ],
)
def test_zero_stages_of_roles(flags, message):
    assert refusal(flags).startswith(message)


def test_a_critic_may_keep_its_adam_on_the_device():
    config = read("--adam_offload --no_critic_adam_offload --critic_zero_stage 0")
    assert (config.deepspeed.adam_offload, config.deepspeed.critic_adam_offload) == (True, False)
    assert read("--zero_stage 0 --critic_zero_stage 1 --critic_adam_offload").deepspeed.critic_adam_offload


def test_a_config_built_in_python_is_checked_too():
    with pytest.raises(UserError, match="--train_batch_size 100 does not divide"):
        PPOConfig(optim=OptimConfig(train_batch_size=100))
    with pytest.raises(UserError, match="--n_samples_per_prompt 2 or more"):
        PPOConfig(algo=AlgoConfig(advantage_estimator="rloo"), rollout=RolloutConfig(n_samples_per_prompt=1))
