"""Fingerprints of what flags name, by which a resumed run notices that it is not what it was."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from spmdrl.config import to_flat_dict

MODELS = ("pretrain", "critic_pretrain", "reward_pretrain", "ref_pretrain", "teacher_model")
FILES = ("reward_func", "remote_rm_url", "tokenizer_chat_template")
WEIGHTS, TEXTS = (".safetensors", ".bin", ".gguf"), (".json", ".jinja", ".model", ".txt", ".py")
NUM_BLOCKS, BLOCK_BYTES = 32, 2**16


class HasFingerprint(Protocol):
    @property
    def fingerprint(self) -> str: ...


def describe(config: Any, **data: HasFingerprint | None) -> dict[str, Any]:
    """What config.resume.compare compares: all flags, and fingerprints of the models and files that they name, and of
    `data`, by flag."""
    flags = to_flat_dict(config)
    models = {name: _of_models(flags[name]) for name in MODELS if flags.get(name)}
    files = {name: _of_files(flags[name]) for name in FILES if flags.get(name)}
    found = {name: value for name, value in {**models, **files}.items() if value is not None}
    contents = {name: source.fingerprint for name, source in data.items() if source is not None}
    return {"program": type(config).__name__, "flags": flags, "contents": {**found, **contents}}


def _of_models(names: str) -> str:
    """Of configs, tokenizers and samples of the weights of checkpoints, several of them separated by commas."""
    from transformers.utils import cached_file

    digest = hashlib.blake2b(digest_size=16)
    for name in names.split(","):
        folder = Path(str(cached_file(name, "config.json"))).parent
        for path in sorted(folder.iterdir()):
            if path.suffix in WEIGHTS:
                _add_sampled(digest, path)
            elif path.suffix in TEXTS:
                digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def fingerprint_of_weights(folder: Path) -> str:
    """Of samples of all weights in a directory."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(path for path in folder.iterdir() if path.suffix in WEIGHTS):
        _add_sampled(digest, path)
    return digest.hexdigest()


def _add_sampled(digest: Any, path: Path) -> None:
    digest.update(f"{path.name} {path.stat().st_size}".encode())
    for block in _sampled(path):
        digest.update(block)


def _sampled(path: Path) -> Iterable[bytes]:
    """Blocks from all over a file, which may be too large to read whole at each start."""
    size = path.stat().st_size
    with path.open("rb") as file:
        for number in range(NUM_BLOCKS):
            file.seek(max(size - BLOCK_BYTES, 0) * number // (NUM_BLOCKS - 1))
            yield file.read(BLOCK_BYTES)


def _of_files(specs: str | list[str]) -> str | None:
    """Of Python files, given as path.py or path.py:name, and others; None where one is no file, such as a URL."""
    digest = hashlib.blake2b(digest_size=16)
    for spec in [specs] if isinstance(specs, str) else specs:
        path, _, name = spec.rpartition(":") if ".py:" in spec else (spec, "", "")
        if len(path) > 4096 or not Path(path).expanduser().is_file():
            return None
        digest.update(name.encode() + b"\0" + Path(path).expanduser().read_bytes())
    return digest.hexdigest()
