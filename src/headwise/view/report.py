"""One HTML file in which a person touches the heads of a model: a sentence, every head's map of it, and all numbers.

Python brings the data and the frame; the scripts in `page/` make everything that is seen. Whatever a model or a text
brings is data: the scripts put it in the page as text. The data is small, and independent of the length of the text:
numbers of heads are JSON; pictures, weights and key numbers are base64 of little-endian whole numbers.
"""

from __future__ import annotations

import base64
import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.corpus import verbs
from headwise.files import write_whole
from headwise.heads.table import PLACE, TOKENS, HeadProfile, Survey
from headwise.intervals import Interval
from headwise.records import HeadMaps, RunSummary, plain_data
from headwise.table import escaped
from headwise.view.page import frame, json_block, large_view, missing, page, word
from headwise.view.survey import (
    Column,
    columns_of,
    head_notes,
    kinds_of,
    n_layers,
    value_of,
)
from headwise.view.terminal import visible
from headwise.words import Facts, sent

# The page shows three decimals. A step of 1/65535 puts a stored weight at most 0.000008 off, far below the last of
# them, in half the bytes of a float32.
LEVELS = 2**16 - 1
# What the page has as the survey has it.
EXTENT = ("family", "n_documents", "n_tokens", "longest")


def survey_data(
    survey: Survey,
    maps: HeadMaps | None,
    summary: RunSummary | None,
    walk: str | None = None,
) -> Facts:
    """The data of the page; the arguments are those of `report_html`."""
    columns = columns_of(survey)
    roles = []
    for role, kind in zip(survey.roles, kinds_of(survey.roles), strict=True):
        texts = {"meaning": sent(role.meaning), "source": sent(role.source)}
        roles.append({"kind": kind, **vars(role), **texts})
    return {
        "model": title_of(survey, summary),
        "extent": {"n_heads": len(survey), "n_layers": n_layers(survey)}
        | {name: getattr(survey, name) for name in EXTENT},
        "texts": list(map(sent, survey.texts)),
        "loss": survey.loss,
        "ablated": survey.ablated,
        "notes": list(map(sent, survey.notes)),
        "columns": columns,
        "roles": roles,
        "untrained": [(survey.untrained or {}).get(column.key) for column in columns],
        "has_untrained": survey.untrained is not None,
        "tokens": [visible(token) for token in survey.tokens],
        "passage": survey.passage,
        "heads": _heads(survey, columns),
        "maps": None if maps is None else _maps(maps),
        "run": None if summary is None else _run(summary),
        "walk": walk,
        "verbs": verbs.told() if _on_verbs(summary) else None,
    }


def _on_verbs(summary: RunSummary | None) -> bool:
    return summary is not None and summary.facts.get("text") == verbs.NAME


def title_of(survey: Survey, summary: RunSummary | None) -> str:
    """What a page calls the model: a run on the verbs may lie in a folder of any name."""
    return "verbs" if _on_verbs(summary) else survey.model


def _run(summary: RunSummary) -> Facts:
    """The run, whose facts are names and numbers: the page has words for the names, and for the verb corpus."""
    facts: Facts = dict(summary.facts)
    if _on_verbs(summary):
        facts["text"] = sent(verbs.NAME)
    return {**vars(summary), "facts": list(facts.items())}


def _heads(survey: Survey, columns: tuple[Column, ...]) -> list[Facts]:
    """Every head: numbers, pictures, and the sentence about it."""
    # the page has roles by their place
    roles = {role.name: place for place, role in enumerate(survey.roles)}
    # tokens of the first document, which `shares` are of; None where the survey does not tell: TOKENS may go on
    shown = len(survey.tokens) if 0 < len(survey.tokens) < TOKENS else None
    length = survey.longest if survey.n_documents == 1 else shown
    heads = []
    for profile in survey.profiles:
        rows, across = profile.shares.shape
        heads.append(
            {
                **{name: getattr(profile, name) for name in PLACE},
                "cross": profile.part == "cross",
                "values": [_interval(value_of(profile, x.key)) for x in columns],
                "uniform": [_rounded(profile.uniform.get(x.key)) for x in columns],
                "rows": rows,
                "columns": across,
                # the keys of an encoder may be those of another text, or of a sound
                "length": None if profile.part in ("encoder", "cross") else length,
                "shares": quantised(profile.shares),
                "first": quantised(profile.first_key),
                "says": list(map(sent, head_notes(survey, profile))),
                "roles": [roles[role] for role in profile.roles],
                **_looks(profile, survey.passage),
            }
        )
    return heads


def _looks(profile: HeadProfile, passage: int) -> Facts:
    """Where each token of the passage, `passage` at the beginning of the text, looks, and what it receives.

    Received weights are fractions of the largest. Keys have 16 bits: from so early a token only a model that looks
    ahead could reach the 65,536th.
    """
    # NaN stands where the head itself computes NaN; the scripts get 0.
    received = np.nan_to_num(profile.received[:passage].astype(np.float64))
    largest = float(received.max(initial=0.0)) or 1.0
    # (passage, k): the k keys with most weight; where fewer are seen, the others have weight 0.
    keys = profile.top_keys[:passage].astype("<u2")
    return {
        "k": keys.shape[1],
        "keys": _packed(keys),
        "weights": quantised(profile.top_weights[:passage]),
        "largest": largest,
        "received": quantised(received / largest),
    }


def quantised(weights: NDArray[Any]) -> str:
    """Weights in 0..1, any shape, row by row, as base64 of little-endian 16-bit whole numbers of 1/65535; NaN is 0."""
    shares = np.nan_to_num(weights.astype(np.float64)).clip(0, 1)
    return _packed(np.rint(shares * LEVELS).astype("<u2"))


def _packed(numbers: NDArray[Any]) -> str:
    return base64.b64encode(numbers.tobytes()).decode("ascii")


def _maps(maps: HeadMaps) -> Facts:
    """Every head's map under its name."""
    # Zeros above every diagonal are left out, which halves the file; the script is told by `causal`.
    causal = not any(np.triu(head.weights, 1).any() for head in maps.maps)
    kept = np.tri(len(maps.tokens), dtype=bool) | (not causal)
    return {
        "tokens": [visible(token) for token in maps.tokens],
        "causal": causal,
        "weights": {head.name: quantised(head.weights[kept]) for head in maps.maps},
    }


def _interval(value: Interval | None) -> list[float | None] | None:
    if value is None or math.isnan(value.mean):
        return None
    return [_rounded(value.mean), _rounded(value.low), _rounded(value.high), value.n]


def _rounded(value: float | None) -> float | None:
    """Six digits, which is more than is shown; None for what is not finite."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.6g}")


# The sections of words.toml whose phrases the page says.
WORDS = (
    "report",
    "sentence",
    "column",
    "meaning",
    "role",
    "job",
    "source",
    "said",
    "note",
    "fact",
    "film",
    "look",
    "whole",
)


def write_report(path: str | Path, survey: Survey, *more: Any, **options: Any) -> None:
    """Write the page of `report_html`, whole or not at all."""
    write_whole(path, report_html(survey, *more, **options))


def report_html(
    survey: Survey,
    maps: HeadMaps | None = None,
    summary: RunSummary | None = None,
    model: Facts | None = None,
    lang: str = "en",
    film: Facts | None = None,
    walk: str | None = None,
) -> str:
    """The report of a survey as one HTML file.

    maps     exact maps of a short text, each (T, T) for T tokens, which the page opens with; matched by name
    summary  the training run, told last
    model    the model itself, from `models.pack.pack_model`; the page then runs it on the reader's own text
    lang     es for a page that opens in Spanish; en for one that opens in the browser's language
    film     where the heads looked while the model trained, from `gpt.run.read_film`
    walk     the file beside this one that has the walk through a head, from `page.walk_html`
    """
    data = survey_data(survey, maps, summary, walk)
    blocks = {"data": json_block(plain_data(data)), "model": json_block(model)}
    if film is not None:
        blocks["film-data"] = json_block(film)
    name = data["model"]
    no_model = ""
    if model is None or "reason" in model:
        key, facts = missing(model or {"reason": "none"})
        way = word("report.open_live") if model else ""
        no_model = f'<p class="caption">{word(key, **facts)} {way}</p>'
    parts = {"model": escaped(name), "large": large_view(), "no_model": no_model}
    body = frame("page/report.html", **parts)
    return page(
        "report",
        body,
        title=("report.title", {"model": name}),
        styles=("page/heads.css", "page/report.css"),
        script="report.js",
        data=blocks,
        words=WORDS,
        lang=lang,
    )
