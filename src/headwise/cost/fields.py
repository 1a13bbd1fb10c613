"""Reading a config.json. Nothing is guessed: an unknown field that reads like a size refuses the whole config."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import resources
from typing import Any

from headwise.cost.shape import ModelShape
from headwise.errors import HeadwiseError

LARGEST = 2**40  # of one size; beyond it a number is a slip, and sums would take for ever to print
MOST_LAYERS = 10_000

_RECORDS = tomllib.loads(resources.files("headwise.cost").joinpath("families.toml").read_text(encoding="utf-8"))
HARMLESS = frozenset(_RECORDS.pop("harmless"))
SIZE_WORDS = frozenset(_RECORDS.pop("size_words"))


@dataclass(frozen=True, kw_only=True)
class Family:
    """How one model_type of transformers is read: a record of families.toml, which says what each field is."""

    name: str
    required: tuple[str, ...] = ()
    defaults: dict[str, Any] = field(default_factory=dict)
    build: Callable[[Fields], ModelShape]
    heads: dict[str, str]
    aliases: dict[str, str] = field(default_factory=dict)
    fixed: dict[str, Any] = field(default_factory=dict)
    derived: tuple[str, ...] = ()

    def read(self, config: dict[str, Any]) -> ModelShape:
        fields = Fields(config, self)
        shape = self.build(fields)
        return replace(shape, family=self.name, notes=(*fields.notes(), *shape.notes))


def family(name: str, build: Callable[..., ModelShape], **options: Any) -> Family:
    record = dict(_RECORDS[name])
    record["defaults"] = dict.fromkeys(record.pop("null", ())) | record.get("defaults", {})
    return Family(name=name, build=partial(build, **options), **record)


class Fields:
    """The fields of one config.json. Every method raises HeadwiseError that names the field."""

    def __init__(self, config: dict[str, Any], family: Family) -> None:
        self.family = family
        self.config = config
        self.taken: dict[str, int] = {}  # sizes that the file leaves out, as they were filled in
        known = {*family.required, *family.defaults, *family.aliases, *family.derived, *HARMLESS}
        for name, value in config.items():
            if name in family.fixed:
                if value != family.fixed[name] and value not in (None, False, [], {}):
                    wanted = f"{name}={_short(family.fixed[name])}"
                    raise HeadwiseError(f"{name}={_short(value)} is not priced for {family.name}, only {wanted}")
            elif name not in known and _sizes_something(name, value):
                raise HeadwiseError(
                    f"{name}={_short(value)} is not a field of {family.name} that is known here, and it may "
                    f"change sizes; if it does not, price a copy of the config without it"
                )

    def name_of(self, name: str) -> str:
        """The family's own word for a field: `n_embd` for `hidden_size` in GPT-2."""
        return self.family.aliases.get(name, name)

    def get(self, name: str) -> Any:
        """The value under this name or an alias, else the default of the config class; None where null is meant."""
        name = self.name_of(name)
        names = [name, *(alias for alias, field in self.family.aliases.items() if field == name)]
        values = {alias: self.config[alias] for alias in names if self.config.get(alias) is not None}
        if len(set(map(repr, values.values()))) > 1:
            both = " and ".join(f"{alias}={_short(value)}" for alias, value in values.items())
            raise HeadwiseError(f"{both} name one size of a {self.family.name} model; keep the right one")
        if values:
            return next(iter(values.values()))
        if name in self.family.required:
            raise HeadwiseError(f"{' or '.join(names)} is missing; a {self.family.name} model has no size without it")
        default = self.family.defaults.get(name)
        if any(alias in self.config for alias in names):
            if name not in NULLABLE and default is not None:
                raise HeadwiseError(f"{name}=null; give a value, or leave it out for {_short(default)}")
            return None
        if isinstance(default, int) and not isinstance(default, bool):
            self.taken[name] = default
        return default

    def size(self, name: str) -> int:
        return check_size(self.name_of(name), self.get(name))

    def optional_size(self, name: str) -> int | None:
        return None if self.get(name) is None else self.size(name)

    def count(self, name: str) -> int:  # 0 is one
        value = self.get(name)
        return 0 if value == 0 and not isinstance(value, bool | float) else check_size(name, value)

    def flag(self, name: str) -> bool:
        value = self.get(name)
        if not isinstance(value, bool):
            raise HeadwiseError(f"{self.name_of(name)}={_short(value)} must be true or false")
        return value

    def choice(self, name: str, *known: str) -> str:
        value = self.get(name)
        if value not in known:
            raise HeadwiseError(f"{name}={value!r} is not known; one of {', '.join(known)}")
        return str(value)

    def side(self, name: str) -> tuple[int, int]:
        """Height and width of an image or a patch: one number for both, or a pair."""
        value = self.get(name)
        pair = value if isinstance(value, list | tuple) else [value, value]
        if len(pair) != 2:
            raise HeadwiseError(f"{name}={_short(value)} must be one number, or height and width")
        return check_size(name, pair[0]), check_size(name, pair[1])

    def layers(self, name: str) -> range:
        number = self.size(name)
        if number > MOST_LAYERS:
            raise HeadwiseError(f"{self.name_of(name)}={number} exceeds {MOST_LAYERS:,}, the most layers priced")
        return range(number)

    def head(self) -> str:
        heads = self.family.heads
        named = self.config.get("architectures") or list(heads)
        if not isinstance(named, list) or not isinstance(named[0], str) or named[0] not in heads:
            kind = f"architectures={_short(named)} is not priced for {self.family.name}"
            raise HeadwiseError(f"{kind}; known: {', '.join(heads)}")
        return heads[named[0]]

    def kv_heads(self, name: str = "num_key_value_heads", of: str = "num_attention_heads") -> int:
        heads = self.size(of)
        number = self.optional_size(name) or heads
        if heads % number:
            fact = f"{self.name_of(name)}={number} does not divide {self.name_of(of)}={heads}"
            raise HeadwiseError(f"{fact}; each must serve as many query heads")
        return number

    def head_dim(self, width: str = "hidden_size", heads: str = "num_attention_heads") -> int:
        explicit = self.optional_size("head_dim")
        if explicit is not None:
            return explicit
        d_model, number = self.size(width), self.size(heads)
        if d_model % number:
            raise HeadwiseError(
                f"{self.name_of(heads)}={number} does not divide {self.name_of(width)}={d_model}, and there is no "
                f"head_dim; give a width that {number} divides"
            )
        return d_model // number

    def notes(self) -> tuple[str, ...]:
        sizes = ", ".join(f"{name}={value}" for name, value in self.taken.items())
        return (f"left out of the config, so the default of the {self.family.name} class: {sizes}",) if sizes else ()


# Null says something there: no window, as many key/value heads as query heads, width / heads, no ranks.
NULLABLE = frozenset({"sliding_window", "num_key_value_heads", "head_dim", "q_lora_rank", "layer_types"})


def check_size(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= LARGEST:
        raise HeadwiseError(f"{name}={_short(value)} must be a whole number from 1 to {LARGEST:,}")
    return value


def _sizes_something(name: str, value: Any) -> bool:
    if not value or isinstance(value, str | float):
        return False
    if name.startswith("_") or "drop" in name or name.endswith(("_token_id", "_token_index", "_token_ids")):
        return False
    return bool(SIZE_WORDS & set(re.split(r"[_\d]+", name.lower())))


def _short(value: Any) -> str:
    text = {None: "null", True: "true", False: "false"}.get(value) if value is None or isinstance(value, bool) else None
    text = text or repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
