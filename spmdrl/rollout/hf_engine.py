"""Sampling with Hugging Face generate on a replica of the policy that this rank owns whole."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from spmdrl.distributed import preemption, whereabouts
from spmdrl.distributed.weight_sync import copy_into
from spmdrl.models.loading import eos_token_ids
from spmdrl.rollout.engine import Completion, Request, SamplingOptions


class HFEngine:
    """A replica of the policy, so that no token of a response waits for another rank.

    Generating from ZeRO-3 shards would gather every layer for every token and keep all ranks in one loop; a replica
    is filled once a step, and ranks may then have responses of any number and length. A batch holds samples of one
    prompt only: there is no padding and the same seed draws the same tokens on any number of ranks.
    """

    name = "hf"
    own_forward = True

    def __init__(self, model: Any, tokenizer: Any, *, device: torch.device, batch_size: int):
        self.model = model.to(device).eval().requires_grad_(False)
        self.tokenizer, self.device, self.batch_size = tokenizer, device, batch_size
        self.eos_ids = eos_token_ids(model, tokenizer)
        # The checkpoint's would add penalties, forced and suppressed tokens, beams, a time limit to what is asked for.
        self.model.generation_config = GenerationConfig()

    @torch.no_grad()
    def generate(self, requests: Sequence[Request], options: SamplingOptions) -> list[Completion]:
        completions: list[Completion] = []
        start = 0
        while start < len(requests) and not preemption.requested():
            end = start + 1
            while (
                end < len(requests)
                and end - start < self.batch_size
                and requests[end].prompt_ids == requests[start].prompt_ids
            ):
                end += 1
            completions += self._generate_batch(requests[start:end], options)
            start = end
        return completions

    def _generate_batch(self, batch: Sequence[Request], options: SamplingOptions) -> list[Completion]:
        prompt = torch.tensor([list(r.prompt_ids) for r in batch], device=self.device)
        greedy = options.temperature == 0
        sampler = _SeededSampler([r.seed for r in batch], self.device, greedy=greedy)
        stops = _StopStrings(self.tokenizer, options, prompt.shape[1]) if options.stop else None
        out = self.model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=options.room_after(prompt.shape[1]),
            eos_token_id=self.eos_ids or None,
            pad_token_id=self.eos_ids[0] if self.eos_ids else 0,
            logits_processor=LogitsProcessorList([*self._processors(options, prompt.shape[1]), sampler]),
            stopping_criteria=StoppingCriteriaList([_RequestToStop(), *([stops] if stops else [])]),
        )
        stopped = stops.ends if stops and stops.ends is not None else torch.zeros(len(batch))
        ended = [self._end(out[i, prompt.shape[1] :].tolist(), int(stopped[i])) for i in range(len(batch))]
        log_probs = torch.stack(sampler.log_probs, dim=1)
        return [
            Completion(out[i, prompt.shape[1] :][:n].tolist(), log_probs[i, :n].tolist(), reason)
            for i, (n, reason) in enumerate(ended)
        ]

    def _processors(self, options: SamplingOptions, prompt_len: int) -> list[LogitsProcessor]:
        steps: list[LogitsProcessor] = []
        if options.min_new_tokens > 1 and self.eos_ids:
            steps.append(
                MinNewTokensLengthLogitsProcessor(prompt_len, options.min_new_tokens, self.eos_ids, str(self.device))
            )
        if options.temperature not in (0.0, 1.0):
            steps.append(TemperatureLogitsWarper(options.temperature))
        if options.top_k > 0:
            steps.append(TopKLogitsWarper(options.top_k))
        if options.top_p < 1.0:
            steps.append(TopPLogitsWarper(options.top_p))
        return steps

    def _end(self, response: list[int], stopped: int) -> tuple[int, str]:
        """(length, finish reason) of a row, padded after its end; `stopped`: its length up to a stop string, or 0."""
        at_eos = next((n for n, token in enumerate(response, start=1) if token in self.eos_ids), 0)
        ends = [n for n in (at_eos, stopped) if n]
        return (min(ends), "stop") if ends else (len(response), "length")

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        copy_into(self.model, weights)

    def reset_prefix_cache(self) -> bool:
        return True  # every generate starts from an empty cache

    def sleep(self) -> None:
        if self.device.type == "cuda":
            self.model.to("cpu")
            torch.cuda.empty_cache()

    def wake_up(self, tags: Sequence[str]) -> None:
        if "weights" in tags:
            self.model.to(self.device)


class _RequestToStop(StoppingCriteria):
    """Ends all rows when the run is to stop; until then every token is a sign of progress."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        whereabouts.beat()
        return torch.full((len(input_ids),), preemption.requested(), device=input_ids.device)


class _StopStrings(StoppingCriteria):
    """Ends rows whose response, not the prompt before it, ends in a stop string; after --generate_min_len tokens."""

    def __init__(self, tokenizer: Any, options: SamplingOptions, prompt_len: int):
        self.inner = StopStringCriteria(tokenizer, list(options.stop))
        self.prompt_len, self.min_len = prompt_len, options.min_new_tokens
        self.ends: Tensor | None = None  # (rows,) response length up to the first stop string, 0 without one

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        response = input_ids[:, self.prompt_len :]
        found = self.inner(response, scores)
        if self.min_len > 1 and response.shape[1] <= self.min_len:
            found = torch.zeros_like(found)
        ends = torch.zeros_like(found, dtype=torch.int64) if self.ends is None else self.ends
        self.ends = torch.where(found & (ends == 0), response.shape[1], ends)
        return found


class _SeededSampler(LogitsProcessor):
    """Draws each row's next token with that row's own generator and leaves only this token possible.

    argmax(log p + Gumbel noise) is a sample of p (Gumbel, 1954), so greedy search over what is left draws it. The
    log-probs recorded are those of the distribution after temperature and filters, in fp32.
    """

    def __init__(self, seeds: Sequence[int], device: torch.device, *, greedy: bool):
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.log_probs: list[Tensor] = []
        self.device, self.greedy = device, greedy

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        log_p = torch.log_softmax(scores.float(), dim=-1)
        keys = log_p if self.greedy else log_p - self._noise(log_p.shape[-1]).log()
        picked = keys.argmax(dim=-1, keepdim=True)
        self.log_probs.append(log_p.gather(-1, picked)[:, 0].cpu())
        return torch.full_like(scores, float("-inf")).scatter(-1, picked, 0.0)

    def _noise(self, size: int) -> Tensor:
        """(rows, size) draws of the exponential distribution, whose -log is Gumbel noise."""
        rows = [torch.empty(size).exponential_(generator=generator) for generator in self.generators]
        return torch.stack(rows).to(self.device)
