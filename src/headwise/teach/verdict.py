"""What a check found: the record, its JSON document, and its words in English and Spanish."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from headwise.markup import escaped
from headwise.teach.catalogue import UNKNOWN, bug_named, words


@dataclass(frozen=True)
class Finding:
    """One bug in the learner's code."""

    bug: str  # an id of the catalogue, or "unknown"
    line: int | None
    quote: str
    evidence: str
    fix: str


@dataclass(frozen=True)
class Verdict:
    """The result of a check. `right` is None where it could not be checked; then `not_checked` says why."""

    target: str
    kind: str  # layer, function, rotary or cache; empty where nothing was found to check
    right: bool | None
    findings: tuple[Finding, ...] = ()
    checked: tuple[str, ...] = ()
    not_checked: tuple[str, ...] = ()
    lang: str = "en"

    @property
    def bugs(self) -> tuple[str, ...]:
        """The ids of what is wrong."""
        return tuple(finding.bug for finding in self.findings)

    @property
    def exit_code(self) -> int:
        """0 right, 1 wrong, 2 not checked."""
        return 2 if self.right is None else int(not self.right)

    def to_json(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "kind": self.kind,
            "right": self.right,
            "bugs": [{"bug": f.bug, "line": f.line, "evidence": f.evidence, "fix": f.fix} for f in self.findings],
            "checked": list(self.checked),
            "not_checked": list(self.not_checked),
        }

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Verdict:
        """The verdict of a record `dataclasses.asdict(verdict)` that went through JSON."""
        lists = {name: tuple(record[name]) for name in ("checked", "not_checked")}
        findings = tuple(Finding(**finding) for finding in record["findings"])
        return cls(**{**record, **lists, "findings": findings})

    def __str__(self) -> str:
        return "\n".join(f"{'  ' * depth}{text}" for depth, text in self._lines())

    def _lines(self) -> Iterator[tuple[int, str]]:
        """Indentation and text of each line."""
        say = words(self.lang)
        head = say["right"] if self.right else say["not_checked"] if self.right is None else say["wrong"]
        yield 0, f"{self.target}: {head}"
        for finding in self.findings:
            bug = None if finding.bug == UNKNOWN else bug_named(finding.bug)
            yield 0, ""
            yield 0, f"{bug.name(self.lang)} ({bug.id})" if bug else say["unknown"]
            if finding.line is not None:
                yield 1, f"{say['line']} {finding.line}: {finding.quote}"
            if bug:
                yield 1, bug.text("wrong", self.lang)
            yield 1, f"{say['evidence']}: {finding.evidence}"
            if finding.fix:
                yield 1, f"{say['fix']}: {finding.fix}"
        yield 0, ""
        for title, texts in ((say["checked"], self.checked), (say["left_out"], self.not_checked)):
            if texts:
                yield 0, f"{title}: {'; '.join(texts)}"

    def _repr_html_(self) -> str:
        colour = {True: "#1a7f37", False: "#b42318", None: "#8a6100"}[self.right]
        rows: list[str] = []
        for depth, text in self._lines():
            style = f"margin:.15em 0 .15em {depth * 1.2}em;overflow-wrap:anywhere"
            if not rows:
                style += f";font-weight:600;border-left:.3em solid {colour};padding-left:.6em"
            rows.append(f'<p style="{style}">{escaped(text)}</p>')
        return f"<div>{''.join(rows)}</div>"
