"""Models from Hugging Face folders or names, ready for ZeRO."""

import functools
import importlib.util
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from spmdrl.config import LoadConfig
from spmdrl.distributed.weight_sync import named_tensors
from spmdrl.errors import UserError

logger = logging.getLogger(__name__)
# Heads that do more than a linear product: log-probs from LogProbHead would be wrong, so they are refused.
UNSUPPORTED_HEADS = {"final_logit_softcapping": "soft-capped logits", "logit_scale": "scaled logits"}


KERNELS = {"flash_attention_2": "_supports_flash_attn", "sdpa": "_supports_sdpa"}  # by what transformers asks for


def attention_kernel(wanted: str, dtype: torch.dtype, model_class: Any = None) -> str:
    """The attention implementation for transformers. auto is flash-attn where it is installed and can compute, or else
    sdpa; and what `model_class` has, where that is known.

    Raises UserError for a flash-attn that cannot compute here.
    """
    on_gpu, is_bf16 = torch.cuda.is_available(), dtype == torch.bfloat16
    if wanted == "flash_attention_2" and not (on_gpu and is_bf16):
        lacks = "computes in bfloat16 only, and this run in fp32" if on_gpu else "needs a GPU"
        raise UserError(f"--attention flash_attention_2 (--flash_attn) {lacks}")
    if wanted != "auto":
        return wanted
    has_flash = on_gpu and is_bf16 and importlib.util.find_spec("flash_attn") is not None
    kernels = list(KERNELS) if has_flash else ["sdpa"]
    usable = [kernel for kernel in kernels if model_class is None or getattr(model_class, KERNELS[kernel])]
    chosen = usable[0] if usable else "eager"
    if model_class is not None and chosen != kernels[0]:
        _warn_once(f"{model_class.__name__} computes attention with {chosen}: transformers has no {kernels[0]} for it")
    return chosen


def load_causal_lm(config: LoadConfig, *, dtype: torch.dtype, flag: str = "--pretrain", **options: Any) -> Any:
    """The causal LM of `config.pretrain`, which `flag` named, in `dtype`; `options` are of `from_pretrained`.

    Raises UserError for a folder that is missing, damaged or not a causal LM.
    """
    from transformers import AutoModelForCausalLM

    name = config.pretrain
    with reading(f"{flag} {name}", "a causal LM"):
        hf_config = read_hf_config(name, config)
        for attribute, meaning in UNSUPPORTED_HEADS.items():
            if getattr(hf_config, attribute, None):
                raise UserError(f"{flag} {name}: models with {meaning} ({attribute}) are not supported yet")
        options |= loading_options(AutoModelForCausalLM, hf_config, config, dtype)
        return load_whole(AutoModelForCausalLM, name, f"{flag} {name}", **options)


def load_whole(auto_class: Any, name: str | None, source: str, *, head: str | None = None, **options: Any) -> Any:
    """`from_pretrained` of a checkpoint that has every weight of its config.json, in its size; transformers would make
    up what is missing. head: the model's layer of that name, and what the checkpoint has in its place, are left to the
    caller. `source` is for messages."""
    with _table_kept_back():
        model, report = auto_class.from_pretrained(
            name, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )

    def counted(keys: Iterable[str]) -> list[str]:
        return sorted(key for key in keys if head is None or key.startswith(f"{model.base_model_prefix}."))

    if missing := counted(report["missing_keys"]):
        raise UserError(f"{source}: weights are missing: {', '.join(missing[:3])}, {len(missing)} in all")
    shapes = {key: [tuple(shape) for shape in shapes] for key, *shapes in report["mismatched_keys"]}
    for key in counted(shapes):
        found, wanted = shapes[key]
        raise UserError(f"{source}: {key} has the shape {found}, by config.json it is {wanted}")
    if left := counted(report["unexpected_keys"]):
        _warn_once(
            f"{source}: weights that its config.json has no place for are left out: {', '.join(left[:3])}, "
            f"{len(left)} in all"
        )
    # torch gives no gradient to the row of the padding token, which may be the EOS between turns. Here padding needs
    # no embedding of its own: nothing that is learned sees it.
    if isinstance(embeddings := model.get_input_embeddings(), torch.nn.Embedding):
        embeddings.padding_idx = None
    return model


@functools.cache
def _warn_once(line: str) -> None:
    """A run may load a checkpoint for several roles."""
    logger.warning(line)


@contextmanager
def _table_kept_back() -> Iterator[None]:
    """transformers' table of weights that do not fit is shown only beside an error of its own, which refers to it;
    `load_whole` says in a line what is in it."""
    library, kept = logging.getLogger("transformers.modeling_utils"), list[str]()
    own_level, level = library.level, library.getEffectiveLevel()

    def passes(record: logging.LogRecord) -> bool:
        if "LOAD REPORT" not in record.getMessage():
            return record.levelno >= level
        kept.append(record.getMessage())
        return False

    library.addFilter(passes)
    library.setLevel(min(level, logging.WARNING))
    try:
        yield
    except RuntimeError:
        for table in kept:
            logger.error(table)
        raise
    finally:
        library.removeFilter(passes)
        library.setLevel(own_level)


@contextmanager
def reading(source: str, what: str) -> Iterator[None]:
    """One line for whatever transformers raises; `source` is the flag and its value."""
    try:
        yield
    except UserError:
        raise
    except UnpicklingError as error:
        raise UserError(
            f"{source}: cannot load {what}: a .bin file in it holds more than tensors, and code from a checkpoint is "
            "never run; save the weights as safetensors"
        ) from error
    except Exception as error:  # damaged files surface as any type
        reason = " ".join(str(error).split())[:300] or "no reason given"
        raise UserError(f"{source}: cannot load {what}: {type(error).__name__}: {reason}") from error


def read_hf_config(name: str | None, config: LoadConfig, **changes: Any) -> Any:
    """The checkpoint's configuration. Dropout is switched off: a policy ratio needs the same function twice."""
    from transformers import AutoConfig

    hf_config = AutoConfig.from_pretrained(name, trust_remote_code=config.trust_remote_code, **changes)
    for key, value in list(vars(hf_config).items()):
        if ("dropout" in key or key.endswith("pdrop")) and isinstance(value, float):
            setattr(hf_config, key, 0.0)
    return hf_config


def loading_options(auto_class: Any, hf_config: Any, config: LoadConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Arguments of `auto_class.from_pretrained`."""
    found = auto_class._model_mapping.get(type(hf_config), None)  # None for code that a checkpoint brings
    model_class = found[0] if isinstance(found, tuple) else found
    return {
        "config": hf_config,
        "dtype": dtype,
        "attn_implementation": attention_kernel(config.attention, dtype, model_class),
        "trust_remote_code": config.trust_remote_code,
    }


class CheckpointWeights:
    """The weights of `--pretrain` by name, tied ones once, without loading any.

    In its files they may have other names, or be in pieces: the experts of a layer are one tensor in memory.
    """

    def __init__(self, config: LoadConfig):
        from transformers import AutoConfig, AutoModelForCausalLM

        with reading(f"--pretrain {config.pretrain}", "a causal LM"), torch.device("meta"):
            hf_config = AutoConfig.from_pretrained(config.pretrain, trust_remote_code=config.trust_remote_code)
            self._model = AutoModelForCausalLM.from_config(hf_config, trust_remote_code=config.trust_remote_code)
            weights = {name: weight.detach() for name, weight in named_tensors(self._model)}
            self.names = list(weights)
            in_files = _shapes(self._reverted(weights))
            self._are_same = in_files == _shapes(weights)
            one_by_one = dict(piece for name, weight in weights.items() for piece in self.in_files(name, weight))
        if _shapes(one_by_one) != in_files:
            raise UserError(
                f"--engine vllm: files of {config.pretrain} join weights that are apart in memory, and vLLM takes "
                "them as in files: take --engine hf"
            )

    def in_files(self, name: str, weight: Tensor) -> Iterable[tuple[str, Tensor]]:
        """What a weight is in a checkpoint's files."""
        return ((name, weight),) if self._are_same else self._reverted({name: weight}).items()

    def _reverted(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        from transformers.core_model_loading import revert_weight_conversion

        return revert_weight_conversion(self._model, dict(weights))


def _shapes(weights: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(weight.shape) for name, weight in weights.items()}


def eos_token_ids(model: Any, tokenizer: Any) -> list[int]:
    """Every id that ends a response: the generation config's (models may have several) and the tokenizer's."""
    return _end_ids(model.generation_config, tokenizer)


def checkpoint_eos_token_ids(config: LoadConfig, tokenizer: Any) -> list[int]:
    """The same for `--pretrain`, without loading its weights."""
    from transformers import GenerationConfig

    try:
        generation = GenerationConfig.from_pretrained(config.pretrain)
    except OSError:  # it has none: a model's is then made of its config
        hf_config = read_hf_config(config.pretrain, config)
        generation = GenerationConfig.from_model_config(hf_config)
    return _end_ids(generation, tokenizer)


def _end_ids(generation: Any, tokenizer: Any) -> list[int]:
    eos = generation.eos_token_id
    ids = set(eos if isinstance(eos, (list, tuple)) else [eos])
    if not all(isinstance(number, int | None) for number in ids):
        raise UserError(f"--pretrain: eos_token_id of its generation_config.json is {eos!r}, expected token ids")
    return sorted((ids | {tokenizer.eos_token_id}) - {None})
