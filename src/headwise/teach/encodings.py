"""The forms in which code takes a mask, and what tells which of them a learner means."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from headwise.teach.source import Source

ENCODINGS: dict[str, Any] = {
    "True = may attend": lambda allowed: allowed,
    "1 = may attend": lambda allowed: allowed.astype(float),
    "0 or -inf, added": lambda allowed: np.where(allowed, 0.0, -np.inf),
    "0 or -1e9, added": lambda allowed: np.where(allowed, 0.0, -1e9),
    "True = forbidden": lambda allowed: ~allowed,
    "1 = forbidden": lambda allowed: (~allowed).astype(float),
}

_MAY = r"\b(may|can|keep|kept|attend|visible|allow|valid|real|see|seen|look|puede|permit|ver|se ve)"
_NOT = r"\b(masked|mask out|forbid|hid|block|ignor|pad|not|cannot|never|prohib|tapa|ocult|future|futuro)"


_ADDED = (
    r"mask[^\n]{0,60}(added? to|to be added|additive|se suma|aditiva)|additive[^\n]{0,20}mask|\b0 (or|o|and|y) -inf"
)


def meanings_of(scope: Source, whole: Source, name: str) -> list[str]:
    """The keys of ENCODINGS that a mask argument of that name may have."""
    convention = _convention(scope, whole, name)
    return [meaning for meaning in ENCODINGS if convention is None or meaning.endswith(convention)]


def _convention(scope: Source, whole: Source, name: str) -> str | None:
    """How the meaning of a mask ends, where comments, names or the rest of the file tell it."""
    told = _told(scope.text) or _told(whole.text)
    if told:
        return told
    if re.search(_ADDED, scope.text, re.I):
        return "added"
    if scope.says(r"mask\s*==\s*0|~\w*mask|logical_not\(\w*mask|not \w*mask\["):
        return "may attend"
    if scope.says(r"\(1(\.0)? - \w*mask[^)]*\) \* \(?-|-[\w.]+\)? \* \(1(\.0)? - \w*mask"):
        return "may attend"
    if scope.says(r"\bmask \* \(?-[\w.]+|-[\w.]+\)? \* mask\b"):
        return "forbidden"
    name = name.lower()
    made = rf"\b{name} = (?!none)|{name} ==|~{name}|1(\.0)? - {name}|{name}\.(bool|to|float|logical)|not {name}\["
    if not scope.says(made) and scope.says(rf"\w (\+|-)=? {name}\b(?! [*=])"):
        return "added"
    rest = whole.code
    if "tril" in rest and "triu" not in rest and not scope.says("tril"):
        return "may attend"
    if "triu" in rest and "tril" not in rest and not scope.says("triu") and not re.search(r"-?(inf|1e9)", rest):
        return "forbidden"
    return None


def _told(text: str) -> str | None:
    """What a text says in so many words, such as "1 = may attend"."""
    for number, other in (("1s?|true|ones?", "may attend"), ("0s?|false|zeros?", "forbidden")):
        for match in re.finditer(rf"\b(?:{number})\b(?:['\"`:=)]|\s)([^.;,\n]{{3,60}})", text, re.I):
            window = re.split(r"\b(0|1|true|false)\b", match[1], flags=re.I)[0]
            if re.search(_NOT, window, re.I):
                return "forbidden" if other == "may attend" else "may attend"
            if re.search(_MAY, window, re.I):
                return other
    return None
