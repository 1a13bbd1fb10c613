"""The survey in the terminal: right numbers, nothing in a name taken for markup, and 80 columns."""

import re
from dataclasses import replace

from surveys import broken_survey, survey_of
from terminals import printed as printed_on
from terminals import printed_in_ascii

from headwise.heads.table import Survey
from headwise.view.survey import print_survey


def printed(survey: Survey, width: int = 80) -> str:
    return printed_on(print_survey, survey, width=width)


def rows(text: str) -> list[list[str]]:
    """The lines of the table, as words."""
    table = text.split("─\n")[-1] if "─\n" in text else text.split("─ \n")[-1]
    return [line.split() for line in table.splitlines() if re.match(r" ?([a-z]+\.)?L\d+\.H\d+ ", line)]


def names(text: str) -> list[str]:
    return [row[0] for row in rows(text)]


def test_rows_and_roles() -> None:
    survey = survey_of(3, 5)
    text = printed(survey)
    assert names(text) == [profile.name for profile in survey.profiles]
    line, scores = rows(text)[1], survey.profiles[1].scores
    assert line[1:3] == [f"{scores['entropy'].mean:.3f}", f"{scores['distance'].mean:.1f}"]
    assert rows(text)[0][1] == "previous" and float(rows(text)[0][6]) == 0.95
    header = next(line for line in text.splitlines() if "entropy" in line)
    assert " ".join(header.split()) == "head roles entropy distance conf. first prev. import. ablation"
    text = printed(survey_of(3, 5))
    assert re.search(r"^previous token +1  L0\.H0$", text, re.MULTILINE)
    assert re.search(r"^roles without a head: .*copying", text, re.MULTILINE)
    wide = survey_of(2, 9)
    many = printed(replace(wide, profiles=tuple(replace(profile, roles=("self",)) for profile in wide.profiles)))
    assert re.search(r"^self +18  L0\.H0, .*L0\.H5 and 12 more$", many, re.MULTILINE)
    text = printed(broken_survey(), width=120)
    assert "nan" not in text and "inf" not in text.replace("inference", "")
    survey = survey_of()
    bare = replace(survey, profiles=tuple(replace(p, importance=None, ablation=None) for p in survey.profiles))
    text = printed(bare)
    assert "import." not in text and "ablation" not in text and "entropy" in text


def test_pipes_and_ascii() -> None:
    survey = survey_of(model="[red]m[/red] :smile:", notes=("A [bold]note[/bold].",))
    text = printed(survey)
    assert "\x1b" not in text and "[red]m[/red] :smile:" in text and "A [bold]note[/bold]." in text
    assert "L1.H2" in printed_in_ascii(print_survey, survey_of())
