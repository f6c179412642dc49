"""PPO and its critic-free relatives: the loop that every rank runs."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spmdrl.algos.advantages import ESTIMATORS, cumulative_returns, gae, masked_stats, whiten
from spmdrl.algos.kl import KL_ESTIMATORS, AdaptiveKLController, FixedKLController
from spmdrl.algos.tensor_ops import token_rewards
from spmdrl.config import PPOConfig, describe_sizes, save_config, sizes, to_flat_dict
from spmdrl.data.batching import split_evenly
from spmdrl.data.prompts import PromptDataset, load_eval_prompts, load_prompts
from spmdrl.data.rendering import plain_text_note
from spmdrl.data.sampler import PromptSampler
from spmdrl.data.texts import load_texts
from spmdrl.distributed import comm, guard, preemption
from spmdrl.distributed.average import WeightAverage
from spmdrl.distributed.engine_state import EngineState
from spmdrl.distributed.strategy import Strategy
from spmdrl.distributed.weight_sync import iter_weights
from spmdrl.errors import UserError
from spmdrl.experience import Experience, Sample, collate, scatter
from spmdrl.models.loading import eos_token_ids
from spmdrl.models.packing import shares_prompts
from spmdrl.models.tokenizer import load_tokenizer
from spmdrl.quiet import quiet_libraries
from spmdrl.rewards.combined import combine, load_rewards
from spmdrl.rollout.collector import Collector
from spmdrl.rollout.engine import SamplingOptions
from spmdrl.tracking import EVAL_SAMPLES, Tracker
from spmdrl.trainer.anomalies import AnomalyStop, Guardrails, RollbackError
from spmdrl.trainer.build import (
    build_actor,
    build_critic,
    build_engine,
    build_ref_model,
    build_reward_models,
    critic_checkpoint,
    device_dtype,
    load_backbone,
    seed_everything,
)
from spmdrl.trainer.checkpoint import Shards
from spmdrl.trainer.evaluation import Evaluation, eval_metrics
from spmdrl.trainer.export import hf_config_to_save, save_hf, saved_dtype
from spmdrl.trainer.fingerprints import describe
from spmdrl.trainer.metrics import rollout_metrics
from spmdrl.trainer.policy_update import PolicyUpdate
from spmdrl.trainer.ptx import PtxLoss
from spmdrl.trainer.rewarding import Rewarder, split_ending
from spmdrl.trainer.run_state import batch_state, check_fields, restored_batch
from spmdrl.trainer.saving import Saver, fit
from spmdrl.trainer.scoring import log_probs_of, score_samples
from spmdrl.trainer.update import TrainBatch, train_on
from spmdrl.trainer.value_update import ValueUpdate, value_metrics
from spmdrl.trainer.weight_check import check_weights

LOGGED_SAMPLES = 16
NUM_PROBE_PROMPTS = 4


class PPOTrainer:
    """Samples, scores and trains one policy; the same statements run on every rank."""

    def __init__(self, config: PPOConfig):
        self.config = config
        self.save_path = Path(config.checkpoint.save_path).expanduser().absolute()  # whatever directory it is later
        seed_everything(config.seed, config.full_determinism)
        self.dtype = device_dtype(config)
        self.tokenizer = load_tokenizer(config.model)
        if note := plain_text_note(config.data, self.tokenizer):
            comm.say(note)
        self.prompts = load_prompts(config.data, self.tokenizer, seed=config.seed)
        self.sampler = PromptSampler(
            len(self.prompts),
            config.rollout.rollout_batch_size,
            seed=config.seed,
            num_episodes=config.optim.num_episodes,
        )
        self.sizes = sizes(config, comm.world_size(), len(self.prompts))
        for line in (self.prompts.describe(), *describe_sizes(config, comm.world_size(), self.sizes)):
            comm.say(line)
        self.eval_prompts = load_eval_prompts(config.eval, config.data, self.tokenizer, seed=config.seed)
        if self.eval_prompts is not None:
            comm.say(f"evaluation: {self.eval_prompts.describe()}")
        self.texts = load_texts(config, self.tokenizer)
        if self.texts is not None:
            comm.say(self.texts.describe())
        rewards = load_rewards(config.reward, batch_size=config.rollout.micro_rollout_batch_size)
        for source in rewards.values():
            source.check_columns(list(self.prompts[0].columns))
        description = describe(config, prompt_data=self.prompts, pretrain_data=self.texts)
        self.saver = Saver(self, config.checkpoint, description, keeps_best=self.eval_prompts is not None)
        self.tracker = Tracker(
            config.tracking,
            save_path=config.checkpoint.save_path,
            run_config=to_flat_dict(config),
            is_main=comm.is_main(),
            total_steps=self.sizes.total_steps,
            resume_step=self.saver.resume_step,
        )
        self.strategy = Strategy(config.deepspeed, config.optim, dtype=self.dtype)
        self.engine = build_engine(config, self.tokenizer, dtype=self.dtype)
        backbone = load_backbone(config, self.strategy)
        self.actor = build_actor(config, self.strategy, self.sizes, backbone)
        for prompts in (self.prompts, self.eval_prompts):
            if prompts is not None:
                prompts.check_ids(self.actor.module.model.config.get_text_config().vocab_size)
        prefix = config.critic.value_head_prefix
        reward_models = build_reward_models(
            config, self.strategy, self.tokenizer, value_head_prefix=prefix, backbone=backbone
        )
        self.reward_fn = combine({**reward_models, **rewards}, config.reward.reward_weights)
        critic = critic_checkpoint(config, reward_models)
        self.critic_name = critic.name if backbone is None else str(config.model.pretrain)
        self.critic = build_critic(config, self.strategy, self.sizes, critic, backbone, tokenizer=self.tokenizer)
        self.hf_configs = self._read_hf_configs()
        self.ref_model = build_ref_model(config, self.strategy, self.actor)
        self.average = WeightAverage(self.actor, ema_beta=config.optim.ema_beta) if config.optim.enable_ema else None
        self._build_algorithm()
        self.eos_ids = set(eos_token_ids(self.actor.module.model, self.tokenizer))
        self.shuffle = torch.Generator().manual_seed(config.seed)
        self.step = 0  # the last one that is finished
        self.batch: TrainBatch | None = None  # under training
        self.saver.restore()
        if comm.is_main():
            save_config(config, self.save_path / "config.yaml")

    def _read_hf_configs(self) -> list[Any]:
        """Of what is saved: now, while --pretrain is where it was said to be; the critic's second."""
        model, dtype = self.config.model, saved_dtype(self.config.checkpoint, self.dtype)
        configs = [hf_config_to_save(str(model.pretrain), model, dtype=dtype)]
        if self.config.critic.save_value_network:
            configs.append(hf_config_to_save(self.critic_name, model, dtype=dtype, num_labels=1))
        return configs

    def _build_algorithm(self) -> None:
        config, algo = self.config, self.config.algo
        self.estimator = ESTIMATORS[algo.advantage_estimator]
        self.kl_in_reward = self.ref_model is not None and not algo.use_kl_loss
        self.kl_estimator = KL_ESTIMATORS[algo.kl_estimator]
        self.kl_controller = (
            AdaptiveKLController(algo.init_kl_coef, algo.kl_target, algo.kl_horizon)
            if algo.kl_target is not None
            else FixedKLController(algo.init_kl_coef)
        )
        self.rewarder = Rewarder(config, self.reward_fn, self.prompts, self.response_parts, self.estimator)
        self.guardrails = Guardrails(config.anomaly, max_norm=config.optim.max_norm)
        self.value_update = ValueUpdate(self.strategy, config.critic, config.optim, self.guardrails)
        self.policy_update = PolicyUpdate(
            self.strategy,
            algo,
            config.optim,
            max_tokens=config.rollout.generate_max_len,
            correction=config.correction_for(self.engine.own_forward),
            ptx=PtxLoss(self.texts, ptx_coef=config.ptx.ptx_coef) if self.texts is not None else None,
            average=self.average,
            guard=self.guardrails,
        )
        # With one optimizer step a rollout the policy that samples is the policy that trains: no forward for it.
        self.needs_old_log_probs = self.kl_in_reward or (
            algo.old_log_probs == "trainer" and self.sizes.optimizer_steps_per_step > 1
        )
        self.collector = Collector(
            self.engine,
            SamplingOptions.from_config(config.rollout),
            n_samples_per_prompt=config.rollout.n_samples_per_prompt,
            seed=config.seed,
        )
        self.evaluation: Evaluation | None = None
        if self.eval_prompts is not None:
            self.evaluation = Evaluation(config, self.eval_prompts, self.engine)
            self.eval_rewarder = Rewarder(
                config, self.reward_fn, self.eval_prompts, self.response_parts, self.estimator
            )

    # ---- the loop -------------------------------------------------------------------------------------------------
    def fit(self) -> None:
        with self.saver.saved_when_stopped():
            while True:
                try:
                    return self._fit()
                except RollbackError as error:
                    self._roll_back(error)

    def _roll_back(self, error: RollbackError) -> None:
        """To the newest checkpoint, from which other responses are sampled."""
        comm.say(f"anomaly: {error}; going back to the newest checkpoint")
        if not self.saver.roll_back():
            raise AnomalyStop(f"{error}; there is no checkpoint to go back to yet (--save_steps)") from error
        self.tracker.rewind(-1 if self.is_at_start else self.step)

    def _fit(self) -> None:
        preemption.safe_point()  # from here on a signal is answered with a checkpoint
        batches = iter(self.sampler)
        if self.is_at_start:
            self.evaluate(0)
        for step in range(self.step + 1, self.sizes.total_steps + 1):
            guard.set_step(step)
            self.guardrails.begin(step)
            if self.batch is None:  # else the run was resumed in the middle of training on it
                self.collector.stream = self.guardrails.stream
                samples = self.rollout(step, batches)  # this rank's responses, with rewards
                if not comm.any_rank(bool(samples)):
                    break
                self.score(samples)  # log-probs, reference log-probs, values
                samples = self.compute_advantages(samples)  # all ranks' samples, in the same order everywhere
                self.batch = self.deal(samples)  # what each optimizer step trains on
                self.saver.settle()
            self.saver.finish()
            metrics = self.train(self.batch)  # epochs x optimizer steps x micro-batches, critic and actor
            self.evaluate(step)
            self.finish_step(step, self.batch.samples, metrics)  # KL controller, logs, checkpoint
        self.saver.finish()
        with self.saver.saved_when_refused():
            self.save()
        self.tracker.close()
        self.saver.finish_run(self.save_path)

    def rollout(self, step: int, batches: Iterator[list[int]]) -> list[Sample]:
        """This rank's samples of one step, with rewards. With dynamic filtering, draws until the batch is full."""
        algo = self.config.algo
        kept: list[Sample] = []
        for draw in range(algo.dynamic_filtering_max_draws if algo.dynamic_filtering else 1):
            rows = next(batches, None)
            if rows is None:
                return kept
            first = draw * self.config.rollout.rollout_batch_size
            samples = self.generate(step, rows, first)
            kept += self.rewarder.informative(samples) if algo.dynamic_filtering else samples
            if not algo.dynamic_filtering:
                return kept
            kept, is_full = self._cut_to_batch(kept)
            if is_full:
                return kept
        raise UserError(
            f"--dynamic_filtering: {algo.dynamic_filtering_max_draws} draws of --rollout_batch_size "
            f"{self.config.rollout.rollout_batch_size} did not give that many groups with a mean reward inside "
            f"{algo.dynamic_filtering_range}: the prompts are too easy or too hard; widen --dynamic_filtering_range "
            "or raise --dynamic_filtering_max_draws"
        )

    def generate(self, step: int, rows: Sequence[int], first_group: int) -> list[Sample]:
        """Sample and reward this rank's share of the prompts `rows`."""
        mine = split_evenly(range(len(rows)), comm.world_size())[comm.rank()]
        prompts = [self.prompts[rows[i]] for i in mine]
        groups = [first_group + i for i in mine]
        with self.phase("generate"), self._engine_awake():
            samples = self.collector.collect(prompts, groups, step)
            greedy = self.collector.collect_greedy(prompts, groups) if self.estimator.needs_greedy else []
        preemption.safe_point()
        with self.phase("reward"):
            self.rewarder.reward(samples)
            self.rewarder.reward(greedy)
        baselines = {s.group_id: s.rewards for s in greedy}
        for sample in samples:
            sample.greedy_reward = baselines.get(sample.group_id)
        return samples

    def score(self, samples: list[Sample]) -> None:
        """Fill log_probs, ref_log_probs and values, as far as they are needed."""
        if self.needs_old_log_probs:
            self._score(log_probs_of(self.actor), samples, "log_probs")
        if self.ref_model is not None:
            with self.strategy.on_device(self.ref_model):
                self._score(log_probs_of(self.ref_model), samples, "ref_log_probs")
        if self.critic is not None:
            self._score(self.critic, samples, "values")

    def compute_advantages(self, samples: list[Sample]) -> list[Sample]:
        """Advantages and returns of this rank's samples; returns those of all ranks, sorted by group and index.

        --mask_truncated takes effect between the two: a truncated sample is compared with its group and compares the
        others, but its tokens enter neither the whitening nor the loss.
        """
        with self.phase("advantages"):
            rewards = self.rewarder.shaped(samples)
            if self.config.algo.mask_truncated:
                for sample in samples:
                    sample.mask_if_truncated()
            exp = collate(samples)
            self._estimate(exp, rewards if samples else torch.zeros(1))
            for name in ("advantages", "returns"):
                if samples and getattr(exp, name) is not None:
                    scatter(samples, name, getattr(exp, name))
            gathered = [s for share in comm.all_gather_object(samples) for s in share]
            return sorted(gathered, key=lambda s: (s.group_id, s.index))

    def _estimate(self, exp: Experience, rewards: Tensor) -> None:
        """Set advantages, and with a critic returns, (B, A), from rewards (B,). A collective: whitening is global."""
        algo, mask, kl, kl_coef = self.config.algo, exp.action_mask, torch.zeros(exp.action_mask.shape), 0.0
        if self.kl_in_reward:
            assert exp.log_probs is not None and exp.ref_log_probs is not None
            kl, kl_coef = self.kl_estimator(exp.log_probs, exp.ref_log_probs, mask), self.kl_controller.value
        token_level = token_rewards(rewards, kl, mask, kl_coef=kl_coef, reward_clip_range=algo.reward_clip_range)
        if self.critic is None:
            advantages = cumulative_returns(token_level, mask, gamma=algo.gamma)
        else:
            assert exp.values is not None
            advantages, exp.returns = gae(token_level, exp.values, mask, gamma=algo.gamma, lambd=algo.lambd)
        if self.estimator.whiten:
            stats = comm.all_reduce_sum(masked_stats(advantages, mask))
            advantages = whiten(advantages, mask, stats, no_std_norm=algo.no_advantage_std_norm)
        exp.advantages = advantages

    def deal(self, samples: list[Sample]) -> TrainBatch:
        """Which samples each optimizer step trains on; every epoch has its own order. None where something is wrong
        with the rollout for which --on_anomaly leaves it out."""
        size, chunks = self.config.optim.train_batch_size, []
        if not self.guardrails.takes_rollout(samples):
            return TrainBatch(samples, chunks)
        for _ in range(self.config.optim.max_epochs):
            order = torch.randperm(len(samples), generator=self.shuffle).tolist()
            chunks += [order[start : start + size] for start in range(0, len(order), size)]
        return TrainBatch(samples, chunks)

    def train(self, batch: TrainBatch) -> dict[str, float]:
        """Passes over the samples of all ranks, of which each optimizer step deals a part to the ranks.

        Critic and actor train on the same chunks, one after the other: neither changes what the other learns from.
        """
        metrics: dict[str, float] = {}
        trains_actor = self.step >= self.config.critic.freezing_actor_steps
        num_samples = sum(map(len, batch.chunks))
        with self.phase("train", num_samples * (trains_actor + (self.critic is not None))) as progress:
            if self.critic is not None:
                step = partial(self.value_update.optimizer_step, self.critic)
                metrics |= value_metrics(batch.samples)
                metrics |= train_on(batch, step, "critic", progress, self.saver.settle)
            if trains_actor:
                step = partial(self.policy_update.optimizer_step, self.actor, kl_coef=self.kl_controller.value)
                metrics |= train_on(batch, step, "policy", progress, self.saver.settle)
        num_tokens = sum(s.num_tokens for s in batch.samples) * self.config.optim.max_epochs
        metrics["perf/train_tokens_per_s"] = num_tokens / max(progress.seconds, 1e-9)
        return metrics

    def evaluate(self, step: int) -> dict[str, float]:
        """Means over the held-out prompts, logged, if --eval_steps asks for them after this step."""
        evaluation, prompts = self.evaluation, self.eval_prompts
        if evaluation is None or prompts is None or not evaluation.is_due(step, self.sizes.total_steps):
            return {}
        with self.phase("eval"):
            with self._engine_awake():
                samples = evaluation.sample()
            preemption.safe_point()
            self.eval_rewarder.reward(samples)
            metrics = eval_metrics(samples)
        self.tracker.log_samples([self._sample_row(s, prompts) for s in samples[:LOGGED_SAMPLES]], step, EVAL_SAMPLES)
        self.tracker.log(metrics, step)
        self.saver.keep_best(step, metrics["eval/reward"])
        return metrics

    def finish_step(self, step: int, samples: list[Sample], metrics: dict[str, float]) -> None:
        metrics["policy/kl_coef"] = self.kl_controller.value if self.ref_model is not None else 0.0
        if "policy/kl" in metrics:
            self.kl_controller.update(metrics["policy/kl"], len(samples))
        self.tracker.log_samples([self._sample_row(s, self.prompts) for s in samples[:LOGGED_SAMPLES]], step)
        self.tracker.log(rollout_metrics(samples) | metrics | self.guardrails.metrics(), step)
        self.step, self.batch = step, None
        self.saver.settle()
        with self.phase("save"):
            self.saver.save_if_due()

    def save(self) -> None:
        with self.phase("save"):
            self.export(self.save_path, "--save_path")

    def export(self, folder: Path, flag: str) -> None:
        """The trained model, with --enable_ema its average and with --save_value_network the critic."""
        critic, (own, *critics) = self.config.critic, self.hf_configs
        save_hf(self.actor, self.tokenizer, folder, hf_config=own, flag=flag)
        if self.average is not None:
            with self.average.in_place():
                save_hf(self.actor, self.tokenizer, folder / "ema", hf_config=own, flag=flag)
        if critic.save_value_network:
            head = {"value_head_prefix": critic.value_head_prefix, "flag": flag}
            save_hf(self.critic, self.tokenizer, folder / "critic", hf_config=critics[0], **head)

    # ---- what is saved (trainer/saving.py) -------------------------------------------------------------------------
    @property
    def updates(self) -> int | None:
        return None if self.batch is None else self.batch.updates

    @property
    def is_at_start(self) -> bool:
        """Whether there is not even the first rollout."""
        return self.step == 0 and self.batch is None

    def shards(self) -> dict[str, Shards]:
        engines = {"actor": self.actor, "critic": self.critic}
        states: dict[str, Shards] = {role: EngineState(own) for role, own in engines.items() if own is not None}
        return states if self.average is None else {**states, "ema": self.average}

    def state_dict(self) -> dict[str, Any]:
        parts = {name: part.state_dict() for name, part in self._stateful().items()}
        return {"step": self.step, "shuffle": self.shuffle.get_state(), "parts": parts}

    def work_state(self) -> tuple[Any, Any]:
        if self.batch is None:
            return None, None
        return batch_state(self.batch), self.batch.reports

    def load_state_dict(self, state: dict[str, Any], work: Any, work_of_ranks: list[Any]) -> None:
        self.step = state["step"]
        self.shuffle.set_state(state["shuffle"])
        for name, part in self._stateful().items():
            if name in state["parts"]:
                part.load_state_dict(state["parts"][name])
        self.batch = restored_batch(work, work_of_ranks)
        if self.batch is not None:
            check_fields(self.batch, self._fields_to_train_on(self.batch))

    def _fields_to_train_on(self, batch: TrainBatch) -> dict[str, str]:
        """Fields that samples have by the time they are trained on, with the flags that ask for them."""
        algo, needs = self.config.algo, dict[str, str]()
        if self.critic is not None:
            needs["values"] = f"--advantage_estimator {algo.advantage_estimator}"
        if algo.old_log_probs == "trainer" and len(batch.chunks) > 1:
            needs["log_probs"] = "--old_log_probs trainer"
        if algo.use_kl_loss and self.ref_model is not None:
            needs["ref_log_probs"] = "--use_kl_loss"
        return needs

    def _stateful(self) -> dict[str, Any]:
        parts = {
            "sampler": self.sampler,
            "texts": self.texts,
            "rewarder": self.rewarder,
            "kl_controller": self.kl_controller,
            "guardrails": self.guardrails,
        }
        return {name: part for name, part in parts.items() if part is not None}

    # ---- parts of the phases --------------------------------------------------------------------------------------
    @contextmanager
    def phase(self, name: str, total: int | None = None) -> Iterator[Any]:
        """Progress, timing, and the name that an error reports."""
        guard.set_phase(name)
        with self.tracker.phase(name, total) as progress:
            yield progress

    @contextmanager
    def _engine_awake(self) -> Iterator[None]:
        """The device is the engine's for the time of the block, with the trainer's newest weights in it."""
        enabled = self.config.rollout.vllm_enable_sleep
        with (
            self.strategy.states_offloaded(self.actor, enabled=enabled, keeps_weights=True),
            self.strategy.states_offloaded(
                self.critic,
                enabled=enabled and self.critic is not None,
                keeps_weights=self.config.share_backbone,  # the policy's are among them
            ),
        ):
            self.engine.wake_up(["weights"])
            self.sync_weights()
            self.engine.wake_up(["kv_cache"])
            try:
                if self.config.rollout.verify_weight_sync:
                    self._verify_weights()
                yield
            finally:
                self.engine.sleep()

    def sync_weights(self) -> None:
        with self.phase("sync_weights"):
            self.engine.load_weights(iter_weights(self.actor, bucket_mb=self.config.rollout.sync_bucket_mb))
            if not self.engine.reset_prefix_cache():
                raise RuntimeError("the engine could not reset its prefix cache after a weight sync")
        guard.set_phase("generate")

    def _verify_weights(self) -> None:
        """Engine and trainer must agree on the log-probs of a probe, or the engine has other weights."""
        probe = [self.prompts[i] for i in range(min(len(self.prompts), NUM_PROBE_PROMPTS))]
        samples = self.collector.collect_probe(probe)
        size = self.config.rollout.micro_rollout_batch_size
        score_samples(log_probs_of(self.actor), samples, "log_probs", micro_batch_size=size)
        self.weight_gap = check_weights(samples, self.dtype)

    def _score(self, model: Any, samples: list[Sample], name: str) -> None:
        size = self.config.rollout.micro_rollout_batch_size
        with self.phase(name, len(samples)) as progress:
            by_prompt = shares_prompts(self.actor)
            score_samples(model, samples, name, micro_batch_size=size, by_prompt=by_prompt, progress=progress)

    def response_text(self, sample: Sample) -> str:
        """What reward functions see of a response: its text with special tokens, without the EOS that ended it."""
        return self.response_parts(sample)[0]

    def response_parts(self, sample: Sample) -> tuple[str, str]:
        """A response's text and that of the EOS that ended it, "" where none did."""
        return split_ending(sample, self.tokenizer, self.eos_ids)

    def _cut_to_batch(self, kept: list[Sample]) -> tuple[list[Sample], bool]:
        """Keep the first `rollout_batch_size` groups of all ranks; whether there are that many."""
        size = self.config.rollout.rollout_batch_size
        groups = sorted({g for share in comm.all_gather_object({s.group_id for s in kept}) for g in share})
        chosen = set(groups[:size])
        return [s for s in kept if s.group_id in chosen], len(groups) >= size

    def _sample_row(self, sample: Sample, prompts: PromptDataset) -> dict[str, Any]:
        prompt = prompts[sample.row]
        return {
            "row": sample.row,
            "index": sample.index,
            "prompt": prompt.prompt,
            "response": self.response_text(sample),
            "label": prompt.label,
            "reward": sample.rewards,
            "num_tokens": sample.num_sampled,
            "finish_reason": sample.finish_reason,
            **sample.info,
        }


def main(config: PPOConfig) -> None:
    """What cli/train_ppo.py runs on every rank."""

    def program() -> None:
        quiet_libraries(is_main=comm.is_main())
        fit(lambda: PPOTrainer(config), config.checkpoint.save_path)

    guard.run(program, config.deepspeed.local_rank, config.stopping)
