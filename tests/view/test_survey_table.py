"""The survey in the terminal: right order, right numbers, nothing in a name taken for markup, and 80 columns."""

import re
from dataclasses import replace

import pytest
from cases import refuses_table
from surveys import broken_survey, survey_of
from terminals import printed as printed_on
from terminals import printed_in_ascii

from headwise.heads.table import Survey
from headwise.view.survey import check_order, print_survey


def printed(survey: Survey, sort_by: str = "name", width: int = 80) -> str:
    return printed_on(print_survey, survey, sort_by, width=width)


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
    many = printed(
        replace(survey_of(2, 9), profiles=tuple(replace(p, roles=("self",)) for p in survey_of(2, 9).profiles))
    )
    assert re.search(r"^self +18  L0\.H0, .*L0\.H5 and 12 more$", many, re.MULTILINE)
    assert "norm" not in printed(survey_of()) and "norm" in printed(survey_of(), "norm")
    text = printed(broken_survey(), "distance", width=120)
    assert set(names(text)[-2:]) == {"encoder.L0.H0", "encoder.L0.H1"}
    assert "nan" not in text and "inf" not in text.replace("inference", "")
    survey = survey_of()
    bare = replace(survey, profiles=tuple(replace(p, importance=None, ablation=None) for p in survey.profiles))
    text = printed(bare)
    assert "import." not in text and "ablation" not in text and "entropy" in text


@pytest.mark.parametrize("key", ["importance", "ablation", "previous", "norm", "rare_top"])
def test_it_sorts_by_any_number_the_largest_first(key: str) -> None:
    survey = survey_of(3, 5)

    def number(name: str) -> float:
        profile = next(p for p in survey.profiles if p.name == name)
        if key == "importance":
            return profile.importance or 0
        value = profile.ablation if key == "ablation" else profile.scores[key]
        assert value is not None
        return value.mean

    numbers = [number(name) for name in names(printed(survey, key))]
    assert numbers == sorted(numbers, reverse=True) and len(numbers) == 15


@pytest.mark.parametrize(
    ("heading", "key"), [("prev.", "previous"), ("conf.", "confidence"), ("import.", "importance")]
)
def test_the_order_may_be_named_as_the_table_does(heading: str, key: str) -> None:
    assert heading in printed(survey_of(), width=120)
    assert names(printed(survey_of(), heading)) == names(printed(survey_of(), key)) != names(printed(survey_of()))


def test_an_unknown_order_is_refused_with_the_nearest() -> None:
    refuses_table("orders", {"order": lambda order: check_order(["entropy", "norm"], order)})


def test_pipes_and_ascii() -> None:
    survey = survey_of(model="[red]m[/red] :smile:", notes=("A [bold]note[/bold].",))
    text = printed(survey)
    assert "\x1b" not in text and "[red]m[/red] :smile:" in text and "A [bold]note[/bold]." in text
    assert "L1.H2" in printed_in_ascii(print_survey, survey_of(), "name")
