"""Loading the tokenizer, and the one way of turning text into token ids."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoTokenizer

from spmdrl.errors import UserError

if TYPE_CHECKING:
    from spmdrl.config import ModelConfig

logger = logging.getLogger(__name__)


def load_tokenizer(config: "ModelConfig") -> Any:
    """The tokenizer of `--pretrain`, with a pad token and, if the flag is given, another chat template.

    A missing pad token becomes the eos token: padding never reaches attention or the loss, because masks come from
    true lengths, and the embeddings keep their size.
    """
    if not config.pretrain:
        raise UserError("--pretrain is missing: give the directory or hub name of the model")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            config.pretrain,
            use_fast=not config.disable_fast_tokenizer,
            trust_remote_code=config.trust_remote_code,
        )
    except Exception as error:  # damaged files surface as any type, plain `Exception` included
        raise UserError(_load_failure(config.pretrain, error)) from error
    if config.tokenizer_chat_template is not None:
        tokenizer.chat_template = read_chat_template(config.tokenizer_chat_template)
    _ensure_pad_token(tokenizer, config.pretrain)
    return tokenizer


def _load_failure(pretrain: str, error: Exception) -> str:
    reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    if Path(pretrain).is_dir():
        return f"--pretrain {pretrain}: the tokenizer files there do not load ({reason})"
    return f"--pretrain {pretrain} is neither a directory here nor a hub model that could be fetched ({reason})"


def _ensure_pad_token(tokenizer: Any, pretrain: str) -> None:
    if tokenizer.pad_token_id is not None:
        return
    if tokenizer.eos_token is None:
        raise UserError(
            f"--pretrain {pretrain}: the tokenizer has neither a pad nor an eos token; set one in its files"
        )
    tokenizer.pad_token = tokenizer.eos_token
    logger.warning("The tokenizer of %s has no pad token: padding with eos (%s)", pretrain, tokenizer.eos_token)


def read_chat_template(value: str) -> str:
    """`--tokenizer_chat_template`: the name of a file with a Jinja template, or the template itself."""
    if "{" in value:
        return value
    try:
        return Path(value).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"--tokenizer_chat_template {value!r} is neither a Jinja template nor a file that can be read ({error})"
        ) from error


def encode_texts(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Token ids of each text, with exactly one BOS in front where the tokenizer or the text brings one.

    Chat templates may or may not write the BOS that the tokenizer also adds, so the tokenizer adds nothing here and
    what it would have put in front is put there once. Nothing is appended, not even by tokenizers that add an EOS.
    """
    if not texts:
        return []
    ids = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    prefix = _leading_special_ids(tokenizer)
    bos = prefix or [tokenizer.bos_token_id]
    return [_with_one(prefix, bos, row) for row in ids]


def _leading_special_ids(tokenizer: Any) -> list[int]:
    """What the tokenizer puts in front of a text: usually [bos] or nothing."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    full = tokenizer("a", add_special_tokens=True)["input_ids"]
    start = next((i for i in range(len(full)) if full[i : i + len(bare)] == bare), 0)
    return full[:start]


def _with_one(prefix: list[int], bos: list[int], ids: list[int]) -> list[int]:
    size = len(bos)
    while ids[:size] == bos and ids[size : 2 * size] == bos:
        ids = ids[size:]
    return ids if ids[: len(prefix)] == prefix else prefix + ids
