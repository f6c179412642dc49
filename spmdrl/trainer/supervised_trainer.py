"""SFT, reward models, DPO, KTO and distillation: the loop that every rank runs."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from spmdrl.config import DeepSpeedConfig, save_config, to_flat_dict
from spmdrl.config.sizes import warmup_steps
from spmdrl.config.supervised import SupervisedConfig
from spmdrl.data.rendering import plain_text_note
from spmdrl.data.sampler import PromptSampler, SamplerNames
from spmdrl.data.supervised import SupervisedSet, build_set, load_eval_rows, load_train_rows, make_shape
from spmdrl.distributed import comm, guard, preemption
from spmdrl.distributed.engine_state import EngineState
from spmdrl.distributed.strategy import Strategy
from spmdrl.errors import UserError
from spmdrl.experience import Sample
from spmdrl.models.loading import checkpoint_eos_token_ids
from spmdrl.models.tokenizer import load_tokenizer, pad_token_apart_from
from spmdrl.quiet import quiet_libraries
from spmdrl.tracking import Tracker
from spmdrl.trainer.build import device_dtype, seed_everything
from spmdrl.trainer.checkpoint import Shards
from spmdrl.trainer.export import hf_config_to_save, save_hf, saved_dtype
from spmdrl.trainer.fingerprints import describe
from spmdrl.trainer.forward_check import check_forward
from spmdrl.trainer.objectives import Objective, Setting, row_chunks
from spmdrl.trainer.saving import Saver, fit
from spmdrl.trainer.update import Metrics, add_metrics, optimizer_step

EVALUATED_ROWS = 256  # of all ranks at a time: enough to find sequences of similar length
NAMES = SamplerNames(rows="rows", batch="--train_batch_size", episodes="--max_epochs")


class SupervisedTrainer:
    """Trains one model on rows; the same statements run on every rank."""

    def __init__(self, config: SupervisedConfig, objective: Objective):
        self.config, self.objective = config, objective
        optim = config.optim
        self.save_path = Path(config.checkpoint.save_path).expanduser().absolute()  # whatever directory it is later
        seed_everything(config.seed, config.full_determinism)
        self.dtype = device_dtype(config)
        self.tokenizer = load_tokenizer(config.model)
        if note := plain_text_note(config.data, self.tokenizer):
            comm.say(note)
        self.end_ids = checkpoint_eos_token_ids(config.model, self.tokenizer)
        self.train_set, self.eval_set = self._load_sets()
        self.sampler = PromptSampler(
            len(self.train_set),
            optim.train_batch_size,
            seed=config.seed,
            num_episodes=optim.max_epochs,
            keeps_rest=True,
            names=NAMES,
        )
        self.total_steps = len(self.sampler)
        self.warmup_steps = warmup_steps(self.total_steps, optim.lr_warmup_ratio)
        every = config.eval.eval_steps
        self.eval_every = self.sampler.steps_per_episode if every == -1 else every
        for line in self._description():
            comm.say(line)
        description, keeps_best = describe(config, dataset=self.train_set), self.eval_set is not None
        self.saver = Saver(self, config.checkpoint, description, keeps_best=keeps_best)
        self.tracker = Tracker(
            config.tracking,
            save_path=config.checkpoint.save_path,
            run_config=to_flat_dict(config),
            is_main=comm.is_main(),
            total_steps=self.total_steps,
            resume_step=self.saver.resume_step,
            program=config.program,
        )
        deepspeed = DeepSpeedConfig(**asdict(config.deepspeed), ref_reward_offload=config.offloads_frozen_models)
        self.strategy = Strategy(deepspeed, optim, dtype=self.dtype)
        sets = [rows for rows in (self.train_set, self.eval_set) if rows is not None]
        setting = Setting(self.strategy, sets, self.tokenizer, self.phase)
        objective.prepare(setting)
        self.engine = self.strategy.trainable(
            objective.load_model(setting),
            learning_rate=optim.learning_rate,
            total_steps=self.total_steps,
            warmup_steps=self.warmup_steps,
        )
        check_forward(self.engine, f"--pretrain {config.model.pretrain}")
        self.hf_config = self._read_hf_config()
        self.step = 0  # optimizer steps taken
        self.updates = None  # since then: there is nothing in the middle of an optimizer step
        self.eval_metrics: dict[str, float] = {}  # of the last evaluation
        self.saver.restore()
        if comm.is_main():
            save_config(config, self.save_path / "config.yaml")

    def _load_sets(self) -> tuple[SupervisedSet, SupervisedSet | None]:
        data, objective = self.config.data, self.objective
        render = objective.renderer(make_shape(data, self.tokenizer, self.end_ids))
        train, held_out = (
            None
            if rows is None
            else build_set(rows, render, data, self.tokenizer, group_size=objective.group_size, end_ids=self.end_ids)
            for rows in (load_train_rows(data, seed=self.config.seed), load_eval_rows(data, seed=self.config.seed))
        )
        assert train is not None
        wanted = {"eval_on_start": self.config.eval.eval_on_start, "eval_steps": self.config.eval.eval_steps != -1}
        if held_out is None and (flags := [f"--{name}" for name, is_given in wanted.items() if is_given]):
            raise UserError(f"{flags[0]}: there are no held-out rows; give --eval_dataset, or leave it out")
        return train, held_out

    def _description(self) -> list[str]:
        optim = self.config.optim
        ranks = f"{comm.world_size()} rank{'s' * (comm.world_size() > 1)}"
        held_out = self.eval_set.describe() if self.eval_set else "none, give --eval_dataset to evaluate"
        rest = f", {len(self.train_set) % optim.train_batch_size or optim.train_batch_size} in an epoch's last"
        return [
            f"training: {self.train_set.describe()}",
            f"held out: {held_out}",
            f"run: {self.total_steps} steps of {optim.train_batch_size} rows{rest}, {optim.max_epochs} "
            f"epoch{'s' * (optim.max_epochs > 1)} of {self.sampler.steps_per_episode}, over {ranks}",
            f"learning rate: up to {optim.learning_rate:g} in {self.warmup_steps} steps, then {optim.lr_scheduler} "
            f"over the other {self.total_steps - self.warmup_steps}",
        ]

    # ---- the loop -------------------------------------------------------------------------------------------------
    def fit(self) -> None:
        with self.saver.saved_when_stopped():
            preemption.safe_point()  # from here on a signal is answered with a checkpoint
            if self.eval_set is not None and self.config.eval.eval_on_start and self.step == 0:
                self.tracker.log(self.evaluate(self.eval_set), 0)
            for rows in self.sampler:
                guard.set_step(self.step + 1)
                samples = self.train_set.samples(rows)  # all ranks', of which each takes its micro-batches
                self.saver.finish()
                metrics = self.train(samples)
                self.finish_step(metrics)  # evaluation, logs, checkpoint
            self.saver.finish()
            with self.saver.saved_when_refused(), self.phase("save"):
                self.export(self.save_path, "--save_path")
        self.tracker.close()
        self.saver.finish_run(self.save_path)

    def train(self, samples: Sequence[Sample]) -> dict[str, float]:
        """One optimizer step; its metrics over all ranks."""
        with self.phase("train") as progress:
            parts = self.objective.parts(self.engine, samples)
            size = self.config.optim.micro_train_batch_size
            report = optimizer_step(self.strategy, self.engine, parts, micro_batch_size=size, role="train")
        same_everywhere = {f"train/{name}": report.pop(name) for name in ("grad_norm", "lr")}
        metrics = self._over_ranks({name: torch.tensor(value) for name, value in report.items()}, "train")
        num_tokens = sum(s.num_tokens for s in samples)
        metrics |= same_everywhere
        return metrics | {"perf/train_tokens_per_s": num_tokens / max(progress.seconds, 1e-9)}

    def finish_step(self, metrics: dict[str, float]) -> None:
        step = self.step + 1
        self.tracker.log(metrics, step)
        if self.eval_set is not None and (step % self.eval_every == 0 or step == self.total_steps):
            self.eval_metrics = self.evaluate(self.eval_set)
            self.tracker.log(self.eval_metrics, step)
            self.saver.keep_best(step, -self.eval_metrics["eval/loss"])
        self.step = step
        self.saver.settle()
        with self.phase("save"):
            self.saver.save_if_due()

    def evaluate(self, rows: SupervisedSet) -> dict[str, float]:
        """The metrics of all held-out rows, as if they were one step. A collective."""
        counts, totals = self.objective.counts(rows), dict[str, torch.Tensor]()
        with self.phase("evaluate", len(rows)) as progress, torch.no_grad():
            for samples in row_chunks(rows, EVALUATED_ROWS):
                for part in self.objective.parts(self.engine, samples):
                    for exp in part.micro_batches(self.config.optim.micro_train_batch_size):
                        add_metrics(totals, part.loss(self.engine, exp, counts)[1])
                progress.update(len(samples) // rows.group_size)
        return self._over_ranks(totals, "eval")

    def _over_ranks(self, metrics: Metrics, prefix: str) -> dict[str, float]:
        """Sums over ranks of metrics that are divided by counts of all ranks, under their logged names."""
        names = sorted(metrics)
        values = torch.stack([metrics[name].detach().cpu().double() for name in names])
        totals = comm.all_reduce_sum(values).tolist()
        plain = {name.removeprefix("step/"): total for name, total in zip(names, totals, strict=True)}
        return {f"{prefix}/{name}": value for name, value in self.objective.summary(plain).items()}

    def _read_hf_config(self) -> Any:
        """Of what is saved: now, while --pretrain is where it was said to be."""
        model, dtype = self.config.model, saved_dtype(self.config.checkpoint, self.dtype)
        labels = {} if self.objective.num_labels is None else {"num_labels": self.objective.num_labels}
        return hf_config_to_save(str(model.pretrain), model, dtype=dtype, **labels)

    def export(self, folder: Path, flag: str) -> None:
        """The trained model. A reward model's config has the statistics of the last evaluation."""
        objective, tokenizer, own = self.objective, self.tokenizer, copy.deepcopy(self.hf_config)
        if objective.num_labels is not None:
            tokenizer = copy.deepcopy(tokenizer)
            own.get_text_config().pad_token_id = pad_token_apart_from(tokenizer, self.end_ids)
            for name, value in self._reward_statistics().items():
                setattr(own, name, value)
        prefix = objective.value_head_prefix
        save_hf(self.engine, tokenizer, folder, hf_config=own, value_head_prefix=prefix, flag=flag)

    def _reward_statistics(self) -> dict[str, float]:
        """Mean and standard deviation of the held-out scores, under OpenRLHF's names in a config."""
        names = {"mean": "eval/reward_mean", "std": "eval/reward_std"}
        return {name: self.eval_metrics[metric] for name, metric in names.items() if metric in self.eval_metrics}

    # ---- what is saved (trainer/saving.py) -------------------------------------------------------------------------
    def shards(self) -> dict[str, Shards]:
        return {"model": EngineState(self.engine)}

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "sampler": self.sampler.state_dict(), "eval_metrics": self.eval_metrics}

    def work_state(self) -> tuple[Any, Any]:
        return None, None

    def load_state_dict(self, state: dict[str, Any], work: Any, work_of_ranks: list[Any]) -> None:
        self.step, self.eval_metrics = state["step"], state["eval_metrics"]
        self.sampler.load_state_dict(state["sampler"])

    @contextmanager
    def phase(self, name: str, total: int | None = None) -> Iterator[Any]:
        """Progress, timing, and the name that an error reports."""
        guard.set_phase(name)
        with self.tracker.phase(name, total) as progress:
            yield progress


def main(config: SupervisedConfig, objective: Objective) -> None:
    """What the supervised programs of cli/ run on every rank."""

    def program() -> None:
        quiet_libraries(is_main=comm.is_main())
        fit(lambda: SupervisedTrainer(config, objective), config.checkpoint.save_path)

    guard.run(program, config.deepspeed.local_rank, config.stopping)
