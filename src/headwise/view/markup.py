"""What the HTML pages of a survey share: escaping, counting, and numbers as text."""

from __future__ import annotations

import html
import math

MISSING = "\u2013"  # an en dash


def escaped(text: str) -> str:
    """Safe in an element or a quoted attribute; half a surrogate pair, which UTF-8 cannot hold, becomes `?`."""
    return html.escape(text.encode("utf-8", "replace").decode())


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def listed(names: list[str], most: int) -> str:
    """The first names in a row, and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more:,} more" if more > 0 else "")


def number(value: float | None, decimals: int, signed: bool = False) -> str:
    """A number for a column; a dash for what is not finite or was not measured. No zero has a sign."""
    if value is None or not math.isfinite(value):
        return MISSING
    rounded = round(value, decimals) or 0.0
    text = f"{rounded:+,.{decimals}f}" if signed and rounded else f"{rounded:,.{decimals}f}"
    return text.replace("-", "\u2212")
