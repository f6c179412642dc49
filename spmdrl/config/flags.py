"""What a flag of a config class is, and how the words after it become its value."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from functools import cache
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from spmdrl.config.registry import Registry
from spmdrl.errors import UserError, shortened


@dataclass(frozen=True)
class Flag:
    """One field of a config class. `kind` is the type of each value; `num_values` is None for any number of them."""

    name: str
    section: str | None
    default: Any
    kind: type
    num_values: int | None = 1
    is_optional: bool = False
    is_secret: bool = False
    public_values: tuple[str, ...] = ()  # of a secret, in lower case: what may be shown and saved after all
    literals: tuple[str, ...] = ()
    registry: Registry | None = None

    def registered(self) -> Registry:
        assert self.registry is not None, f"--{self.name} has no table of choices"
        return self.registry

    @property
    def choices(self) -> tuple[str, ...]:
        return self.registry.choices() if self.registry else self.literals

    def convert(self, words: Sequence[str], where: str) -> Any:
        """The value that `words` stand for; `where` names the flag, or file and key, in the error."""
        if self.num_values is not None and len(words) != self.num_values:
            wanted = "one value" if self.num_values == 1 else f"{self.num_values} values"
            got = f"{len(words)} values" if self.is_secret else shortened(" ".join(words)) or "none"
            raise UserError(f"{where} takes {wanted}, got {got}")
        values = tuple(self._convert_word(word, where) for word in words)
        return values[0] if self.num_values == 1 else values

    def _convert_word(self, word: str, where: str) -> Any:
        if self.choices and word not in self.choices:
            raise UserError(
                f"{where} has no '{shortened(word)}', only {', '.join(self.choices)}{nearest(word, self.choices)}"
            )
        try:
            value = self.kind(word)
        except ValueError:
            value = None
        if value is None or value != value:
            raise UserError(
                f"{where} takes {'a whole number' if self.kind is int else 'a number'}, got '{shortened(word)}'"
            )
        return value


@cache
def flags_of(cls: type) -> dict[str, Flag]:
    """Flag name → flag, of a config class and its sections, in the order in which they are declared."""
    return {flag.name: flag for flag in _walk(cls, section=None)}


def _walk(cls: type, section: str | None, defaults: Any = None) -> Iterable[Flag]:
    """`defaults`: a section with the values that the config gives its fields where they differ from the class's."""
    hints = get_type_hints(cls, include_extras=True)
    for item in fields(cls):
        if is_dataclass(hints[item.name]):
            yield from _walk(hints[item.name], section=item.name, defaults=_default_section(item))
        else:
            default = item.default if defaults is None else getattr(defaults, item.name)
            yield _read_annotation(item, section, hints[item.name], default)


def _default_section(item: Field) -> Any:
    assert item.default_factory is not MISSING, f"section {item.name} has no default"
    return item.default_factory()


def _read_annotation(item: Field, section: str | None, hint: Any, default: Any) -> Flag:
    """Understands bool, int, float, str, Literal of strings, tuples of these, each with `| None` or a Registry."""
    registry, num_values, literals = None, 1, ()
    if get_origin(hint) is Annotated:
        hint, registry = get_args(hint)
    is_optional = NoneType in get_args(hint)
    if is_optional:
        (hint,) = (option for option in get_args(hint) if option is not NoneType)
    if get_origin(hint) is tuple:
        *args, last = get_args(hint)
        hint, num_values = args[0], None if last is Ellipsis else len(args) + 1
    if get_origin(hint) is Literal:
        hint, literals = str, get_args(hint)
    assert hint in (bool, int, float, str), f"--{item.name} is annotated {hint}"
    return Flag(
        item.name,
        section,
        default,
        hint,
        num_values,
        is_optional,
        is_secret=not item.repr,
        public_values=item.metadata.get("public", ()),
        literals=literals,
        registry=registry,
    )


def build(cls: type, values: Mapping[str, Any]) -> Any:
    """The config with these flags set and all others at their defaults."""
    sections: dict[str, dict[str, Any]] = {}
    own: dict[str, Any] = {}
    for name, value in values.items():
        section = flags_of(cls)[name].section
        (own if section is None else sections.setdefault(section, {}))[name] = value
    defaults = {item.name: _default_section(item) for item in fields(cls) if item.name in sections}
    return cls(**own, **{name: replace(section, **sections[name]) for name, section in defaults.items()})


def values_of(config: Any) -> dict[str, Any]:
    """Flag name → value."""
    sections = {None: config} | {f.name: getattr(config, f.name) for f in fields(config)}
    return {flag.name: getattr(sections[flag.section], flag.name) for flag in flags_of(type(config)).values()}


def to_flat_dict(config: Any) -> dict[str, Any]:
    """Flag name → value as yaml and JSON have it, for the record: without secrets and without --local_rank."""
    flat = {name: list(value) if isinstance(value, tuple) else value for name, value in values_of(config).items()}
    for flag in flags_of(type(config)).values():
        if flag.is_secret and str(flat[flag.name]).lower() not in ("none", *flag.public_values):
            flat[flag.name] = True  # that it was given, not what
    flat.pop("local_rank", None)
    return flat


def nearest(word: str, known: Iterable[str], prefix: str = "") -> str:
    """An ending for an error message that names the known word most like `word`, or nothing."""
    matches = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {prefix}{matches[0]}?)" if matches else ""
