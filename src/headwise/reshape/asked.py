"""What `share` and `prune` are asked, and what of it a config.json and the names of files rule out, without torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headwise.cost.config import check_sizes, shape_by_formula
from headwise.errors import HeadwiseError
from headwise.families import FAMILIES, RECORD, check_next, read_config
from headwise.records import parse_head
from headwise.words import unknown

# For each layer the numbers of the heads that go.
Gone = tuple[tuple[int, ...], ...]
METHODS = ("mean", "aligned", "aligned+norm")  # the last is the default
GROUPS = ("adjacent", "best")
SCORES = ("importance", "ablation", "role")  # the first is the default


class Asked(ABC):
    """A request; its fields, with the text, determine the child."""

    @abstractmethod
    def check_config(self, folder: Path) -> None:
        """Refuse the family of a model that lies in a folder, by its config alone."""

    @abstractmethod
    def check_sizes(self, n_layers: int, n_heads: int, n_kv_heads: int) -> None:
        """Refuse what a model of these sizes cannot be asked: by its config alone, before its weights are read."""


@dataclass(frozen=True)
class AskedToShare(Asked):
    """The arguments of `share` that say what is shared, and how."""

    n_kv_heads: int  # of the child, in each layer
    method: str = METHODS[-1]  # how one head is made of several
    groups: str = GROUPS[0]

    def __post_init__(self) -> None:
        known = {"method": METHODS, "groups": GROUPS}
        for name, values in known.items():
            value = getattr(self, name)
            if value not in values:
                raise unknown(f"{name}={value!r} is not known", value, values)

    def check_config(self, folder: Path) -> None:
        # None: a model of pictures and text, whose language model is looked at when open
        family = FAMILIES.get(str(read_config(folder).get("model_type")))
        if family is not None and not family.grouped:
            raise HeadwiseError(
                f"{family.name}'s config has no num_key_value_heads, so what shares its heads' keys and values "
                "cannot be written; share a Llama-type model, or remove heads with `headwise prune`"
            )

    def check_sizes(self, n_layers: int, n_heads: int, n_kv_heads: int) -> None:
        divisors = [n for n in range(1, n_kv_heads) if n_kv_heads % n == 0]
        if self.n_kv_heads in divisors:
            return
        remedy = ", the least there can be"
        if divisors:
            remedy = f"; sharing lowers their number to one of {', '.join(map(str, divisors))}"
        raise HeadwiseError(
            f"n_kv_heads={self.n_kv_heads}: the model has {n_kv_heads} key/value heads for its "
            f"{n_heads} query heads{remedy}"
        )


@dataclass(frozen=True)
class AskedToPrune(Asked):
    """The arguments of `prune` that say which heads go."""

    heads: str | Sequence[str] | None = None
    keep: float | None = None
    by: str | None = None
    uniform: bool = False

    def __post_init__(self) -> None:
        heads, keep, by = self.heads, self.keep, self.by
        if (heads is None) == (keep is None):  # neither, or both
            raise HeadwiseError(
                "say which heads go: heads='L0.H1,L3.H5', or keep=0.75 with by=; one of the two"
            )
        if heads is not None and by is not None:
            raise HeadwiseError(
                f"by={by!r} chooses heads where keep= says how many stay; heads= names them"
            )
        if by not in (None, *SCORES):
            raise unknown(f"by={by!r} is not known", by, SCORES)
        if keep is None:
            return
        if keep == 1:
            raise HeadwiseError(
                f"keep={keep} keeps every head: nothing changes, nothing is written; 0.75 removes a quarter"
            )
        if not 0 < keep < 1:
            raise HeadwiseError(
                f"keep={keep} must lie between 0 and 1; 0.75 removes a quarter of the heads"
            )
        # a frozen record has no assignment to its fields
        vars(self)["by"] = by or SCORES[0]

    def check_config(self, folder: Path) -> None:
        # the other scores need the loss of a next token
        if self.by not in (None, "role"):
            check_next(folder, "pass by='role', or heads=")

    def check_sizes(self, n_layers: int, n_heads: int, n_kv_heads: int) -> None:
        if self.heads is not None:
            chosen_heads(self.heads, n_layers, n_heads)


def chosen_heads(names: str | Sequence[str], n_layers: int, n_heads: int) -> Gone:
    """For each layer the numbers of the heads named in a list, or in a text such as "L0.H1,L3.H5".

    Raises HeadwiseError for what is no head of the model, for no name at all, and for a layer left without a head.
    """
    chosen: list[set[int]] = [set() for _ in range(n_layers)]
    listed = names.split(",") if isinstance(names, str) else names
    for name in filter(None, map(str.strip, listed)):
        # `part`: a stack of a model with several, of which none is pruned
        part, layer, head = parse_head(name)
        if part or layer >= n_layers or head >= n_heads:
            last = f"L{n_layers - 1}.H{n_heads - 1}"
            raise HeadwiseError(
                f"the model has no head {name}: {n_layers} layers of {n_heads} heads, L0.H0 to {last}"
            )
        chosen[layer].add(head)
        if len(chosen[layer]) == n_heads:
            raise HeadwiseError(
                f"all {n_heads} heads of layer {layer} are to go; a layer needs one"
            )
    if not any(chosen):
        raise HeadwiseError(
            "no head is named; pass heads='L0.H1,L3.H5', or keep= with by="
        )
    return tuple(tuple(sorted(gone)) for gone in chosen)


def check_config(path: Path, asked: Asked, tokens: int | None = None) -> None:
    """Refuse what config.json rules out: the family, and sizes that the change cannot have."""
    asked.check_config(path)
    config = read_config(path)
    try:
        shape = shape_by_formula(config)
    except HeadwiseError:  # not every size is told; these may be
        check_sizes(config)
        names = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")
        sizes = [config[name] for name in names if isinstance(config.get(name), int)]
        if len(sizes) == len(names):
            asked.check_sizes(*sizes)
        return
    # the first layer has as many heads as any other
    attention = shape.layers[0].attention
    assert attention is not None
    asked.check_sizes(len(shape.layers), attention.n_heads, attention.n_kv_heads)
    check_tokens(tokens, shape.positions if shape.generates else None)


def check_out(source: Path, out: Path | None, force: bool) -> None:
    """Refuse a folder that may not be written, and `force` without one."""
    if out is not None:
        check_place(source, out, force)
    elif force:
        raise HeadwiseError("force=True is about the folder that is written; pass out=")


def check_place(source: Path, out: Path, force: bool) -> None:
    """Raise HeadwiseError where no model may be written; a folder with a RECORD is one that `reshape` has written."""
    here, there = source.resolve(), out.resolve()
    holds_files = out.is_dir() and any(out.iterdir())
    problem = ""
    if here in (there, *there.parents) or there in here.parents:
        problem = f" and the source {source}, which is never changed, lie in one another; pass another folder"
    elif out.is_symlink() or (out.exists() and not out.is_dir()):
        problem = " is a link or a file; pass a folder"
    elif not there.parent.is_dir():
        problem = f": the folder {out.parent} does not exist"
    elif holds_files and not (out / RECORD).exists():
        problem = f" exists already and has no {RECORD}: share or prune did not write it; pass another folder"
    elif holds_files and not force:
        problem = " exists already; pass force=True to replace it, or another folder"
    if problem:
        raise HeadwiseError(f"out={str(out)!r}{problem}")


def check_tokens(tokens: int | None, context: int | None) -> None:
    """Refuse documents of so many tokens for a model that takes `context` at a time; None: without a bound."""
    if tokens is None:
        return
    if tokens < 2:
        raise HeadwiseError(
            f"tokens={tokens} must be at least 2: a token, and the one that follows it"
        )
    if context is not None and tokens > context:
        raise HeadwiseError(f"tokens={tokens} exceeds the model's context of {context}")
