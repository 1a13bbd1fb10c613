"""Properties that code must have whatever it computes: each says which bug shows, what was checked, what was not."""

from __future__ import annotations

import ast
import contextlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from headwise.checker.bugs import UncheckedError, in_one_line
from headwise.checker.caches import cache_arguments, cache_bug
from headwise.checker.contract import (
    BATCH,
    HEADS,
    TOKENS,
    Attention,
    Seen,
    Target,
    build,
    call_of,
    required_of,
    to_kind,
)
from headwise.checker.form import Inputs
from headwise.checker.reading import Parts, Reading, parts_of
from headwise.checker.search import Case, close, stages_of
from headwise.checker.source import ENCODINGS, laid_out


@dataclass
class Trial:
    """One adapter that fits: what it was given, how its weights may be read, and what came out."""

    attention: Attention
    readings: list[Reading]
    inputs: Inputs
    parts: Parts = field(default_factory=Parts)
    is_joined: bool = False  # heads stand side by side in what it was given
    mask: Any = None  # of the first call, where one is required
    cases: list[Case] = field(default_factory=list)
    # whether it is taken to be causal, and the cases by that
    guesses: list[tuple[bool, list[Case]]] = field(default_factory=list)
    causal: bool | None = None
    # does its name, its text or the caller say so, and not only its code?
    is_told: bool = False
    explanation: Any = None  # an Explanation, once there is one
    raised: Exception | None = None  # by every form of a mask
    is_stilled: bool = False  # does the identity stand in for norms?
    is_asked: bool = False  # were its properties?
    # bug -> what shows it, of bugs seen by a property
    shown: dict[str, str] = field(default_factory=dict)
    checked: list[str] = field(default_factory=list)
    left: list[tuple[str, dict[str, Any]]] = field(default_factory=list)


def properties_of(trial: Trial, target: Target) -> None:
    """Ask each property; what one cannot be asked is left out with its reason."""
    trial.is_asked = True
    attention = trial.attention
    inputs = trial.cases[0].inputs
    mask = trial.mask
    base = attention(inputs, mask)
    again = attention(inputs, mask)
    still = np.array_equal(base, again, equal_nan=True)
    # torch's own dropout is held still
    drops = target.scope.says("bernoulli|binomial|rand|default_rng|shuffle")
    if attention.seen.in_eval or (drops and not still):
        trial.shown["dropout-in-eval"] = ""
    elif not still:
        trial.shown["projection-drawn-anew"] = ""
    has_weights = trial.parts.weights and hasattr(attention.module, "train")
    # one key alone weighs 1, whatever the query
    asked = {
        _training: has_weights and attention.rank > 1,
        _documents: still and attention.rank == inputs[0].ndim,
        _future: still and trial.is_told and _is_alone(attention),
        _steps: attention.module and len(attention.inputs) == 1 and attention.rank == 3,
    }
    for ask, applies in asked.items():
        if applies:
            try:
                for bug, evidence in ask(trial, target, inputs, base):
                    trial.shown[bug] = evidence
            except UncheckedError as error:
                trial.left.append((error.key, error.facts))


def _training(
    trial: Trial, target: Target, inputs: Any, base: Any
) -> Iterator[tuple[str, str]]:
    """In training, does a gradient reach every projection, does dropout fall on weights, and does it come back?"""
    attention = trial.attention
    drops = target.scope.says("drop|bernoulli|binomial|rand")
    attention.module.train()
    attention.learns = True
    try:
        attention(inputs, trial.mask)
        weights = parts_of(attention.module, target.options.mapping).weights
        for role, arrays in weights.items():
            for weight in (array.holder for array in arrays):
                # what is kept of a call is no parameter
                if not (getattr(weight, "requires_grad", False) and weight.is_leaf):
                    continue
                if weight.grad is None or (weight.grad == 0).all(-1).any():
                    if attention.keeps:  # as code that only writes texts may do
                        raise UncheckedError("cached_gradients")
                    yield (
                        "no-gradient",
                        target.say("unreached", name=f"W_{role.upper()}"),
                    )
        trial.checked.append("gradients")
        if drops:
            trial.checked.append("dropout")
    except UncheckedError:
        raise
    except Exception as error:  # only these two checks are lost
        if "inplace operation" in str(error) and not trial.is_stilled:
            yield "no-gradient", in_one_line(error)
        trial.left.append(("no_gradients", {"failure": in_one_line(error)}))
        if drops:
            trial.left.append(("no_dropout", {}))
        drops = False
    finally:
        attention.learns = False
        attention.module.eval()
    if attention.seen.on_scores:
        yield "dropout-on-scores", ""
    if drops and not attention.seen.dropped and isinstance(target.thing, type):
        # Would an object that was never in eval drop something?
        with contextlib.suppress(Exception):
            new = build(target, target.sizes)
            new.train()
            other = replace(attention, call=call_of(new), module=new, seen=Seen())
            other(inputs, trial.mask)
            # else it was built with their own rate, which may be 0
            is_alike = _rates(new) == _rates(attention.module)
            if other.seen.dropped and is_alike:
                yield "dropout-lost", ""


def _rates(module: Any) -> list[Any]:
    """Those of torch's own dropout."""
    parts = module.modules()
    return [part.p for part in parts if "Dropout" in type(part).__name__]


def _documents(
    trial: Trial, target: Target, inputs: Any, base: Any
) -> Iterator[tuple[str, str]]:
    """With another first document, what comes out for the rest of the batch must stay."""
    rng = np.random.default_rng(4)
    others = [np.concatenate([rng.normal(size=x[:1].shape), x[1:]]) for x in inputs]
    q, k, v = others[:1] * 3 if len(trial.attention.inputs) == 1 else others
    trial.checked.append("batch")
    if not close(trial.attention((q, k, v), trial.mask)[1:], base[1:]):
        yield "batch-mixed", ""


def _is_alone(attention: Attention) -> bool:
    """Does the code take one text and no mask?"""
    is_masked = attention.mask is not None or attention.keeps
    return attention.rank > 1 and len(attention.inputs) == 1 and not is_masked


def _future(
    trial: Trial, target: Target, inputs: Any, base: Any
) -> Iterator[tuple[str, str]]:
    """Of causal code a change of the last token must change nothing before it."""
    x = inputs[0].copy()
    x[..., -1, :] = np.random.default_rng(5).normal(size=x[..., -1, :].shape)
    if not close(trial.attention((x, x, x))[..., :-1, :], base[..., :-1, :]):
        yield "mask-missing", target.say("later_seen")


def _steps(
    trial: Trial, target: Target, inputs: Any, base: Any
) -> Iterator[tuple[str, str]]:
    """Does a text that is read in pieces, through a cache, give what the whole text gives?"""
    attention = trial.attention
    mask = _causal_mask(trial)
    if mask is None and attention.mask_required:
        return
    steps = cache_bug(attention, inputs[0], base, target, mask)
    if steps is not None:
        trial.checked.append("steps")
        attention.passed.update(cache_arguments(attention))
        yield from steps.items()


def _causal_mask(trial: Trial) -> Any:
    """What makes a causal mask for some queries, from `start` on: of a layer that is causal by its mask alone."""
    explanation = trial.explanation
    name = str(trial.attention.mask)
    case = next((case for case in trial.cases if case.name == "mask"), None)
    if trial.causal or not explanation or not case or trial.attention.is_lengths:
        return None
    stages = stages_of(explanation.reading, explanation.by_case.get("mask", {}), case)
    if stages is None:
        return None
    fitting = [form for form, out in case.outputs.items() if close(out, stages.out)]
    if not fitting:
        return None
    shape, _, meaning = fitting[0].partition(" ")

    def mask(start: int, n: int) -> Any:
        past = np.tril(np.ones((1, 1, n, start + n), bool), start)
        form = laid_out(past, None, len(case.inputs[0]), HEADS)[shape]
        return {name: to_kind(ENCODINGS[meaning](form), trial.attention.kind)}

    return mask


def masks_handed(attention: Attention, target: Target) -> list[Any]:
    """The triangles that a model of the file hands to the attention for a mask, or a function of it makes."""
    from unittest.mock import patch

    kind = type(attention.module)
    method = attention.call.__name__
    before = getattr(kind, method)
    handed = []
    # of the tokens two or more after another one, and before it
    after = np.triu_indices(TOKENS, 2)

    def keep(mask: Any) -> None:
        if np.shape(mask)[-2:] == (TOKENS, TOKENS):
            low, high = ({*mask[..., i, j].flat} for i, j in (after, after[::-1]))
            if low != high and len(low) == len(high) == 1:
                handed.append(mask)

    def watched(*args: Any, **named: Any) -> Any:
        arguments = inspect.signature(before).bind(*args, **named).arguments
        keep(np.asarray(arguments.get(str(attention.mask))))
        return before(*args, **named)

    ids = to_kind(np.ones((BATCH, TOKENS), int), attention.kind)
    for name, node in target.source.definitions.items():
        # a function may train the model
        is_class = isinstance(node, ast.ClassDef)
        if is_class and target.name in target.source.reach(name)[1:]:
            model = replace(target, name=name, thing=target.namespace.get(name))
            # it may want anything, and need not be a model
            with contextlib.suppress(Exception), patch.object(kind, method, watched):
                call = call_of(build(model, {}))
                call(*[ids] * len(required_of(call)))
    for name in () if handed else target.source.definitions:
        maker: Any = target.namespace.get(name)
        turned = rf"(~|- ?|not ){name.lower()}\(|{name.lower()}\(.*\) ?[=!]="
        is_turned = target.source.says(turned)  # it is for another layer as it is
        # `train_masked` is none, and may do anything
        is_maker = inspect.isfunction(maker) and re.search("(mask|scara)s?$", name)
        if is_maker and not is_turned:
            for text in (ids, TOKENS):
                with contextlib.suppress(Exception):  # it may want anything
                    mask = np.asarray(maker(*[text] * len(required_of(maker))))
                    if {*np.ravel(mask)} == {0, 1}:  # one that is added may be, too
                        keep(mask)
    return handed
