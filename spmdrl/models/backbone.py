"""One frozen model for several roles, each with adapters and a head of its own (--share_backbone)."""

import copy
from pathlib import Path
from typing import Any

import torch

from spmdrl.config import LoraConfig
from spmdrl.models.loading import reading
from spmdrl.models.lora import MERGED_CONFIG, add_lora, load_adapter
from spmdrl.models.value_head import HF_HEAD, ValueHead, new_head


class Backbone:
    """The causal LM `model`, held once. What it hands out is modules of a role's own around the same parameters, so
    each role can have its adapters, its hooks and its DeepSpeed engine. It is never run itself."""

    def __init__(self, model: Any):
        self.model = model.requires_grad_(False)

    def causal_lm(self) -> Any:
        return _with_same_parameters(self.model)

    def new_classifier(self, config: LoraConfig, *, seed: int) -> Any:
        """transformers' sequence classifier with new adapters and a new ValueHead, drawn from `seed`."""
        model = self._classifier(copy.deepcopy(self.model.config), seed)
        add_lora(model, config, seed=seed)
        return model

    def load_classifier(self, adapter: str, *, source: str) -> Any:
        """The same with adapters and head from the folder `adapter`. Raises UserError, naming `source`, for an
        adapter of another model and for one without a head."""
        hf_config = copy.deepcopy(self.model.config)
        with reading(source, "the adapter of a reward model or critic on --pretrain"):
            if Path(adapter, MERGED_CONFIG).is_file():  # has the statistics of the scores
                hf_config = type(hf_config).from_json_file(Path(adapter, MERGED_CONFIG))
            model = self._classifier(hf_config, seed=0)
            load_adapter(model, adapter)
        return model

    def _classifier(self, hf_config: Any, seed: int) -> Any:
        from transformers import AutoModelForSequenceClassification

        hf_config.num_labels = 1
        with torch.device("meta"):
            model = AutoModelForSequenceClassification.from_config(hf_config)
        setattr(model, model.base_model_prefix, _with_same_parameters(self.model.base_model))
        weight = new_head(getattr(model, HF_HEAD).in_features, seed)
        setattr(model, HF_HEAD, ValueHead(weight.to(self.model.dtype), None))
        return model


def _with_same_parameters(model: Any) -> Any:
    return copy.deepcopy(model, {id(p): p for p in model.parameters()})
