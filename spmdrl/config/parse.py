"""A command line and a yaml file in, a checked config or one line of error out.

tyro reads the same dataclasses to the same config, and a test keeps it so. It is not what reads them here: with this
many flags its --help takes 0.8 s on a slow core, this 0.2 s, and its errors are boxes of several lines on every rank.
"""

import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar

from spmdrl.config.flags import Flag, build, flags_of, nearest, to_flat_dict
from spmdrl.config.foreign import ACCEPTED_ALIASES, PPO, Foreign
from spmdrl.errors import UserError, shortened
from spmdrl.launch import launch_environment

_PLAIN = (str, int, float)  # values of yaml that stand for one word of a command line
CONFIG_FILE = Flag("config", None, None, str)


class Checked(Protocol):
    def validate(self, world_size: int) -> None: ...


Config = TypeVar("Config", bound=Checked)


def parse_config(cls: type[Config], argv: Sequence[str] | None = None) -> Config:
    """The config that the command line asks for. Prints --help or one line of error, and exits with 0 or 2."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if "--help" in argv or "-h" in argv:
        _print_help(cls)
    try:
        config = read_config(cls, argv)
        config.validate(int(launch_environment(os.environ)["WORLD_SIZE"]))
    except UserError as error:
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        sys.exit(2)
    return config


def read_config(cls: type[Config], argv: Sequence[str]) -> Config:
    """The config of these words and of the file that --config names; a flag wins over the file. Raises UserError."""
    values = read_words(cls, argv)
    path = values.pop("config", None)
    return build(cls, values if path is None else read_yaml(cls, Path(path)) | values)


def read_words(cls: type, argv: Sequence[str]) -> dict[str, Any]:
    """Flag name → value for the flags on a command line. What is wrong with several of them is said at once."""
    flags, values = flags_of(cls), {}
    unknown, problems = [], []
    for word, given in _group(argv):
        name = word.removeprefix("--")
        if name in ACCEPTED_ALIASES and not given:
            name, value = ACCEPTED_ALIASES[name]
            word, given = f"--{name}", [value]
        flag = CONFIG_FILE if name == "config" else flags.get(name) or _switched_off(name, flags)
        if flag is None:
            unknown.append((word, name))
            continue
        try:
            values[flag.name] = _from_words(flag, word, given)
        except UserError as error:
            problems.append(str(error))
    _raise_all(_explain_unknown(unknown, flags, foreign_of(cls)) + problems)
    return values


def _group(argv: Sequence[str]) -> Iterable[tuple[str, list[str]]]:
    """Each flag with the words that follow it. `--x=-y` is how a value that looks like a flag is given."""
    groups: list[tuple[str, list[str]]] = []
    for word in argv:
        if re.match(r"--|-(?!inf$)[A-Za-z]", word):
            flag, equals, value = word.partition("=")
            groups.append((flag, [value] if equals else []))
        elif groups:
            groups[-1][1].append(word)
        else:
            raise UserError(f"'{shortened(word)}' comes before any flag; every value follows its --flag")
    return groups


def _switched_off(name: str, flags: Mapping[str, Flag]) -> Flag | None:
    flag = flags.get(name.removeprefix("no_"))
    return flag if flag is not None and flag.kind is bool else None


def _from_words(flag: Flag, word: str, given: list[str]) -> Any:
    if flag.kind is not bool:
        return None if flag.is_optional and given == ["None"] else flag.convert(given, word)
    if given:
        raise UserError(
            f"{word} takes no value, got '{shortened(' '.join(given))}': write --{flag.name} or --no_{flag.name}"
        )
    return word == f"--{flag.name}"


def read_yaml(cls: type, path: Path) -> dict[str, Any]:
    """Flag name → value for the keys of a yaml file with flat flag names, such as `save_config` writes."""
    flags, values = flags_of(cls), {}
    unknown, problems = [], []
    for key, value in _load_yaml(path).items():
        if key not in flags:
            unknown.append((str(key), str(key)))
            continue
        try:
            values[key] = _from_yaml(flags[key], value, f"{path}: {key}")
        except UserError as error:
            problems.append(str(error))
    _raise_all([f"{path}: {problem}" for problem in _explain_unknown(unknown, flags, foreign_of(cls))] + problems)
    return values


def _load_yaml(path: Path) -> dict[Any, Any]:
    import yaml  # here, so that help and errors of the command line do not wait for it

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--config {path}: {getattr(error, 'strerror', None) or 'not a text file'}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # dates and numbers that there are not
        raise UserError(f"--config {path} is not yaml: {' '.join(str(error).split())[:300]}") from None
    if not isinstance(content, dict | None):
        raise UserError(f"--config {path} must hold lines such as 'seed: 1', not a {type(content).__name__}")
    return content or {}


def _from_yaml(flag: Flag, value: Any, where: str) -> Any:
    if value is None and flag.is_optional:
        return None
    if isinstance(value, bool) and (flag.kind is bool or flag.is_secret):
        return value if flag.kind is bool else "True" if value else None
    items = value if isinstance(value, list) and flag.num_values != 1 else [value]
    if flag.kind is bool or any(isinstance(item, bool) or not isinstance(item, _PLAIN) for item in items):
        wanted = {bool: "true or false", int: "a whole number", float: "a number", str: "text; quote it if it is"}
        raise UserError(f"{where} takes {wanted[flag.kind]}, got {_start_of(value)}")
    return flag.convert([_word(item, where) for item in items], where)


def _word(item: Any, where: str) -> str:
    try:
        return str(item)
    except ValueError:  # a whole number of thousands of digits
        raise UserError(f"{where} is too large a number") from None


def _start_of(value: Any) -> str:
    try:
        shown = repr(value)
    except (ValueError, RecursionError):
        return f"a {type(value).__name__}"
    return shortened(shown)


def foreign_of(cls: type) -> Foreign:
    return getattr(cls, "foreign", PPO)


def _explain_unknown(unknown: Iterable[tuple[str, str]], flags: Iterable[str], foreign: Foreign) -> list[str]:
    """One sentence for each reason why words (shown, name) are no flags; words of the same reason share it."""
    by_reason: dict[str, list[str]] = {}
    for shown, name in unknown:
        if name in foreign.not_yet:
            reason = f"not supported yet ({foreign.not_yet[name]})"
        elif name in foreign.refused:
            reason = f"no flag here ({foreign.refused[name]})"
        elif name in ACCEPTED_ALIASES:
            reason = f"a switch without value, short for --{' '.join(ACCEPTED_ALIASES[name])}"
        elif name in foreign.other_names:
            reason = f"no flag here (it is called --{foreign.other_names[name]})"
        else:
            reason = f"no flag here{nearest(name.lstrip('-').replace('-', '_'), [*flags, 'config', 'help'], '--')}"
        by_reason.setdefault(reason, []).append(shortened(shown))
    return [f"{', '.join(dict.fromkeys(words))}: {reason}" for reason, words in by_reason.items()]


def _raise_all(problems: list[str]) -> None:
    if problems:
        raise UserError("; ".join(problems))


def save_config(config: Any, path: str | Path) -> None:
    """Write every flag as yaml that --config reads back. Contains no secrets. Raises UserError where it cannot."""
    import yaml

    # ASCII with escapes: with allow_unicode PyYAML writes U+0085 in a way that it reads back as a space.
    try:
        Path(path).write_text(yaml.safe_dump(to_flat_dict(config), sort_keys=False), encoding="ascii")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from None


def _print_help(cls: type) -> NoReturn:
    from spmdrl.config.help import help_text

    if (os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0") == "0":
        sys.stdout.write(help_text(cls))
    sys.exit(0)
