"""How a learner's class is built and called: what each parameter of a signature means, told by its name."""

from __future__ import annotations

import inspect
import re
import tomllib
from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Any

import numpy as np

from headwise.errors import HeadwiseError

# No two of these sizes are equal, so that no axis can be taken for another.
BATCH, TOKENS, HEADS, KV_HEADS, HEAD_DIM, CONTEXT = 5, 7, 6, 2, 8, 16
WIDTH = HEADS * HEAD_DIM

NAMES: Mapping[str, Any] = tomllib.loads((files("headwise.teach") / "names.toml").read_text(encoding="utf-8"))
VALUES: dict[str, Any] = {
    "KV_HEADS": KV_HEADS,
    "HEADS": HEADS,
    "HEAD_DIM": HEAD_DIM,
    "CONTEXT": CONTEXT,
    "WIDTH": WIDTH,
    "none": None,
}
VALUES["rng"] = np.random.default_rng(0)


class UnfilledError(HeadwiseError):
    """A parameter whose meaning its name does not tell; the message names the option that does."""


def value_of(name: str, sizes: Mapping[str, Any]) -> Any:
    """What to pass for a parameter of that name, `sizes` first. KeyError where the name says nothing."""
    if name in sizes:
        return sizes[name]
    plain = name.lower().strip("_")
    for entry in NAMES["arguments"]:
        if re.fullmatch("|".join(entry["names"]), plain):
            return VALUES.get(entry["value"], entry["value"])
    raise KeyError(name)


class Config:
    """A config object of any course: attributes and items, by what their names mean, else as the defaults say."""

    def __init__(self, sizes: Mapping[str, Any], defaults: Any = None) -> None:
        self.__dict__["_sizes"], self.__dict__["_defaults"] = dict(sizes), defaults

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return value_of(name, self._sizes)
        except KeyError:
            if self._defaults is not None and hasattr(self._defaults, name):
                return getattr(self._defaults, name)
            raise UnfilledError(
                f"the config has no {name!r} that this check could fill; pass --args {name}=VALUE"
            ) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self._sizes[name] = value

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def __contains__(self, name: str) -> bool:
        return True

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return value_of(name, self._sizes)
        except KeyError:
            return default


def build(make: Callable[..., Any], sizes: Mapping[str, Any], namespace: Mapping[str, Any]) -> Any:
    """An instance of a learner's class, its arguments filled in by name.

    sizes      what `--args` says, by the name of the parameter
    namespace  the names of the learner's file, where the class of a config may be
    """
    parameters = inspect.signature(make).parameters
    kwargs: dict[str, Any] = {}
    for name, parameter in parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        required = parameter.default is parameter.empty
        if re.fullmatch(r"(config|cfg|args|conf|c|params|hparams|configuration|opts?|settings)", name.lower()):
            kwargs[name] = _config(sizes, parameter, namespace)
            continue
        role = re.fullmatch(r"w_?(q|k|v|o|query|key|value|out)", name.lower())
        if role:
            kwargs[name] = np.random.default_rng(1).normal(size=(WIDTH, WIDTH)) / WIDTH**0.5
            continue
        try:
            value = value_of(name, sizes)
        except KeyError:
            if required:
                raise UnfilledError(
                    f"parameter {name!r} of {getattr(make, '__name__', make)} has no name that this check knows; "
                    f"pass --args {name}=VALUE"
                ) from None
            continue
        if required or name in sizes or _overrides(name, parameter.default):
            kwargs[name] = value
    return make(**kwargs)


def _overrides(name: str, default: Any) -> bool:
    """Is an optional argument ours to set? Sizes and biases are, so that nothing hides; other choices stay theirs."""
    plain = name.lower()
    if re.search("bias|drop|causal", plain) or plain == "p":
        return True
    if default is None:
        return re.search("kv|group", plain) is not None
    return type(default) is int and "seed" not in plain


def _config(sizes: Mapping[str, Any], parameter: inspect.Parameter, namespace: Mapping[str, Any]) -> Any:
    """A config whose unknown fields have the values of the learner's own class or dictionary, where there is one."""
    known = parameter.default if parameter.default is not parameter.empty else None
    for value in namespace.values():
        if known is None and isinstance(value, dict) and any("head" in str(key) for key in value):
            known = type("Defaults", (), {str(key): v for key, v in value.items()})()
        if known is None and isinstance(value, type) and re.search(r"config|args$|cfg", value.__name__, re.I):
            try:
                known = value()
            except Exception:  # a class of theirs may want arguments, or do anything at all
                known = None
    return Config(sizes, known)
