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


def mask_convention(scope: Source, whole: Source) -> str | None:
    """What 1 or True in a mask argument means, where comments, names or the rest of the file tell it."""
    told = _told(scope.text) or _told(whole.text)
    if told:
        return told
    if scope.says(r"mask\s*==\s*0|~\w*mask|logical_not\(\w*mask|not \w*mask\["):
        return "allowed"
    if scope.says(r"\(1(\.0)? - \w*mask[^)]*\) \* \(?-|-[\w.]+\)? \* \(1(\.0)? - \w*mask"):
        return "allowed"
    if scope.says(r"\bmask \* \(?-[\w.]+|-[\w.]+\)? \* mask\b"):
        return "forbidden"
    rest = whole.code
    if "tril" in rest and "triu" not in rest and not scope.says("tril"):
        return "allowed"
    if "triu" in rest and "tril" not in rest and not scope.says("triu") and not re.search(r"-?(inf|1e9)", rest):
        return "forbidden"
    return None


def _told(text: str) -> str | None:
    """What a text says in so many words, such as "1 = may attend"."""
    for number, other in (("1s?|true|ones?", "allowed"), ("0s?|false|zeros?", "forbidden")):
        for match in re.finditer(rf"\b(?:{number})\b(?:['\"`:=)]|\s)([^.;,\n]{{3,60}})", text, re.I):
            window = re.split(r"\b(0|1|true|false)\b", match[1], flags=re.I)[0]
            if re.search(_NOT, window, re.I):
                return "forbidden" if other == "allowed" else "allowed"
            if re.search(_MAY, window, re.I):
                return other
    return None
