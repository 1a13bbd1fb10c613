"""Weights that code is handed: matrices and biases for arguments of a function or a class whose names tell a role.

They come one by one, in a record, in a dictionary, or in dictionaries within it; one for all heads, or one for each;
for products from the right or from the left. `handed` yields the ways that the names leave open.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from headwise.checker.bugs import Settings
from headwise.checker.contract import (
    HEAD_DIM,
    HEADS,
    NAMES,
    WIDTH,
    Target,
    arguments_of,
    kind_of_arrays,
    required_of,
    to_kind,
)
from headwise.checker.reading import are_all, role_of, roles_of

SAYS = NAMES["says"]


class Table(dict[str, Any]):
    """Weights by their names, also as attributes. Any other key, as `layer0.attn_wq`, gets that of its role.

    sections  keys of what has other weights in it, as "attn" in `block["attn"]["c_proj"]`
    """

    sections: Collection[str] = ()

    def __missing__(self, key: str) -> Any:
        if key in self.sections:
            return self
        for name, value in self.items():
            if role_of(key) is not None and role_of(name) == role_of(key):
                return value
        raise KeyError(key)  # code may ask for what is not there, and go on without it

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(name)


@dataclass
class Names:
    """Names of weights with their roles.

    parts     of a name: the keys of a dictionary of its own, for a matrix and its bias
    table     the argument that holds them all, if there is one
    sections  its keys that hold other weights
    """

    roles: dict[str, str]
    parts: dict[str, list[str]]
    table: str = ""
    sections: Collection[str] = ()


def names_of_weights(target: Target, names: list[str]) -> Names:
    """The arguments that tell a role (q, k, v, o, ...), or the keys and fields of one that holds all weights."""
    is_class = isinstance(target.thing, type)
    parts = {name: _spread(target, name) for name in names}
    wanted = [n for n in names if parts[n] or re.match(SAYS["matrix"], n, re.I)]
    table = next((n for n in names if re.fullmatch(SAYS["table"], n)), "")
    if not table or len(wanted) > 2:  # `theta` is no table beside them
        return Names(roles_of(wanted), parts)
    tree = target.scope.tree
    wanted = re.findall(rf"\b{table}(?:\.|\[['\"])(\w+)", ast.unparse(tree))
    constants = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)]
    texts = [value for value in constants if isinstance(value, str)]
    if not is_class:  # those of a class may mean anything
        wanted += texts
    words = "(?i)w|b|weights?|bias|kernel"
    pair = [text for text in wanted if re.fullmatch(words, text)]
    roles = roles_of(wanted)
    if roles and not is_class and "qkv" not in roles.values():
        # Code that wrongly takes K for values, too, never names W_V: the table has it all the same; and code may
        # make the names that it asks for.
        roles |= {f"w{role}": role for role in "qkv" if role not in roles.values()}
    sections = {text for text in texts if role_of(text) is None} - {*pair}
    return Names(roles, dict.fromkeys(wanted, pair), table, sections)


def _spread(target: Target, name: str) -> list[str]:
    """The keys of a dictionary that is handed on as `f(x, **name)`: the parameters of f, but for x."""
    for node in ast.walk(target.scope.tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        function = target.namespace.get(node.func.id)
        spread = [key.value for key in node.keywords if key.arg is None]
        names = {each.id for each in spread if isinstance(each, ast.Name)}
        if name in names and callable(function):
            return list(arguments_of(function))[len(node.args) :]
    return []


def _is_bias(name: str) -> bool:
    return re.match(SAYS["bias"], name, re.I) is not None


def handed(
    target: Target,
    split_of: Callable[[Any], tuple[int, int, int] | None],
    rng: np.random.Generator,
) -> Iterator[tuple[dict[str, Any], Settings]]:
    """What to pass for the arguments, and its sizes; nothing where names do not tell queries, keys and values.

    Narrow matrices (C,d) come first. They fit one head without W_O, and show a scale by the wrong width.

    split_of  names of arguments -> heads, key/value heads and width of one, as the code cuts them; None: not at all
    """
    thing = target.thing
    is_class = isinstance(thing, type)
    arguments = required_of(thing) if is_class else list(arguments_of(thing))
    names = names_of_weights(target, arguments)
    roles = names.roles
    if not are_all(roles.values()):
        return
    says = target.scope.says
    # of numbers or matrices of its own
    kind = "lists" if target.number else kind_of_arrays(target)
    heads, groups, d = split_of(arguments) or (1, 1, WIDTH)
    three = "|".join(name.lower() for name in roles if roles[name] in "qkv")
    # has each head a matrix of its own?
    is_listed = says(rf"\b({three})\[[a-z]\w*\]")
    if is_listed and heads == 1:
        heads = groups = HEADS
        d = HEAD_DIM
    # `w, b = params["q"]`
    is_paired = names.table and says(rf"\w+, \w+ = {names.table.lower()}\[")
    width = heads * d
    apart = [n for n, role in roles.items() if role == "q" and not _is_bias(n)]
    if len(apart) > 1:  # of a name of its own
        heads = len(apart)
        d = HEAD_DIM
        width = WIDTH
    ways = ["narrow", "wide", "out-in", "narrow columns", "columns"]
    if heads == 1 and says("einsum"):
        ways += ["by head", "heads between"]  # (h,C,d) and (C,h,d)
    for way in ways:
        is_narrow = "narrow" in way
        if is_narrow and ({"o", "qkv"} & {*roles.values()} or d != WIDTH):
            continue
        if "head" in way:
            heads = groups = HEADS
            d = HEAD_DIM
        count = {"q": heads, "k": groups, "v": groups, "kv": 2 * groups}
        count["qkv"] = heads + 2 * groups
        if len(apart) > 1 or is_narrow:
            count = dict.fromkeys(count, 1)
        weights: dict[str, Any] = {}
        for name, role in roles.items():
            inner = count.get(role, heads) * (HEAD_DIM if is_narrow else d)
            shape: tuple[int, ...] = (width, inner)
            if role == "o":
                by_head = "head" in way and not _is_bias(name)
                shape = (heads, d, width) if by_head else (inner, width)
            elif role != "qkv" and (is_listed or "head" in way):
                shape = (heads, width, d)
            array = _drawn(name, shape, way, rng)
            if way == "heads between" and role != "o" and array.ndim == 3:
                array = array.swapaxes(0, 1)
            parts = dict.fromkeys(names.parts.get(name, ()), array)
            for key in filter(_is_bias, parts):
                parts[key] = rng.normal(size=shape[-1])
            weights[name] = to_kind(parts or array, kind)
            if is_paired:
                bias = to_kind(rng.normal(size=shape[-1]), kind)
                weights[name] = weights[name], bias
        if names.table:
            table = Table(weights)
            table.sections = names.sections
            weights = {names.table: table}
        yield weights, {"HEADS": heads, "WIDTH": width}


def _drawn(
    name: str, shape: tuple[int, ...], way: str, rng: np.random.Generator
) -> Any:
    """A matrix of that shape, or a bias of its width; where tokens are columns, for the product from the left."""
    if _is_bias(name):
        shape = shape[-1:] if len(shape) == 2 else shape[::2]
    # 1.2 as in `renew`, which tells why
    array = rng.normal(size=shape) * 1.2 / WIDTH**0.5
    if _is_bias(name):
        return array[..., None] if "columns" in way else array
    if "columns" in way or (array.ndim == 2 and way == "out-in"):
        array = array.swapaxes(-1, -2)
    return np.ascontiguousarray(array)
