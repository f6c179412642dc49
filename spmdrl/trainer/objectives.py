"""What a supervised trainer trains: the interface, SFT, and what other objectives share with it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from spmdrl.algos.losses import BatchCounts, token_mean
from spmdrl.algos.preference import sft
from spmdrl.config.supervised import SFTConfig, SupervisedConfig
from spmdrl.data.conversations import ChatTemplate, TextTemplate
from spmdrl.data.supervised import RowRenderer, SupervisedSet, TextRows
from spmdrl.distributed.strategy import Strategy
from spmdrl.errors import UserError
from spmdrl.experience import Experience, Sample
from spmdrl.models.actor import Actor
from spmdrl.models.loading import load_causal_lm
from spmdrl.models.lora import add_lora, quantization
from spmdrl.models.packing import Layout, layout_for, packed
from spmdrl.trainer.build import enable_checkpointing
from spmdrl.trainer.update import LossPart, Metrics

Phase = Callable[[str, int], AbstractContextManager[Any]]  # (name, total) -> progress


@dataclass(frozen=True)
class Setting:
    """What an objective is given to get ready with, before the model that it trains is built."""

    strategy: Strategy
    sets: Sequence[SupervisedSet]
    tokenizer: Any
    phase: Phase


class Objective(Protocol):
    """One supervised program: its rows, its model, its loss. Metrics are "step/...", divided by counts of the step."""

    @property
    def group_size(self) -> int:
        """Sequences a row."""
        ...

    @property
    def num_labels(self) -> int | None:
        """Of the saved classifier; None for a causal LM."""
        ...

    @property
    def value_head_prefix(self) -> str | None:
        """Of the saved classifier; None for a causal LM."""
        ...

    def renderer(self, shape: TextTemplate | ChatTemplate) -> RowRenderer: ...
    def prepare(self, setting: Setting) -> None: ...
    def load_model(self, setting: Setting) -> nn.Module: ...
    def parts(self, engine: Any, samples: Sequence[Sample]) -> list[LossPart]: ...
    def counts(self, rows: SupervisedSet) -> BatchCounts: ...
    def summary(self, metrics: dict[str, float]) -> dict[str, float]: ...


class SFT:
    """The language-model loss of responses or texts, every learned token of the optimizer step weighing the same."""

    group_size, num_labels, value_head_prefix = 1, None, None

    def __init__(self, config: SFTConfig):
        self.config = config

    def renderer(self, shape: TextTemplate | ChatTemplate) -> RowRenderer:
        return TextRows(self.config.data, shape)

    def prepare(self, setting: Setting) -> None:
        pass

    def load_model(self, setting: Setting) -> nn.Module:
        return load_policy(self.config, setting)

    def parts(self, engine: Any, samples: Sequence[Sample]) -> list[LossPart]:
        return [LossPart(samples, self.loss)]

    def loss(self, engine: Any, exp: Experience, counts: BatchCounts) -> tuple[Tensor, Metrics]:
        """This micro-batch's share of the loss, and its metrics."""
        log_probs, _ = engine(exp.sequences, exp.action_mask)
        loss = token_mean(sft(log_probs, exp.action_mask), exp.action_mask, counts)
        return loss, {"step/loss": loss.detach()}

    def counts(self, rows: SupervisedSet) -> BatchCounts:
        return rows.counts

    def summary(self, metrics: dict[str, float]) -> dict[str, float]:
        return metrics


def load_policy(config: SupervisedConfig, setting: Setting, wrap: type[Actor] = Actor) -> Actor:
    """The causal LM of --pretrain, as it is to be trained."""
    strategy = setting.strategy
    with strategy.loading():
        model = load_causal_lm(config.model, dtype=strategy.dtype, **quantization(config.lora, strategy.dtype))
    check_vocabulary(model, setting, f"--pretrain {config.model.pretrain}")
    add_lora(model, config.lora, seed=config.seed)
    enable_checkpointing(model, config.model)
    return wrap(model, layout=layout_of(config, model))


def layout_of(config: SupervisedConfig, model: Any) -> Layout:
    """How micro-batches go through `model`."""
    return packed if config.data.packing_samples else layout_for(model)


def check_vocabulary(model: Any, setting: Setting, source: str) -> None:
    """Every id of the tokenizer needs an embedding."""
    vocab_size, num_tokens = model.config.get_text_config().vocab_size, len(setting.tokenizer)
    if vocab_size < num_tokens:
        raise UserError(f"{source} knows {vocab_size} tokens, the tokenizer of --pretrain {num_tokens}")


def every_other(values: Tensor) -> tuple[Tensor, Tensor]:
    """(2N, ...) of pairs -> the first and the second of each, (N, ...) both."""
    return values[0::2], values[1::2]


def row_chunks(rows: SupervisedSet, size: int) -> Iterator[list[Sample]]:
    """All samples of a set, `size` rows at a time."""
    for start in range(0, len(rows), size):
        yield rows.samples(range(start, min(start + size, len(rows))))


def free_memory() -> None:
    """Give back the memory of models that nothing refers to any more."""
    import gc

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
