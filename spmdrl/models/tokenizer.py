"""Loading the tokenizer, and the one way of turning text into token ids."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoTokenizer

from spmdrl.errors import UserError

if TYPE_CHECKING:
    from spmdrl.config import LoadConfig

logger = logging.getLogger(__name__)
TOKENIZER_FILES = ("*tokenizer*", "*vocab*", "*.model")


def load_tokenizer(config: "LoadConfig", flag: str = "--pretrain") -> Any:
    """The tokenizer of `--pretrain`, with a pad token and, if the flag is given, another chat template; `flag` is what
    errors call the model.

    A missing pad token becomes the eos token: padding never reaches attention or the loss, because masks come from
    true lengths, and the embeddings keep their size.
    """
    if not config.pretrain:
        raise UserError(f"{flag} is missing: give the directory or hub name of the model")
    if Path(config.pretrain).is_dir() and not _has_tokenizer(config.pretrain):  # transformers makes an empty one up
        missing = "there are none: copy those that the model was trained with"
        raise UserError(f"{flag} {config.pretrain}: the tokenizer files there do not load ({missing})")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            config.pretrain,
            use_fast=not config.disable_fast_tokenizer,
            trust_remote_code=config.trust_remote_code,
        )
    except Exception as error:  # damaged files surface as any type, plain `Exception` included
        raise UserError(_load_failure(flag, config.pretrain, error)) from error
    if config.tokenizer_chat_template is not None:
        tokenizer.chat_template = read_chat_template(config.tokenizer_chat_template)
    _ensure_pad_token(tokenizer, flag, config.pretrain)
    return tokenizer


def _has_tokenizer(pretrain: str) -> bool:
    return any(file for pattern in TOKENIZER_FILES for file in Path(pretrain).glob(pattern))


def _load_failure(flag: str, pretrain: str, error: Exception) -> str:
    reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    if Path(pretrain).is_dir():
        return f"{flag} {pretrain}: the tokenizer files there do not load ({reason})"
    return f"{flag} {pretrain} is neither a directory here nor a hub model that could be fetched ({reason})"


def _ensure_pad_token(tokenizer: Any, flag: str, pretrain: str) -> None:
    if tokenizer.pad_token_id is not None:
        return
    if tokenizer.eos_token is None:
        raise UserError(f"{flag} {pretrain}: the tokenizer has neither a pad nor an eos token; set one in its files")
    tokenizer.pad_token = tokenizer.eos_token
    logger.warning("The tokenizer of %s has no pad token: padding with eos (%s)", pretrain, tokenizer.eos_token)


def check_same_ids(tokenizer: Any, config: "LoadConfig", name: str, flag: str) -> None:
    """Raise UserError where the model `name`, of `flag`, has other ids for the tokens of `tokenizer`, which is that of
    `config.pretrain`: read by ids, every text would be another one to it. Embeddings beyond a tokenizer do not count;
    without a tokenizer nothing tells, so it is refused too."""
    if name == config.pretrain:
        return
    own = load_tokenizer(replace(config, pretrain=name, tokenizer_chat_template=None), flag=flag).get_vocab()
    ids = tokenizer.get_vocab()
    others = sorted(token for token in ids.keys() | own.keys() if ids.get(token) != own.get(token))
    if others:
        token = min(others, key=lambda token: ids.get(token, own.get(token)))
        raise UserError(
            f"{flag} {name} has other token ids than --pretrain {config.pretrain}, whose ids it would read: {token!r} "
            f"is {own.get(token, 'none')} there and {ids.get(token, 'none')} here, {len(others)} differ in all"
        )


def pad_token_apart_from(tokenizer: Any, end_ids: Sequence[int]) -> int | None:
    """Give `tokenizer` a pad token that ends no response, if it has a special token to spare; its id, None without.

    transformers' classifiers read the score at the last token that is no padding: where pad is eos, before the eos.
    """
    if tokenizer.pad_token_id not in end_ids:
        return tokenizer.pad_token_id
    used = {*end_ids, tokenizer.bos_token_id}
    template = tokenizer.chat_template or ""
    special = {index: token.content for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    spare = [content for index, content in special.items() if index not in used and content not in template]
    if not spare:
        return None  # then a classifier takes one text at a time, and reads at its last token
    likely = [content for content in spare if "pad" in content or "unk" in content or "endoftext" in content]
    tokenizer.pad_token = (likely or spare)[0]
    return tokenizer.pad_token_id


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
    prefix, bos = _leading(tokenizer)
    return [_with_one(prefix, bos, row) for row in _bare_ids(tokenizer, texts)]


@dataclass(frozen=True)
class Marked:
    """A text of which some parts, [start, end) in characters, are learned: in order and apart from one another."""

    text: str
    parts: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Encoded:
    """Token ids, and which of them are learned."""

    ids: list[int]
    mask: list[bool]


def encode_marked(tokenizer: Any, texts: list[Marked]) -> list[Encoded]:
    """Ids as of `encode_texts`, except that tokens end where a learned part begins or ends.

    So what stands in front of a response has the ids that it has as a prompt. The whole text is encoded at once where
    that holds by itself, which keeps the spaces of tokenizers that put one in front of every text.
    """
    cuts = [sorted({place for part in text.parts for place in part} - {0, len(text.text)}) for text in texts]
    flat = [(text.text, *(text.text[:cut] for cut in places)) for text, places in zip(texts, cuts, strict=True)]
    ids = iter(_bare_ids(tokenizer, list(chain.from_iterable(flat))))
    leading = _leading(tokenizer)
    out = []
    for text, places in zip(texts, cuts, strict=True):
        whole, *starts = (next(ids) for _ in range(1 + len(places)))
        if any(whole[: len(start)] != start for start in starts):
            edges = [0, *places, len(text.text)]
            pieces = _bare_ids(tokenizer, [text.text[a:b] for a, b in pairwise(edges)])
            whole = list(chain.from_iterable(pieces))
            starts = [list(chain.from_iterable(pieces[: i + 1])) for i in range(len(places))]
        token_at = {0: 0, len(text.text): len(whole)} | {at: len(ids) for at, ids in zip(places, starts, strict=True)}
        mask = [False] * len(whole)
        for start, end in text.parts:
            first, last = token_at[start], token_at[end]
            mask[first:last] = [True] * (last - first)
        out.append(_with_one_bos(Encoded(whole, mask), *leading))
    return out


def _with_one_bos(encoded: Encoded, prefix: list[int], bos: list[int]) -> Encoded:
    ids = _with_one(prefix, bos, encoded.ids)
    added = len(ids) - len(encoded.ids)
    return Encoded(ids, [False] * added + encoded.mask if added >= 0 else encoded.mask[-added:])


def _bare_ids(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    if not texts:
        return []
    return tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]


def _leading(tokenizer: Any) -> tuple[list[int], list[int]]:
    """What the tokenizer puts in front of a text, and what one BOS is."""
    prefix = _leading_special_ids(tokenizer)
    return prefix, prefix or [tokenizer.bos_token_id]


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
