"""Batch generation: responses to all prompts of a data set, of which all, the best or the best and worst are kept."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from spmdrl.config import OptimConfig
from spmdrl.config.generate import GenerateConfig, OutputConfig
from spmdrl.data.batching import split_evenly
from spmdrl.data.prompts import PromptDataset, render_prompts
from spmdrl.data.readers import Row
from spmdrl.data.rendering import plain_text_note
from spmdrl.data.sources import Rows, load_rows
from spmdrl.distributed import comm, guard, preemption
from spmdrl.distributed.strategy import Strategy
from spmdrl.errors import UserError
from spmdrl.experience import Sample
from spmdrl.models.loading import checkpoint_eos_token_ids
from spmdrl.models.tokenizer import load_tokenizer
from spmdrl.quiet import quiet_libraries
from spmdrl.rewards.combined import combine, load_rewards
from spmdrl.rewards.source import RewardSource
from spmdrl.rollout.collector import Collector
from spmdrl.rollout.engine import SamplingOptions
from spmdrl.trainer.build import build_engine, build_reward_models, device_dtype, seed_everything
from spmdrl.trainer.fingerprints import describe
from spmdrl.trainer.output_file import OutputFile, Result, Tally, to_json
from spmdrl.trainer.rewarding import reward_samples, split_ending


# ---- what is kept of a prompt's responses ---------------------------------------------------------------------------
@dataclass(frozen=True)
class Response:
    """One response to a prompt, without the EOS that ended it."""

    text: str
    finish_reason: str
    reward: float | None = None  # None without a source of rewards


# Responses to one prompt -> the rows that are kept: their new columns, and the responses in them.
PostProcessor = Callable[[Sequence[Response], OutputConfig], list[tuple[Row, list[Response]]]]


def every_response(responses: Sequence[Response], output: OutputConfig) -> list[tuple[Row, list[Response]]]:
    """A row for each."""
    return [(_columns(response, output), [response]) for response in responses]


def rejection_sampling(responses: Sequence[Response], output: OutputConfig) -> list[tuple[Row, list[Response]]]:
    """A row for the response with most reward, the first of several; none below --reward_threshold."""
    best = max(responses, key=_reward)
    if output.reward_threshold is not None and _reward(best) < output.reward_threshold:
        return []
    return [(_columns(best, output), [best])]


def preference_pair(responses: Sequence[Response], output: OutputConfig) -> list[tuple[Row, list[Response]]]:
    """A row for the best and the worst response; none where there is nothing to choose between them."""
    best, worst = max(responses, key=_reward), min(responses, key=_reward)
    if best.reward == worst.reward or best.text == worst.text:
        return []
    sides = {output.chosen_key: best, output.rejected_key: worst}
    texts = {key: response.text for key, response in sides.items()}
    rewards = {f"{key}_{output.reward_key}": response.reward for key, response in sides.items()}
    return [(texts | rewards, [best, worst])]


def _reward(response: Response) -> float:
    assert response.reward is not None, "a response without a reward is compared"
    return response.reward


def _columns(response: Response, output: OutputConfig) -> Row:
    rewards = {} if response.reward is None else {output.reward_key: response.reward}
    return {output.output_key: response.text, **rewards, f"{output.output_key}_finish_reason": response.finish_reason}


POST_PROCESSORS: dict[str | None, PostProcessor] = {
    None: every_response,
    "rs": rejection_sampling,
    "iter_dpo": preference_pair,
}


# ---- the run --------------------------------------------------------------------------------------------------------
class Generation:
    """Samples, rewards and writes, round by round; the same statements run on every rank."""

    def __init__(self, config: GenerateConfig):
        self.config = config
        self.post_process = POST_PROCESSORS[config.output.post_processor]
        seed_everything(config.seed, full_determinism=False)
        self.dtype = device_dtype(config)
        self.tokenizer = load_tokenizer(config.model)
        if note := plain_text_note(config.data, self.tokenizer):
            comm.say(note)
        self.prompts = self._load_prompts()
        comm.say(self.prompts.describe())
        path = Path(str(config.output.output_path)).expanduser()
        description = describe(config, dataset=self.prompts)
        self.output = OutputFile(path, description, num_prompts=len(self.prompts))
        size = config.sampling.rollout_batch_size
        starts = range(0, len(self.prompts), size)
        rounds = [range(start, min(start + size, len(self.prompts))) for start in starts]
        self.rounds = rounds[self.output.num_rounds :]  # that are left
        if len(self.rounds) < len(rounds):
            comm.say(f"resuming: {self.output.num_rounds} of {len(rounds)} rounds are in {self.output.partial}")
        if self.rounds:
            self._build()

    def _load_prompts(self) -> PromptDataset:
        data = self.config.data
        rows = load_rows(
            str(data.dataset),
            None,
            split=data.dataset_split,
            max_samples=data.max_samples,
            seed=self.config.seed,
            flag="--dataset",
        )
        check_new_columns(rows, self.config)
        return render_prompts(rows, self.config.prompts, self.tokenizer)

    def _build(self) -> None:
        config = self.config
        self.eos_ids = set(checkpoint_eos_token_ids(config.model, self.tokenizer))
        rewards = load_rewards(config.reward, batch_size=config.sampling.micro_rollout_batch_size)
        for source in rewards.values():
            source.check_columns(list(self.prompts[0].columns))
        self.collector = Collector(
            build_engine(config, self.tokenizer, dtype=self.dtype),
            SamplingOptions.from_config(config.rollout),
            n_samples_per_prompt=config.sampling.n_samples_per_prompt,
            seed=config.seed,
            stream="generate",
        )
        strategy = Strategy(config.deepspeed, OptimConfig(), dtype=self.dtype)
        prefix = config.value_head_prefix
        models = build_reward_models(config, strategy, self.tokenizer, value_head_prefix=prefix)
        for name, model in models.items():
            if config.reward.normalize_reward and not model.normalizes:
                raise UserError(f"--normalize_reward: the config of --reward_pretrain {name} has no mean and std")
        sources = {**models, **rewards}
        self.reward_fn: RewardSource | None = combine(sources, config.reward.reward_weights) if sources else None

    def run(self) -> None:
        with self.output.kept_when_stopped():
            preemption.safe_point()  # from here on a signal is answered by saying where the run goes on
            for number, rows in enumerate(self.rounds, self.output.num_rounds + 1):
                guard.set_step(number)
                samples = self.sample(rows)  # this rank's
                self.reward(samples)
                self.output.add(self.results(samples))
        guard.set_phase("save")
        for line in self.summary(self.output.finish()):
            comm.say(line)

    def sample(self, rows: range) -> list[Sample]:
        """Responses to this rank's share of the prompts, in their order."""
        guard.set_phase("generate")
        mine = split_evenly(rows, comm.world_size())[comm.rank()]
        return self.collector.collect([self.prompts[i] for i in mine], mine, step=0)

    def reward(self, samples: Sequence[Sample]) -> None:
        guard.set_phase("reward")
        if self.reward_fn is not None:
            reward_samples(samples, [self.prompts[s.row] for s in samples], self.reward_fn, self._parts)

    def results(self, samples: Sequence[Sample]) -> list[Result]:
        """What is kept of the responses to each prompt."""
        return [self._result(row, list(group)) for row, group in groupby(samples, key=lambda sample: sample.row)]

    def _result(self, row: int, samples: Sequence[Sample]) -> Result:
        responses = [
            Response(self._parts(s)[0], s.finish_reason, s.rewards if self.reward_fn is not None else None)
            for s in samples
        ]
        source = self.prompts.source_row(row)
        kept = self.post_process(responses, self.config.output)
        return Result(
            lines=[self._line(row, {**source, **columns}) for columns, _ in kept],
            rewards=[r.reward for r in responses if r.reward is not None],
            kept_rewards=[r.reward for _, found in kept for r in found if r.reward is not None],
            num_truncated=sum(s.truncated for s in samples),
        )

    def _line(self, row: int, columns: Row) -> str:
        try:
            return to_json(columns)
        except TypeError as error:
            where = self.prompts.where(row)
            raise UserError(f"{where}: a column holds {error}, which JSON lines have no form for: drop it") from None

    def _parts(self, sample: Sample) -> tuple[str, str]:
        return split_ending(sample, self.tokenizer, self.eos_ids)

    def summary(self, tally: Tally) -> list[str]:
        """What was written and what was not."""
        output, n = self.config.output, self.config.sampling.n_samples_per_prompt
        num_responses = tally.num_prompts * n
        left_out = ""
        if tally.num_left_out:
            threshold = f"no response with a reward of {output.reward_threshold} or more"
            reason = threshold if output.post_processor == "rs" else "equally good responses"
            left_out = f"; {tally.num_left_out} prompts left out, with {reason}"
        lines = [f"{tally.num_lines} rows for {tally.num_prompts} prompts in {output.output_path}{left_out}"]
        lines[0] += f"; {tally.num_truncated} of {num_responses} responses cut at --max_new_tokens"
        if tally.num_rewards:
            mean = tally.sum_rewards / tally.num_rewards
            chosen = output.post_processor is not None and tally.num_lines > 0
            kept = f", {tally.sum_kept_rewards / tally.num_kept_rewards:.4g} of those kept" if chosen else ""
            lines.append(f"mean reward: {mean:.4g} over {tally.num_rewards} responses{kept}")
        return lines


def check_new_columns(rows: Rows, config: GenerateConfig) -> None:
    """Raise UserError where the data has a column of the name of one that is added."""
    for index, row in enumerate(rows):
        for name in config.new_columns:
            if name in row:
                keys = "--output_key, --reward_key, --chosen_key, --rejected_key name the columns that are added"
                raise UserError(f"{rows.where(index)} has a column {name!r} already, which would be lost; {keys}")


def main(config: GenerateConfig) -> None:
    """What cli/generate.py runs on every rank."""

    def program() -> None:
        quiet_libraries(is_main=comm.is_main())
        Generation(config).run()

    guard.run(program, config.local_rank, config.stopping)
