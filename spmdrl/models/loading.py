"""Causal LMs from Hugging Face folders or names, ready for ZeRO."""

import importlib.util
from typing import Any

import torch

from spmdrl.config import ModelConfig
from spmdrl.errors import UserError

# Heads that do more than a linear product: log-probs from LogProbHead would be wrong, so they are refused.
UNSUPPORTED_HEADS = {"final_logit_softcapping": "soft-capped logits", "logit_scale": "scaled logits"}


def attention_kernel(wanted: str) -> str:
    """The attention implementation for transformers; auto is flash-attn where it is installed and there is a GPU."""
    installed = importlib.util.find_spec("flash_attn") is not None
    if wanted == "auto":
        return "flash_attention_2" if installed and torch.cuda.is_available() else "sdpa"
    if wanted == "flash_attention_2" and not installed:
        raise UserError(
            "--flash_attn: the package flash-attn is not installed: pip install flash-attn, or leave it out"
        )
    return wanted


def load_causal_lm(config: ModelConfig, *, dtype: torch.dtype) -> Any:
    """The causal LM of `--pretrain` in `dtype`. Dropout is switched off: a policy ratio needs the same function twice.

    Raises UserError for a folder that is missing, damaged or not a causal LM.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    name, trust = config.pretrain, config.trust_remote_code
    try:
        hf_config = AutoConfig.from_pretrained(name, trust_remote_code=trust)
        for attribute, meaning in UNSUPPORTED_HEADS.items():
            if getattr(hf_config, attribute, None):
                raise UserError(f"--pretrain {name}: models with {meaning} ({attribute}) are not supported yet")
        _disable_dropout(hf_config)
        return AutoModelForCausalLM.from_pretrained(
            name,
            config=hf_config,
            dtype=dtype,
            attn_implementation=attention_kernel(config.attention),
            trust_remote_code=trust,
        )
    except UserError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"--pretrain {name}: cannot load a causal LM: {first_line}") from error


def _disable_dropout(hf_config: Any) -> None:
    for key, value in list(vars(hf_config).items()):
        if ("dropout" in key or key.endswith("pdrop")) and isinstance(value, float):
            setattr(hf_config, key, 0.0)


def checkpoint_weight_names(config: ModelConfig) -> list[str]:
    """Names of the weights of `--pretrain`, tied ones once, without loading any."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        hf_config = AutoConfig.from_pretrained(config.pretrain, trust_remote_code=config.trust_remote_code)
        model = AutoModelForCausalLM.from_config(hf_config, trust_remote_code=config.trust_remote_code)
    return [name for name, _ in model.named_parameters()]


def eos_token_ids(model: Any, tokenizer: Any) -> list[int]:
    """Every id that ends a response: the generation config's (models may have several) and the tokenizer's."""
    eos = model.generation_config.eos_token_id
    ids = set(eos if isinstance(eos, (list, tuple)) else [eos])
    return sorted((ids | {tokenizer.eos_token_id}) - {None})
