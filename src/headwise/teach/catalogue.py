"""The catalogue of bugs: one record each, in English and Spanish, read from `bugs.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from headwise.errors import HeadwiseError, unknown

UNKNOWN = "unknown"  # the id of a difference that no bug explains
LANGUAGES = ("en", "es")


@dataclass(frozen=True)
class Bug:
    """A bug that learners write.

    texts     language -> name, wrong (what is wrong), symptom (what it does), how (it is found), fix
    lines     patterns of the source line in which it most likely stands, the likeliest first
    evidence  which numbers of the learner's code show it; see `headwise.teach.evidence`
    """

    id: str
    texts: Mapping[str, Mapping[str, str]]
    lines: tuple[str, ...]
    evidence: str

    def name(self, lang: str = "en") -> str:
        return self.texts[lang]["name"]

    def text(self, what: str, lang: str = "en") -> str:
        return self.texts[lang][what]


@cache
def _document() -> dict[str, Any]:
    return tomllib.loads((files("headwise.teach") / "bugs.toml").read_text(encoding="utf-8"))


@cache
def catalogue() -> dict[str, Bug]:
    """All bugs by their ids, in the order of the file."""
    return {
        name: Bug(name, {lang: entry[lang] for lang in LANGUAGES}, tuple(entry["lines"]), entry["evidence"])
        for name, entry in _document()["bug"].items()
    }


def bug_named(name: str) -> Bug:
    """The bug of that id, or an error that offers the nearest."""
    if name not in catalogue():
        raise unknown(f"no bug {name!r}", name, catalogue())
    return catalogue()[name]


def words(lang: str) -> Mapping[str, str]:
    """The phrases of a verdict in a language."""
    if lang not in LANGUAGES:
        raise HeadwiseError(f"lang={lang!r} is not known; one of {', '.join(LANGUAGES)}")
    phrases: Mapping[str, str] = _document()["words"][lang]
    return phrases
