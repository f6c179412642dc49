"""Rewards from a reward model inside this process, frozen, scored at the last real token of prompt + response."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from spmdrl.data.batching import plan_micro_batches
from spmdrl.data.rendering import TEMPLATE_ERRORS, TOOLS, ChatRenderer
from spmdrl.distributed import comm, preemption
from spmdrl.errors import UserError
from spmdrl.experience import pad
from spmdrl.models.packing import shares_prompts
from spmdrl.models.tokenizer import encode_texts
from spmdrl.rewards.function import read_numbers
from spmdrl.rewards.source import RewardBatch, RewardOutput

Encoder = Callable[[RewardBatch], Sequence[Tensor]]  # the ids that a reward model reads, (S,) int64 each


class ModelReward:
    """A reward model as a reward source.

    score: (sequences, their prompts) -> (B,) fp32, which all ranks call together. normalization: mean and standard
    deviation of its scores, to be taken out of them, or None. max_len: most tokens that the model reads, None for no
    bound. knows_policy_ids: its tokenizer has the policy's vocabulary.
    """

    def __init__(
        self,
        where: str,
        score: Callable[[Sequence[Tensor], Sequence[str]], Tensor],
        encode: Encoder,
        *,
        normalization: tuple[float, float] | None = None,
        max_len: int | None = None,
        knows_policy_ids: bool = True,
    ):
        self.where, self.score, self.encode = where, score, encode
        self.mean, self.std = normalization or (0.0, 1.0)
        self.normalizes, self.max_len = normalization is not None, max_len
        self.knows_policy_ids = knows_policy_ids

    def check_columns(self, available: Sequence[str]) -> None:
        """It reads prompts and responses only."""

    def __call__(self, batch: RewardBatch) -> RewardOutput:
        """Scores of B samples. Raises RewardError for one that is not finite."""
        try:
            sequences = self.encode(batch)
        except UserError as error:
            raise UserError(f"{self.where}: {error}") from error
        for sequence, sample in zip(sequences, batch.sample_ids, strict=True):
            if self.max_len is not None and len(sequence) > self.max_len:
                raise UserError(f"{self.where}: {sample} has {len(sequence)} tokens, the model reads {self.max_len}")
        scores = self.score(sequences, batch.prompts)
        return RewardOutput((read_numbers(scores, batch.sample_ids, self.where) - self.mean) / self.std)


@torch.no_grad()
def score_sequences(
    model: Any, sequences: Sequence[Tensor], *, micro_batch_size: int, prompts: Sequence[str] = ()
) -> Tensor:
    """(B,) fp32 scores that `model`, a RewardModel or its engine, gives to token ids, each (S,). Sequences of one of
    the `prompts` stay together where that saves work.

    A collective under ZeRO-3: all ranks make as many forwards as the one with most micro-batches.
    """
    lengths, scores = [len(ids) for ids in sequences], torch.zeros(len(sequences))
    numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompts))}
    groups = [numbers[prompt] for prompt in prompts] if prompts and shares_prompts(model) else None
    plan = plan_micro_batches(lengths, num_ranks=1, micro_batch_size=micro_batch_size, groups=groups)
    batches = plan[0] if lengths else []
    missing = int(comm.all_reduce_max(len(batches))) - len(batches)
    for batch in batches + [[] for _ in range(missing)]:
        preemption.safe_point()
        rows = [sequences[i] for i in batch] or [torch.zeros(1, dtype=torch.int64)]
        ends = torch.tensor([len(row) for row in rows])
        result = model(pad(rows, int(ends.max())).to(comm.device()), ends.to(comm.device())).cpu()
        for i, score in zip(batch, result, strict=False):
            scores[i] = score
    return scores


def policy_ids(batch: RewardBatch) -> Sequence[Tensor]:
    return batch.sequences


def make_encoder(tokenizer: Any, own: Any, *, apply_chat_template: bool) -> tuple[Encoder, str]:
    """How a reward model with the tokenizer `own` reads what a policy with `tokenizer` wrote, and one line about it.

    Ids are reused where both mean the same by them, begin texts alike and use the same template for prompts;
    else responses, decoded, are put after the prompt in its own template and encoded by its own tokenizer.
    """
    renders = apply_chat_template and bool(own.chat_template)
    if tokenizer.get_vocab() != own.get_vocab():
        reason = "its tokenizer is another one"
    elif renders and own.chat_template != tokenizer.chat_template:
        reason = "its chat template is another one"
    elif encode_texts(tokenizer, ["a"]) != encode_texts(own, ["a"]):
        reason = "its texts begin otherwise"  # one of the two puts a BOS in front
    else:
        return policy_ids, "reads the ids of the policy"
    how = "in its own chat template" if renders else "with the text around it that the policy sees"
    return _TextEncoder(own, renders=renders), f"{reason}: responses are decoded, and encoded again {how}"


class _TextEncoder:
    """Text of prompt and response to the ids of another tokenizer, with what ends a response there if it was ended."""

    def __init__(self, tokenizer: Any, *, renders: bool):
        self.tokenizer = tokenizer
        self.render = ChatRenderer(tokenizer) if renders else None
        self.ending = (_end_of_turn(tokenizer) if renders else tokenizer.eos_token) or ""  # for one without EOS

    def __call__(self, batch: RewardBatch) -> list[Tensor]:
        texts = [self._text(batch, i) for i in range(len(batch))]
        return [torch.tensor(ids, dtype=torch.int64) for ids in encode_texts(self.tokenizer, texts)]

    def _text(self, batch: RewardBatch, i: int) -> str:
        query, ending = batch.queries[i], self.ending if batch.endings[i] else ""
        if self.render is None:
            return query + ending
        tools = batch.columns.get(TOOLS)
        try:
            prompt = self.render(batch.cells[i], tools[i] if tools else None)
        except UserError as error:  # a template may refuse system messages, say, which the policy's takes
            raise UserError(f"the prompt of {batch.sample_ids[i]} {error}") from error
        return prompt + query[len(batch.prompts[i]) :] + ending


def _end_of_turn(tokenizer: Any) -> str:
    """What a chat template has after an assistant's last words, often a token of its own; EOS where it has nothing."""
    words = "last words"
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": words}]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
    except TEMPLATE_ERRORS:
        return tokenizer.eos_token
    return text.rpartition(words)[2].strip() or tokenizer.eos_token
