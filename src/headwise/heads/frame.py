"""Heads as rows of a table: for pandas, which is imported only here, and for files. No torch here."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headwise.errors import HeadwiseError
from headwise.intervals import Interval

if TYPE_CHECKING:
    from headwise.heads.profiles import HeadProfile, Survey
    from headwise.heads.seen import Seen

BY = ("head", "document")
Row = dict[str, Any]


def survey_rows(survey: Survey, by: str = "head") -> list[Row]:
    """A row a head; or a row a head and document, with the mean of each statistic there. None: not measured.

    Columns of a head: name, part, layer, head, roles (joined by `;`); of each statistic its mean, low, high and
    uniform, the last being that of even attention; of each relation accuracy and elsewhere; importance; ablation, low
    and high. Raises HeadwiseError where documents are asked for that were not kept.
    """
    check_by(by)
    if by == "head":
        return [_head(survey, profile) for profile in survey.profiles]
    if not any(profile.by_document for profile in survey.profiles):
        raise HeadwiseError("the survey keeps no document by itself; take it with by_document=True")
    return [
        _name(profile)
        | {"document": n}
        | {key: _finite(float(values[n])) for key, values in profile.by_document.items()}
        for profile in survey.profiles
        for n in range(survey.n_documents)
    ]


def _name(profile: HeadProfile) -> Row:
    return {key: getattr(profile, key) for key in ("name", "part", "layer", "head")}


def _head(survey: Survey, profile: HeadProfile) -> Row:
    row = _name(profile) | {"roles": "; ".join(profile.roles)}
    for key in survey.statistics:
        row |= _three(key, profile.scores.get(key)) | {f"{key}_uniform": _finite(profile.uniform.get(key))}
    for relation in survey.relations:
        score = profile.relations.get(relation.name)
        row[f"{relation.name}_accuracy"] = None if score is None else _finite(score.accuracy.mean)
        row[f"{relation.name}_elsewhere"] = None if score is None else _finite(score.elsewhere)
    return row | {"importance": _finite(profile.importance)} | _three("ablation", profile.ablation)


def seen_rows(seen: Seen, by: str = "head") -> list[Row]:
    """A row a head that ran; or a row a head and document, in the order in which they ran."""
    check_by(by)
    rows: list[Row] = []
    for name, head in seen.items():
        if by == "head":
            rows.append({"name": name, "rows": head.n_rows, **head.means})
            continue
        ends = list(itertools.accumulate(head.documents))
        for n, (size, end) in enumerate(zip(head.documents, ends, strict=True)):
            means = {key: float(head.rows[key][end - size : end].mean()) if size else math.nan for key in head.rows}
            rows.append({"name": name, "document": n, "rows": size, **means})
    return rows


def check_by(by: str) -> None:
    if by not in BY:
        raise HeadwiseError(f"by={by!r} is not known; one of {', '.join(BY)}")


def frame(rows: Sequence[Row]) -> Any:
    """The rows as a pandas DataFrame; not measured is NaN."""
    try:
        import pandas
    except ModuleNotFoundError:
        raise HeadwiseError("a table in Python needs pandas: pip install 'headwise[tables]'") from None
    return pandas.DataFrame(list(rows))


def parquet(rows: Sequence[Row]) -> bytes:
    """The rows as a Parquet file."""
    file = io.BytesIO()
    try:
        frame(rows).to_parquet(file, engine="pyarrow", index=False)
    except ImportError:
        raise HeadwiseError("a Parquet file needs pyarrow: pip install 'headwise[tables]'") from None
    return file.getvalue()


def _three(key: str, value: Interval | None) -> Row:
    bounds = (None, None, None) if value is None else (value.mean, value.low, value.high)
    return {name: _finite(bound) for name, bound in zip((key, f"{key}_low", f"{key}_high"), bounds, strict=True)}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
