"""Prompts in, samples out."""

from collections.abc import Sequence
from dataclasses import replace

from spmdrl.data.prompts import Prompt
from spmdrl.distributed import preemption
from spmdrl.experience import Sample, make_sample
from spmdrl.rollout.engine import Completion, Request, RolloutEngine, SamplingOptions, sampling_seed

PROBE_TOKENS = 8


class Collector:
    """Samples `n_samples_per_prompt` responses to each prompt, reproducibly on any number of ranks.

    Another `stream` draws other responses with the same seed.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        options: SamplingOptions,
        *,
        n_samples_per_prompt: int,
        seed: int,
        stream: str = "rollout",
    ):
        self.engine, self.options = engine, options
        self.n, self.seed, self.stream = n_samples_per_prompt, seed, stream

    def collect(self, prompts: Sequence[Prompt], group_ids: Sequence[int], step: int) -> list[Sample]:
        """This rank's samples, in the order of `prompts`; one call of the engine. All ranks call it together."""
        return self._sample(prompts, group_ids, step=step, n=self.n, options=self.options)

    def collect_greedy(self, prompts: Sequence[Prompt], group_ids: Sequence[int]) -> list[Sample]:
        """The most likely response to each prompt, the baseline of remax."""
        return self._sample(prompts, group_ids, step=0, n=1, options=replace(self.options, temperature=0.0))

    def collect_probe(self, prompts: Sequence[Prompt]) -> list[Sample]:
        """A short response to each prompt, the same at every step, for comparing log-probs: nothing is cut away from
        the distribution, since the trainer's log-probs are those of the whole one."""
        options = replace(
            self.options,
            max_new_tokens=min(PROBE_TOKENS, self.options.max_new_tokens),
            min_new_tokens=1,
            stop=(),
            top_p=1.0,
            top_k=-1,
        )
        return self._sample(prompts, range(len(prompts)), step=0, n=1, options=options)

    def _sample(
        self, prompts: Sequence[Prompt], group_ids: Sequence[int], *, step: int, n: int, options: SamplingOptions
    ) -> list[Sample]:
        requests = [
            Request(prompt.prompt_ids, sampling_seed(self.seed, step, group_id, index, self.stream))
            for prompt, group_id in zip(prompts, group_ids, strict=True)
            for index in range(n)
        ]
        completions = self.engine.generate(requests, options)
        preemption.safe_point()  # beyond it nothing was cut short
        assert len(completions) == len(requests), f"{len(completions)} completions of {len(requests)} requests"
        return [
            to_sample(prompts[i // n], completion, group_id=group_ids[i // n], index=i % n)
            for i, completion in enumerate(completions)
        ]


def to_sample(prompt: Prompt, completion: Completion, *, group_id: int, index: int) -> Sample:
    return make_sample(
        prompt.prompt_ids,
        completion.token_ids,
        completion.log_probs,
        finish_reason=completion.finish_reason,
        group_id=group_id,
        index=index,
        row=prompt.row,
    )
