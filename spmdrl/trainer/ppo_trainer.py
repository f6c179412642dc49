"""PPO and its critic-free relatives: the loop that every rank runs."""

import importlib.util
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch

from spmdrl.algos.advantages import ESTIMATORS, cumulative_returns, masked_stats, shape_rewards, whiten
from spmdrl.algos.kl import KL_ESTIMATORS, AdaptiveKLController, FixedKLController
from spmdrl.algos.losses import bind
from spmdrl.algos.shaping import group_is_informative, overlong_penalty, stop_properly_penalty
from spmdrl.algos.tensor_ops import token_rewards
from spmdrl.config import PPOConfig, describe_sizes, save_config, sizes, to_flat_dict
from spmdrl.data.batching import plan_micro_batches, split_evenly
from spmdrl.data.prompts import Prompt, load_prompts
from spmdrl.data.sampler import PromptSampler
from spmdrl.distributed import comm, guard
from spmdrl.distributed.strategy import Strategy, compute_dtype
from spmdrl.distributed.weight_sync import iter_weights
from spmdrl.errors import UserError
from spmdrl.experience import Sample, collate, scatter
from spmdrl.models.actor import Actor
from spmdrl.models.loading import checkpoint_weight_names, eos_token_ids, load_causal_lm
from spmdrl.models.tokenizer import load_tokenizer
from spmdrl.quiet import quiet_libraries
from spmdrl.rewards.function import RewardFunction
from spmdrl.rollout.collector import Collector
from spmdrl.rollout.engine import RolloutEngine, SamplingOptions
from spmdrl.tracking import Tracker
from spmdrl.trainer.checkpoint import save_hf
from spmdrl.trainer.policy_update import PolicyUpdate, UpdateMetrics

LOGGED_SAMPLES = 16
NUM_PROBE_PROMPTS = 4
# Largest |log-prob of the engine - log-prob of the trainer| that the dtype explains; measured: fp32 5e-5, bf16 0.3.
WEIGHT_TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 1.0}


class PPOTrainer:
    """Samples, scores and trains one policy; the same statements run on every rank."""

    def __init__(self, config: PPOConfig):
        self.config = config
        _seed_everything(config.seed, config.full_determinism)
        self.tokenizer = load_tokenizer(config.model)
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
        self.reward_fn = RewardFunction(config.reward.reward_func or config.reward.remote_rm_url or "")
        self.dtype = compute_dtype(config.model.bf16)
        self.strategy = Strategy(config.deepspeed, config.optim, dtype=self.dtype)
        self.engine = build_engine(config, self.tokenizer, dtype=self.dtype)
        self._build_models()
        self._build_algorithm()
        self.eos_ids = set(eos_token_ids(self.actor.module.model, self.tokenizer))
        self.shuffle = torch.Generator().manual_seed(config.seed)
        self.tracker = Tracker(
            config.tracking,
            save_path=config.checkpoint.save_path,
            run_config=to_flat_dict(config),
            is_main=comm.is_main(),
            total_steps=self.sizes.total_steps,
        )
        if comm.is_main():
            save_config(config, str(Path(config.checkpoint.save_path, "config.yaml")))

    def _build_models(self) -> None:
        config = self.config
        with self.strategy.loading():
            model = load_causal_lm(config.model, dtype=self.dtype)
        if config.model.gradient_checkpointing:
            reentrant = config.model.gradient_checkpointing_use_reentrant
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        actor = Actor(model, temperature=config.rollout.temperature)
        self.actor = self.strategy.trainable(
            actor,
            learning_rate=config.optim.actor_learning_rate,
            total_steps=self.sizes.total_optimizer_steps,
            warmup_steps=self.sizes.warmup_steps,
        )
        self.ref_model = None
        if config.algo.init_kl_coef > 0:
            with self.strategy.loading():
                ref = load_causal_lm(config.model, dtype=self.dtype)
            self.ref_model = self.strategy.frozen(Actor(ref, temperature=config.rollout.temperature))

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
        self.update = PolicyUpdate(
            self.strategy,
            algo,
            config.optim,
            max_tokens=config.rollout.generate_max_len,
            correction=config.correction_for(self.engine.own_forward),
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

    # ---- the loop -------------------------------------------------------------------------------------------------
    def fit(self) -> None:
        batches = iter(self.sampler)
        for step in range(1, self.sizes.total_steps + 1):
            samples = self.rollout(step, batches)  # this rank's responses, with rewards
            if not comm.any_rank(bool(samples)):
                break
            self.score(samples)  # log-probs, reference log-probs
            samples = self.compute_advantages(samples)  # all ranks' samples, in the same order everywhere
            metrics = self.train(samples)  # epochs x optimizer steps x micro-batches
            self.finish_step(step, samples, metrics)  # KL controller, logs
        self.save()
        self.tracker.close()

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
            kept += self._informative(samples) if algo.dynamic_filtering else samples
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
        with self.phase("reward"):
            self._reward(samples)
            self._reward(greedy)
        baselines = {s.group_id: s.rewards for s in greedy}
        for sample in samples:
            sample.greedy_reward = baselines.get(sample.group_id)
        return samples

    def score(self, samples: list[Sample]) -> None:
        """Fill log_probs and ref_log_probs."""
        if self.needs_old_log_probs:
            with self.phase("log_probs", len(samples)) as progress:
                self._forward(self.actor, samples, "log_probs", progress)
        if self.ref_model is not None:
            with self.phase("ref_log_probs", len(samples)) as progress, self.strategy.on_device(self.ref_model):
                self._forward(self.ref_model, samples, "ref_log_probs", progress)

    def compute_advantages(self, samples: list[Sample]) -> list[Sample]:
        """Advantages of this rank's samples; returns those of all ranks, sorted by group and index."""
        with self.phase("advantages"):
            shaped = self._shaped_rewards(samples)
            exp = collate(samples)
            mask = exp.action_mask
            kl = torch.zeros(mask.shape)
            if self.kl_in_reward and samples:
                kl = self.kl_estimator(exp.log_probs, exp.ref_log_probs, mask)
            kl_coef = self.kl_controller.value if self.kl_in_reward else 0.0
            shaped = shaped if samples else torch.zeros(1)
            clip = self.config.algo.reward_clip_range
            token_level = token_rewards(shaped, kl, mask, kl_coef=kl_coef, reward_clip_range=clip)
            advantages = cumulative_returns(token_level, mask, gamma=self.config.algo.gamma)
            if self.estimator.whiten:
                stats = comm.all_reduce_sum(masked_stats(advantages, mask))
                advantages = whiten(advantages, mask, stats, no_std_norm=self.config.algo.no_advantage_std_norm)
            if samples:
                scatter(samples, "advantages", advantages)
            if self.config.algo.mask_truncated:
                for sample in samples:
                    sample.mask_if_truncated()
            gathered = [s for share in comm.all_gather_object(samples) for s in share]
            return sorted(gathered, key=lambda s: (s.group_id, s.index))

    def train(self, samples: list[Sample]) -> dict[str, float]:
        """Passes over the samples of all ranks, of which each optimizer step deals a part to the ranks."""
        size = self.config.optim.train_batch_size
        updates = UpdateMetrics()
        num_tokens = sum(s.num_tokens for s in samples) * self.config.optim.max_epochs
        with self.phase("train", len(samples) * self.config.optim.max_epochs) as progress:
            for _ in range(self.config.optim.max_epochs):
                order = torch.randperm(len(samples), generator=self.shuffle).tolist()
                for start in range(0, len(order), size):
                    chunk = [samples[i] for i in order[start : start + size]]
                    report = self.update.optimizer_step(self.actor, chunk, kl_coef=self.kl_controller.value)
                    updates.add(report, sum(s.response_length for s in chunk))
                    progress.update(len(chunk))
            metrics = updates.reduce()
        metrics["policy/lr"] = self.actor.get_lr()[0]
        metrics["perf/train_tokens_per_s"] = num_tokens / max(progress.seconds, 1e-9)
        return metrics

    def finish_step(self, step: int, samples: list[Sample], metrics: dict[str, float]) -> None:
        metrics["policy/kl_coef"] = self.kl_controller.value if self.ref_model is not None else 0.0
        if "policy/kl" in metrics:
            self.kl_controller.update(metrics["policy/kl"], len(samples))
        self.tracker.log_samples([self._sample_row(s) for s in samples[:LOGGED_SAMPLES]], step)
        self.tracker.log(rollout_metrics(samples) | metrics, step)

    def save(self) -> None:
        from transformers import AutoConfig

        with self.phase("save"):
            trust = self.config.model.trust_remote_code
            own = AutoConfig.from_pretrained(self.config.model.pretrain, trust_remote_code=trust, dtype=self.dtype)
            save_hf(self.actor, self.tokenizer, self.config.checkpoint.save_path, hf_config=own)

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
        with self.strategy.optimizer_offloaded(self.actor, enabled=self.config.rollout.vllm_enable_sleep):
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
        self._forward(self.actor, samples, "log_probs")
        worst, where = 0.0, ""
        for sample in samples:
            assert sample.log_probs is not None
            gap = (sample.log_probs - sample.rollout_log_probs).abs() * sample.action_mask
            if float(gap.max()) >= worst:
                at = int(gap.argmax())
                worst = float(gap.max())
                where = (
                    f"row {sample.row}, token {int(sample.sequence[at + 1])} at position {at + 1}: engine "
                    f"{float(sample.rollout_log_probs[at]):.6f}, trainer {float(sample.log_probs[at]):.6f}"
                )
        self.weight_gap = comm.all_reduce_max(worst)
        if self.weight_gap > WEIGHT_TOLERANCE[self.dtype]:
            raise RuntimeError(
                f"--verify_weight_sync: engine and trainer disagree by {worst:.6f} on this rank, "
                f"{self.weight_gap:.6f} on the worst; {self.dtype} explains {WEIGHT_TOLERANCE[self.dtype]}; {where}"
            )

    def _reward(self, samples: Sequence[Sample]) -> None:
        """Call the reward function once for this rank's samples and store what it returns."""
        if not samples:
            return
        prompts = [self.prompts[s.row] for s in samples]
        responses = [self.response_text(s) for s in samples]
        output = self.reward_fn(
            queries=[p.prompt + response for p, response in zip(prompts, responses, strict=True)],
            prompts=[p.prompt for p in prompts],
            labels=[p.label for p in prompts],
            columns=_columns(prompts),
            sample_ids=[f"row {s.row + 1}, sample {s.index}" for s in samples],
        )
        for i, sample in enumerate(samples):
            sample.rewards = float(output.rewards[i])
            sample.score = float(output.scores[i]) if output.scores is not None else sample.rewards
            sample.info = {name: float(values[i]) for name, values in output.extra_logs.items()}

    def response_text(self, sample: Sample) -> str:
        """What reward functions see of a response: its text with special tokens, without the EOS that ended it."""
        ids = sample.sequence[len(sample.sequence) - sample.num_sampled :].tolist()
        if ids and sample.finish_reason == "stop" and ids[-1] in self.eos_ids:
            ids = ids[:-1]
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def _informative(self, samples: list[Sample]) -> list[Sample]:
        """Samples of groups whose mean score is inside --dynamic_filtering_range."""
        if not samples:
            return []
        scores = torch.tensor([s.score for s in samples], dtype=torch.float64)
        ids = torch.tensor([s.group_id for s in samples])
        keep = group_is_informative(scores, ids, *self.config.algo.dynamic_filtering_range)
        return [s for s, k in zip(samples, keep.tolist(), strict=True) if k]

    def _cut_to_batch(self, kept: list[Sample]) -> tuple[list[Sample], bool]:
        """Keep the first `rollout_batch_size` groups of all ranks; whether there are that many."""
        size = self.config.rollout.rollout_batch_size
        groups = sorted({g for share in comm.all_gather_object({s.group_id for s in kept}) for g in share})
        chosen = set(groups[:size])
        return [s for s in kept if s.group_id in chosen], len(groups) >= size

    def _shaped_rewards(self, samples: Sequence[Sample]) -> torch.Tensor:
        """(B,) rewards of this rank's samples after penalties and the group baseline, taken over all ranks."""
        rows = [(s.group_id, s.index, s.rewards, s.response_length, s.truncated, s.greedy_reward) for s in samples]
        everything = sorted(row for share in comm.all_gather_object(rows) for row in share)
        ids, indices, rewards, lengths, truncated, greedy = zip(*everything, strict=True)
        length = torch.tensor(lengths)
        reward = self._penalised(torch.tensor(rewards, dtype=torch.float32), length, torch.tensor(truncated))
        shaped = shape_rewards(
            reward,
            torch.tensor(ids),
            self.estimator,
            lengths=length,
            greedy_rewards=torch.tensor(greedy, dtype=torch.float32) if self.estimator.needs_greedy else None,
        )
        place = {key: i for i, key in enumerate(zip(ids, indices, strict=True))}
        return shaped[[place[s.group_id, s.index] for s in samples]]

    def _penalised(self, rewards: torch.Tensor, lengths: torch.Tensor, truncated: torch.Tensor) -> torch.Tensor:
        algo = self.config.algo
        if algo.stop_properly_penalty_coef is not None:
            coef = algo.stop_properly_penalty_coef
            rewards = stop_properly_penalty(rewards, truncated, stop_properly_penalty_coef=coef)
        if algo.overlong_buffer_len is not None:
            rewards = rewards + bind(overlong_penalty, algo, self.config.rollout)(lengths)
        return rewards

    @torch.no_grad()
    def _forward(self, model: Any, samples: Sequence[Sample], name: str, progress: Any = None) -> None:
        """Store the model's log-probs of `samples` as field `name`; ranks make equal numbers of forwards."""
        lengths = [s.num_tokens for s in samples]
        size = self.config.rollout.micro_rollout_batch_size
        batches = plan_micro_batches(lengths, num_ranks=1, micro_batch_size=size)[0]
        missing = int(comm.all_reduce_max(len(batches))) - len(batches)
        for batch in batches + [[] for _ in range(missing)]:
            part = [samples[i] for i in batch]
            exp = collate(part).to(comm.device())
            log_probs, _ = model(exp.sequences, exp.action_mask)
            if part:
                scatter(part, name, log_probs)
            if progress is not None:
                progress.update(len(part))

    def _sample_row(self, sample: Sample) -> dict[str, Any]:
        prompt = self.prompts[sample.row]
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


def build_engine(config: PPOConfig, tokenizer: Any, *, dtype: torch.dtype) -> RolloutEngine:
    """The engine of --engine; built before the models, so that vLLM measures a device that is still free."""
    rollout, model = config.rollout, config.model
    has_vllm = importlib.util.find_spec("vllm") is not None
    if rollout.engine == "vllm" and not has_vllm:
        raise UserError("--engine vllm: vLLM is not installed: pip install vllm, or use --engine hf")
    if rollout.engine == "hf" or not has_vllm:
        from spmdrl.rollout.hf_engine import HFEngine

        if rollout.engine == "auto":
            comm.say("vLLM is not installed: sampling with Hugging Face generate, which is several times slower")
        size = rollout.micro_rollout_batch_size
        return HFEngine(load_causal_lm(model, dtype=dtype), tokenizer, device=comm.device(), batch_size=size)
    from spmdrl.rollout.vllm_engine import VLLMEngine

    share = -(-rollout.rollout_batch_size // comm.world_size()) * rollout.vllm_tensor_parallel_size
    engine = VLLMEngine(
        str(model.pretrain),
        rollout,
        dtype=dtype,
        max_len=config.max_total_len,
        max_samples=share * rollout.n_samples_per_prompt,
        weight_names=checkpoint_weight_names(model),
        trust_remote_code=model.trust_remote_code,
    )
    engine.sleep()
    return engine


def rollout_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Means over the samples of all ranks."""
    rewards = torch.tensor([s.rewards for s in samples], dtype=torch.float64)
    lengths = torch.tensor([s.num_sampled for s in samples], dtype=torch.float64)
    groups: dict[int, set[float]] = {}
    for sample in samples:
        groups.setdefault(sample.group_id, set()).add(sample.rewards)
    metrics = {
        "rollout/reward": float(rewards.mean()),
        "rollout/reward_std": float(rewards.std(correction=0)),
        "rollout/response_length": float(lengths.mean()),
        "rollout/truncated": sum(s.truncated for s in samples) / len(samples),
        "rollout/flat_groups": sum(len(values) == 1 for values in groups.values()) / len(groups),
        "rollout/num_tokens": float(lengths.sum()),
        "rollout/num_samples": float(len(samples)),
    }
    for name in samples[0].info:
        metrics[f"rollout/{name}"] = sum(s.info[name] for s in samples) / len(samples)
    return metrics


def _columns(prompts: Sequence[Prompt]) -> dict[str, list]:
    names = list(dict.fromkeys(name for p in prompts for name in p.columns))
    return {name: [p.columns.get(name) for p in prompts] for name in names}


def _seed_everything(seed: int, full_determinism: bool) -> None:
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if full_determinism:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def main(config: PPOConfig) -> None:
    """What cli/train_ppo.py runs on every rank."""

    def program() -> None:
        quiet_libraries(is_main=comm.is_main())
        PPOTrainer(config).fit()

    guard.run(program, config.deepspeed.local_rank)
