"""The survey as JSON, CSV, a notebook's table."""

import csv
import io
import json
from typing import Any

import numpy as np
import pytest
from surveys import STATISTICS, broken_survey, survey_of

from headwise.records import plain_data
from headwise.table import Table
from headwise.view.report import shares_of


def plain(survey: Any) -> dict[str, Any]:
    return json.loads(json.dumps(plain_data(survey), allow_nan=False))  # type: ignore[no-any-return]


def test_json_and_csv() -> None:
    survey = survey_of(2, 3, k=5)
    document = plain(survey)
    assert document["model"] == "toy" and document["tokens"] == list(survey.tokens)
    assert document["roles"][0]["name"] == survey.roles[0].name and document["untrained"] == survey.untrained
    for profile, stored in zip(survey.profiles, document["profiles"], strict=True):
        assert stored["name"] == profile.name and stored["roles"] == list(profile.roles)
        assert stored["scores"]["entropy"] == vars(profile.scores["entropy"])
        assert stored["importance"] == profile.importance
        assert np.abs(np.array(stored["thumbnail"]) - profile.thumbnail).max() <= 5e-7
        assert stored["top_keys"] == profile.top_keys.tolist()
    first, second, *_ = plain(broken_survey())["profiles"]
    assert first["scores"]["distance"] == {"mean": None, "low": None, "high": None, "n": 0}
    assert first["scores"]["self"] == {"mean": 0.5, "low": None, "high": None, "n": 1}
    assert first["ablation"] is None and second["importance"] is None and second["uniform"] == {"entropy": None}
    survey = survey_of(2, 3)
    lines = list(csv.DictReader(io.StringIO(Table.of(survey.records()).csv())))
    assert [line["name"] for line in lines] == [profile.name for profile in survey.profiles]
    for line, profile in zip(lines, survey.profiles, strict=True):
        assert (line["layer"], line["head"]) == (str(profile.layer), str(profile.head))
        for key in STATISTICS:
            cells = [float(line[name]) for name in (key, f"{key}_low", f"{key}_high")]
            assert cells == pytest.approx([profile.scores[key].mean, profile.scores[key].low, profile.scores[key].high])
        assert profile.ablation is not None and float(line["ablation_low"]) == pytest.approx(profile.ablation.low, 1e-6)
    assert lines[0]["roles"] == "previous token" and lines[0]["copying_uniform"] == ""
    assert float(lines[1]["entropy_uniform"]) == pytest.approx(0.021)
    first, second, *rest = csv.DictReader(io.StringIO(Table.of(broken_survey().records()).csv()))
    assert first["distance"] == "" and (first["self"], first["self_low"], first["self_high"]) == ("0.5", "", "")
    assert first["ablation"] == "" and second["importance"] == "" and second["distance"] == ""
    assert rest[-1]["part"] == "cross" and "nan" not in Table.of(broken_survey().records()).csv()


def test_no_cell_of_a_csv_is_run_by_a_spreadsheet() -> None:
    """Names of relations come from a file of anyone's; a number stays one, below 0 too."""
    for sign in "=+-@\t\r\n\uff1d":
        formula = f'{sign}HYPERLINK("http://x","y")'
        row = {
            "name": "L0.H0",
            f"{formula}_accuracy": -0.5,
            "roles": formula,
            "bare": -3,
            "none": None,
            "inside": "a=b",
        }
        head, cells = csv.reader(io.StringIO(Table.of([row]).csv(), newline=""))
        assert cells == ["L0.H0", "-0.5", f"'{formula}", "-3", "", "a=b"]
        assert head[:2] == ["name", f"'{formula}_accuracy"]


@pytest.mark.parametrize("tokens", [1, 7, 31, 32, 41, 101, 1024])
@pytest.mark.parametrize("documents", [1, 7])
def test_shares_of_a_row_add_up_to_one(tokens: int, documents: int) -> None:
    survey = survey_of(1, 3, tokens=tokens, parts=("decoder", "encoder", "cross"), documents=documents)
    survey.profiles[-1].thumbnail[:] = np.nan  # which spoils no other head
    for profile in survey.profiles[:-1]:
        shares, first = shares_of(survey)[profile.name]
        assert shares.shape == profile.thumbnail.shape
        # Where the length is not known, blocks count as even; they differ by one token in length / 32 at most.
        known = tokens < 16 or (profile.part == "decoder" and (documents == 1 or tokens < 1024))
        assert np.abs(shares.sum(1) - 1).max() <= (1e-5 if known else 0.5)
        assert (first <= shares[:, 0] + 1e-6).all()
        if tokens <= 32 and profile.part == "decoder":
            np.testing.assert_allclose(shares, profile.thumbnail, rtol=1e-6)
            np.testing.assert_allclose(first, shares[:, 0], atol=1e-6)
