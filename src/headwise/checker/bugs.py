"""The catalogue of bugs, read from `bugs.toml`; what a check says of them; and its words, in English and Spanish."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from headwise.errors import HeadwiseError
from headwise.files import read_toml
from headwise.table import escaped
from headwise.words import LANGUAGES, check_lang, unknown

# values by names: steps of the form (form.py), or sizes for arguments (contract.py)
Settings = Mapping[str, Any]
UNKNOWN = "unknown"  # the id of a difference that no bug explains


@dataclass(frozen=True)
class Bug:
    """A bug that learners write, as an entry of `bugs.toml` has it."""

    id: str  # "scale-missing"
    # Language -> name, wrong (what is wrong), fix.
    texts: Mapping[str, Mapping[str, str]]
    # patterns of the source line in which it most likely stands, the likeliest first
    lines: Sequence[str]
    evidence: (
        str  # which numbers show it, such as "scores"; see `evidence_of` in `search.py`
    )
    # what code must have, so that the bug is tried: "mask", "rope", "groups" and others
    needs: Sequence[str] = ()
    # each way to write it, as settings of `form.py`; none: a property shows it
    changes: Sequence[Settings] = ()
    # a pattern of ids: beside such a bug that property is no evidence of this one
    hidden_by: str = ""
    # code (a pattern), to (a bug): where it matches, that bug is named
    renamed: Sequence[Mapping[str, str]] = ()

    def name(self, lang: str = "en") -> str:
        return self.text("name", lang)

    def text(self, what: str, lang: str = "en") -> str:
        return self.texts[lang][what]


@cache
def catalogue() -> dict[str, Bug]:
    """All bugs by their ids, in the order of the file."""
    bugs = {}
    names = read_toml("checker/bugs.toml")["names"]
    for name, entry in read_toml("checker/bugs.toml")["bug"].items():
        # `pop` takes it out of what `read_toml` keeps, too, and nobody else reads these entries.
        parts = ("name", "wrong", "fix")
        texts = {
            lang: dict(zip(parts, entry.pop(lang), strict=True)) for lang in LANGUAGES
        }
        # Words in capitals, such as SCORES, stand for patterns of what courses call these things. None begins another.
        lines = [
            re.sub("|".join(names), lambda match: names[match[0]], line)
            for line in entry.pop("lines")
        ]
        bugs[name] = Bug(name, texts, lines, **entry)
    return bugs


def bug_named(name: str) -> Bug:
    """The bug of that id, or an error that offers the nearest."""
    if name not in catalogue():
        raise unknown(f"no bug {name!r}", name, catalogue())
    return catalogue()[name]


def words(lang: str) -> Mapping[str, str]:
    """The phrases of this package in a language."""
    check_lang(lang)
    phrases: Mapping[str, str] = read_toml("checker/words.toml")[lang]
    return phrases


Say = Callable[..., str]  # a phrase by its key, with its facts


def speaker(lang: str) -> Say:
    """What says the phrases of this room in a language."""
    phrases = words(lang)
    # `/`, so that a fact may be called `key`.
    return lambda key, /, **facts: phrases[key].format(**facts)


# What tells an error better than its kind: the key of a phrase -> what Python or NumPy writes.
ERRORS = {
    "error_whole": r"interpreted as an integer|indices must be integers",
    "error_matmul": r"gufunc signature.*size (?P<rows>\d+) is different from (?P<columns>\d+)",
    "error_lists": r"operand type\(s\) for @: 'list'",
    "error_axes": r"axes don't match array",
    "error_joined": r"can only concatenate list",
}


def plainly(error: str, lang: str) -> str:
    """An error of Python in plain words where there are some for it; behind those for its kind, as Python writes it."""
    for key, pattern in ERRORS.items():
        if match := re.search(pattern, error):
            return speaker(lang)(key, **match.groupdict())
    text = words(lang).get(f"error_{error.split(':')[0]}", "")
    return f"{text} ({error})" if text else error


def in_one_line(error: BaseException) -> str:
    """An error with its class, and its text on one line: "ValueError: not enough values"."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


class UncheckedError(HeadwiseError):
    """Why code could not be checked: the key of a phrase, and the facts that go into it. By itself it is in English."""

    def __init__(self, key: str, /, **facts: Any) -> None:
        self.key = key
        self.facts = facts
        super().__init__(self.text("en"))

    def text(self, lang: str) -> str:
        return speaker(lang)(self.key, **self.facts)


class AskedError(UncheckedError, AttributeError):
    """A config was asked for what it has not: an AttributeError, so that `getattr(config, name, 0)` gives the 0."""


def changes_of(
    bug: Bug, base: Settings, fills: Sequence[float] = ()
) -> Iterator[Settings]:
    """Every way in which a bug changes a layer whose correct settings are `base`: settings that go over those.

    Without rotary positions there are none of the bugs of rotations; what changes nothing is left out.

    fills  numbers of the learner's source that may stand in the place of a forbidden score
    """
    rope: Any = base.get("rope")
    if "rope" in bug.needs and not rope:
        return
    for row in bug.changes:
        change = dict(row)
        for name in {"rope", "rope_k"} & set(row):
            # false in the row: nothing is rotated
            change[name] = row[name] and _rotation(row[name], rope)
        choices = change.get("fill")
        if choices == "cap" and not base.get("softcap"):
            continue
        if choices == "theirs":
            # BERT's -10000 or less forbids: its exp is 0
            choices = [fill for fill in fills if fill > -1e4]
        versions = (
            [{**change, "fill": fill} for fill in choices]
            if isinstance(choices, list)
            else [change]
        )
        for version in versions:
            if any(
                name not in base or base[name] != value
                for name, value in version.items()
            ):
                yield version


def _rotation(
    row: tuple[str, str, float], rope: tuple[str, str, float]
) -> tuple[str, str, float]:
    """A rotation of the catalogue as the form takes it, where `rope` is the right one: (turn, table, base) of both.

    row  says of turn and table "right", "wrong" or "none", and to which power the right base is taken
    """
    right, _, theta = rope  # the layout stands twice, as turn and table agree
    layouts = {
        "right": right,
        "wrong": "half" if right == "interleaved" else "interleaved",
        "none": "none",
        "plus": f"{right}-plus",
    }
    of_turn, of_table, power = row
    # a table may be cut in the same wrong way whatever the layout
    return layouts[of_turn], layouts.get(of_table, of_table), theta**power


# What a check found.


@dataclass(frozen=True)
class Finding:
    """One bug in the learner's code.

    line      of the learner's file, from 1, in which it most likely stands; None where no line looks like it
    quote     the text of that line; JSON has only its number
    evidence  the sentence that shows the bug
    """

    bug: str  # an id of the catalogue, or "unknown"
    line: int | None
    quote: str
    evidence: str
    fix: str


@dataclass(frozen=True)
class Verdict:
    """The result of a check. `right` is None where it could not be checked; then `not_checked` says why.

    `target` is the name of what was checked; `checked` and `not_checked` are phrases in the language of `lang`.
    """

    target: str
    kind: str  # layer or function; empty where nothing was found to check
    right: bool | None
    findings: tuple[Finding, ...] = ()
    checked: tuple[str, ...] = ()
    not_checked: tuple[str, ...] = ()
    lang: str = "en"
    # of a file with several attentions, on the others; the worst stands first
    others: tuple[Verdict, ...] = ()

    @property
    def bugs(self) -> tuple[str, ...]:
        """The ids of what is wrong."""
        return tuple(finding.bug for finding in self.findings)

    @property
    def exit_code(self) -> int:
        """0 right, 1 wrong, 2 not checked."""
        return 2 if self.right is None else int(not self.right)

    def to_json(self) -> dict[str, Any]:
        # The key is there only for a file with several attentions.
        others = (
            {"others": [other.to_json() for other in self.others]}
            if self.others
            else {}
        )
        return {
            "target": self.target,
            "kind": self.kind,
            "right": self.right,
            "bugs": [
                {"bug": f.bug, "line": f.line, "evidence": f.evidence, "fix": f.fix}
                for f in self.findings
            ],
            "checked": list(self.checked),
            "not_checked": list(self.not_checked),
            **others,
        }

    def __str__(self) -> str:
        say = speaker(self.lang)
        lines = [f"{self.target}: {say(f'verdict_{self.right}')}"]
        for finding in self.findings:
            bug = catalogue().get(finding.bug)
            lines += [
                "",
                f"{bug.name(self.lang)} ({bug.id})" if bug else say("unknown"),
            ]
            if finding.line is not None:
                lines.append(f"  {say('line')} {finding.line}: {finding.quote}")
            if bug:
                lines.append(f"  {bug.text('wrong', self.lang)}")
            lines.append(f"  {say('evidence')}: {finding.evidence}")
            if finding.fix:
                lines.append(f"  {say('fix')}: {finding.fix}")
        lines.append("")
        for key, what in (("checked", self.checked), ("left_out", self.not_checked)):
            if what:
                lines.append(f"{say(key)}: {'; '.join(what)}")
        for other in self.others:
            lines += ["", str(other)]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return f'<pre style="white-space:pre-wrap">{escaped(str(self))}</pre>'
