"""The report as text: everything is escaped, nothing is loaded, the numbers survive."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from surveys import HOSTILE as HOSTILE_TOKENS
from surveys import ROLES, broken_survey, survey_of, survey_of_maps

from headwise.errors import HeadwiseError
from headwise.heads.profiles import Survey
from headwise.records import CurvePoint, HeadMap, HeadMaps, RunSummary
from headwise.view.report import report_html, write_report
from headwise.view.run_section import round_steps
from headwise.view.survey_data import shares_of
from headwise.view.survey_words import KINDS

HOSTILE = (
    "<script>alert(1)</script>",
    "</script>",
    "-->",
    "<!--",
    "&amp;",
    "\"'",
    "\u2028",
    "עברית",
    "🙂",
    "$model ${data}",
    "\ud800",
)
SUMMARY = RunSummary(
    facts={"preset": "small", "note <b>": "<script>alert(2)</script>"},
    curve=(CurvePoint(0, 5.3, 5.5), CurvePoint(70, 3.1, 3.4), CurvePoint(130, 2.0, 2.3)),
    held_out_loss=2.3,
    baseline_loss=2.5,
    baseline_name="5-gram, Kneser-Ney",
    samples=("</pre><script>alert(3)</script>", "second"),
)


def maps_of(length: int, heads: int = 3, causal: bool = True, tokens: tuple[str, ...] | None = None) -> HeadMaps:
    random = np.random.default_rng(5)
    allowed = np.tri(length, dtype=bool) if causal else np.ones((length, length), dtype=bool)
    maps = []
    for head in range(heads):
        scores = np.where(allowed, random.exponential(size=(length, length)), 0.0)
        maps.append(HeadMap(0, head, (scores / scores.sum(axis=1, keepdims=True)).astype(np.float32)))
    return HeadMaps("toy", tokens or tuple(f"t{i}" for i in range(length)), tuple(maps))


class Page(HTMLParser):
    """The elements with their attributes, and the text of every script and style."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.raw: dict[str, list[str]] = {"script": [], "style": []}
        self.inside = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.inside = tag

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside in self.raw:
            self.raw[self.inside].append(data)

    @property
    def data(self) -> Any:
        return json.loads(self.raw["script"][0])


def page_of(maps: HeadMaps, summary: RunSummary | None = None) -> str:
    return report_html(survey_of_maps(maps), maps, summary)


def levels(packed: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(packed), dtype="<u2") / 65535


def unpacked(packed: str, length: int, causal: bool) -> np.ndarray:
    full = np.zeros((length, length))
    full[np.tri(length, dtype=bool) if causal else np.ones((length, length), dtype=bool)] = levels(packed)
    return full


@pytest.mark.parametrize("causal", [True, False])
def test_the_numbers_survive_to_half_a_step(causal: bool) -> None:
    maps = maps_of(13, causal=causal)
    data = Page(page_of(maps)).data["maps"]
    assert data["causal"] is causal
    assert list(data["weights"]) == [head.name for head in maps.maps]
    for head in maps.maps:
        assert np.abs(unpacked(data["weights"][head.name], 13, causal) - head.weights).max() <= 0.5 / 65535 + 1e-9


def test_one_head_that_looks_ahead_keeps_every_map_whole() -> None:
    maps = maps_of(5)
    ahead = HeadMap(1, 0, np.full((5, 5), 0.2, dtype=np.float32))
    assert Page(page_of(replace(maps, maps=(*maps.maps, ahead)))).data["maps"]["causal"] is False


def test_a_weight_a_rounding_above_one_stays_one() -> None:
    maps = HeadMaps("toy", ("a",), (HeadMap(0, 0, np.array([[1.0000002]], dtype=np.float32)),))
    assert unpacked(Page(page_of(maps)).data["maps"]["weights"]["L0.H0"], 1, True)[0, 0] == 1.0


def test_hostile_text_makes_no_element() -> None:
    tame = Page(page_of(maps_of(11), replace(SUMMARY, facts={"a": "b", "c": "d"}, samples=("x", "y"))))
    maps = replace(maps_of(11, tokens=HOSTILE), model="</title><script>alert(4)</script>")
    hostile = Page(page_of(maps, SUMMARY))
    # The tokens bring one more paragraph, the legend of signs; the model's name and the samples bring nothing.
    tags = [tag for tag, _ in hostile.elements]
    assert tags.count("script") == [tag for tag, _ in tame.elements].count("script") == 4
    assert sorted(tags) == sorted([*(tag for tag, _ in tame.elements), "p"])
    assert hostile.data["tokens"] == hostile.data["maps"]["tokens"]
    assert hostile.data["tokens"] == [
        *HOSTILE[:6],
        "<U+2028>",
        "עברית",
        "🙂",
        "$model␣${data}",
        "<U+D800>",
    ]
    assert not any("alert(" in script for script in hostile.raw["script"][1:])


def test_the_data_block_holds_no_character_that_html_could_read() -> None:
    page = page_of(maps_of(11, tokens=HOSTILE))
    block = page.split('id="data">')[1].split("</script>")[0]
    assert not set(block) & set("<>&\u2028")
    assert block.isascii()


def test_nothing_is_loaded_from_anywhere() -> None:
    page = Page(page_of(maps_of(7), SUMMARY))
    for tag, attributes in page.elements:
        for name in ("src", "srcset", "href", "action", "data", "poster"):
            value = attributes.get(name)
            assert value is None or value.startswith("data:"), (tag, name, value)
        assert not any(name.startswith("on") or name == "style" for name in attributes), (tag, attributes)
    for text in page.raw["style"] + page.raw["script"][1:]:
        assert not re.search(r"https?:|url\(|@import|import\s*\(|fetch\(|XMLHttp|WebSocket|sendBeacon", text)


def test_only_this_packages_own_script_and_style_may_run() -> None:
    page = Page(page_of(maps_of(7)))
    policy = next(a["content"] for tag, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None and policy.startswith("default-src 'none';") and "unsafe" not in policy
    for text in (page.raw["style"][0], page.raw["script"][3]):
        assert base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() in policy


@pytest.mark.parametrize(
    ("baseline", "words"),
    [
        (2.5, "0.200 nats per token better"),
        (2.0, "0.300 nats per token worse"),
        (2.3, "do not differ in the third decimal"),
        (None, "No baseline was measured"),
        (math.nan, "cannot be compared"),
    ],
)
def test_the_comparison_is_said_as_it_is(baseline: float | None, words: str) -> None:
    page = page_of(maps_of(7), replace(SUMMARY, baseline_loss=baseline))
    assert words in page
    assert ('class="baseline" x1="78"' in page) == (baseline in (2.5, 2.0, 2.3))


def test_the_bars_start_at_zero_and_share_a_scale() -> None:
    page = page_of(maps_of(7), SUMMARY)
    assert '<rect class="ours" width="92.00%"' in page and '<rect class="theirs" width="100.00%"' in page


def test_the_curve_has_words_for_those_who_do_not_see_it() -> None:
    page = page_of(maps_of(7), SUMMARY)
    assert "From step 0 to step 130 the training loss goes from 5.300 to 2.000" in page
    assert "The baseline is at 2.500." in page and "<td>130</td><td>2.000</td><td>2.300</td>" in page


@pytest.mark.parametrize("losses", [(), (math.nan,), (math.inf, 2.0), (3.0,), (2.0, 2.0)])
def test_short_and_broken_curves_are_drawn_or_explained(losses: tuple[float, ...]) -> None:
    curve = tuple(CurvePoint(index * 7, loss, loss) for index, loss in enumerate(losses))
    page = page_of(maps_of(7), replace(SUMMARY, curve=curve, baseline_loss=None))
    assert (' d="M' in page.split('id="roles-title"')[0]) == any(map(math.isfinite, losses))
    drawing = page.split("</main>")[0].split('class="curve"')
    assert len(drawing) == 1 or not re.search(r'[" ](nan|inf)', drawing[1].split("</title>")[1].split("</svg>")[0])


def test_without_a_summary_there_is_no_run_section() -> None:
    assert "The training run" not in page_of(maps_of(7))


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (1.7, 6.4), (2.0, 2.0), (0.001, 0.0011), (0.0, 0.0), (3, 9000)])
def test_round_steps_hold_the_range_and_are_few(low: float, high: float) -> None:
    steps = round_steps(low, high)
    assert steps[0] <= low and steps[-1] >= high and 2 <= len(steps) <= 7
    assert np.ptp(np.diff(steps)) < 1e-9


def test_maps_that_do_not_fit_their_tokens_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    maps = maps_of(7)
    with pytest.raises(HeadwiseError, match=r"\(7, 7\).*5 tokens"):
        write_report(tmp_path / "report.html", survey_of_maps(maps), replace(maps, tokens=maps.tokens[:5]))
    assert list(tmp_path.iterdir()) == []


def test_the_file_is_the_page(tmp_path: Path) -> None:
    write_report(tmp_path / "report.html", survey_of_maps(maps_of(7)), maps_of(7), SUMMARY)
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == page_of(maps_of(7), SUMMARY)
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


# The survey


def cells_of(page: str) -> list[list[str]]:
    """Every row of the table as the text of its cells, what is seen on demand included."""
    body = page.split('<table id="table">')[1].split("<tbody>")[1].split("</tbody>")[0]
    rows = re.findall(r"<tr.*?</tr>", body)
    return [[re.sub("<[^>]+>", "", cell) for cell in re.findall(r"<t[hd].*?</t[hd]>", row)] for row in rows]


def headings_of(page: str) -> list[str]:
    head = page.split('<table id="table">')[1].split("</thead>")[0]
    return re.findall(r"<th [^>]*data-sort[^>]*>([^<]*)</th>", head)


def test_the_numbers_of_the_survey_survive() -> None:
    survey = survey_of(2, 3, tokens=211, passage=37, k=5)
    data = Page(report_html(survey)).data
    keys = [*survey.statistics, "importance", "ablation"]
    for profile, stored in zip(survey.profiles, data["heads"], strict=True):
        entropy = profile.scores["entropy"]
        assert stored["values"][0] == pytest.approx([entropy.mean, entropy.low, entropy.high, 7], rel=1e-5)
        assert stored["values"][keys.index("importance")][0] == pytest.approx(profile.importance, rel=1e-5)
        shares, first = shares_of(survey)[profile.name]
        assert np.abs(levels(stored["shares"]).reshape(32, 32) - shares).max() <= 0.51 / 65535
        assert np.abs(levels(stored["first"]) - first).max() <= 0.51 / 65535
        assert np.abs(levels(stored["weights"]).reshape(37, 5) - profile.top_weights).max() <= 0.51 / 65535
        received = levels(stored["received"]) * stored["largest"]
        np.testing.assert_allclose(received, profile.received, atol=stored["largest"] / 65535)
        numbers = np.frombuffer(base64.b64decode(stored["keys"]), dtype="<u2")
        assert (numbers.reshape(37, 5) == profile.top_keys).all()


def test_key_numbers_beyond_sixteen_bits_take_four_bytes() -> None:
    survey = survey_of(1, 2, tokens=41, k=2)
    far = replace(survey.profiles[0], top_keys=survey.profiles[0].top_keys + 70_000)
    data = Page(report_html(replace(survey, profiles=(far, survey.profiles[1])))).data
    assert data["wide"] is True
    numbers = np.frombuffer(base64.b64decode(data["heads"][0]["keys"]), dtype="<u4")
    assert (numbers.reshape(41, 2) == far.top_keys).all()


@pytest.mark.slow
def test_a_survey_of_144_heads_stays_under_5_mb_whatever_the_length_of_the_text() -> None:
    sizes = []
    for tokens in (128, 1024):
        survey = survey_of(12, 12, tokens=tokens, passage=128, k=8)
        survey = replace(survey, longest=1000 * tokens, n_tokens=9000 * tokens)
        sizes.append(len(report_html(survey).encode()))
        assert len(report_html(survey, against=replace(survey, model="other")).encode()) < 5e6
    assert max(sizes) < 2e6
    assert sizes[1] - sizes[0] < 60_000  # the tokens that are shown, no more


def test_the_table_says_each_number_with_interval_and_control() -> None:
    survey = survey_of(2, 3)
    rows, headings = cells_of(report_html(survey)), headings_of(report_html(survey))
    assert len(rows) == 6 and headings[:4] == ["head", "roles", "entropy", "confidence"]
    assert "previous" in headings and headings[-2:] == ["importance", "ablation"]
    entropy = survey.profiles[1].scores["entropy"]
    assert rows[1][0] == "L0.H1" and rows[0][1] == "P previous"
    message = f"{entropy.mean:.3f}, {entropy.low:.3f} to {entropy.high:.3f}, even attention 0.021"
    assert rows[1][2] == message.replace("-", "\u2212")
    ablation = rows[1][headings.index("ablation")]
    assert re.fullmatch(r"[+\u2212]0\.\d{4}, [+\u2212]0\.\d{4} to [+\u2212]0\.\d{4}", ablation)


def test_what_is_missing_is_a_dash_and_said() -> None:
    page = report_html(broken_survey())
    rows, headings = cells_of(page), headings_of(page)
    distance, self_, ablation = (headings.index(name) for name in ("distance", "self", "ablation"))
    assert rows[0][distance] == "\u2013, not defined here, even attention 0.0"
    assert rows[0][self_] == "0.500, one document, no interval, even attention 0.020"
    assert rows[0][ablation].startswith("\u2013") and rows[1][distance].startswith("\u2013")
    assert not re.search(r"\b(nan|inf|NaN|Infinity)\b", page.split("<script>")[0])


def test_roles_are_told_with_rule_and_controls() -> None:
    page = report_html(survey_of(3, 5))
    card = next(part for part in page.split('<li class="role') if "previous token" in part)
    assert re.search(r"<span class=\"count\">(\d heads|1 head)</span>", card)
    assert "Previous of at least 0.4; even attention: 0.020 to 0.024; best untrained head: 0.090." in card
    assert "Voita et al. 2019" in card and 'class="strip"' in card
    without = report_html(survey_of(3, 5, untrained=None)).split('<script type="application/json"')[0]
    assert "best untrained head" not in without and "△" not in without
    assert 'class="role unearned"' in page and "no head" in page
    assert "What the heads do" not in report_html(replace(bare(survey_of()), roles=()))


def bare(survey: Survey) -> Survey:
    return replace(survey, profiles=tuple(replace(profile, roles=()) for profile in survey.profiles))


def test_every_role_has_a_letter_of_its_own() -> None:
    page = report_html(survey_of(3, 5))
    letters = re.findall(r'<span class="badge r\d" aria-hidden="true">(.)</span>', page)
    assert len(letters) == len(set(letters)) == len(ROLES)
    assert len(set(re.findall(r'class="badge (r\d)" aria-hidden', page))) == min(len(ROLES), KINDS)


def test_a_comparison_shows_both_and_the_difference() -> None:
    survey, other = survey_of(2, 3), survey_of(2, 4, seed=1, model="<other>")
    other = replace(other, profiles=other.profiles[1:])
    page = report_html(replace(survey, profiles=survey.profiles[:5]), against=other)
    rows = cells_of(page)
    here, there = (s.profiles[place].scores["entropy"].mean for s, place in ((survey, 1), (other, 0)))
    assert [cell.split(",")[0] for cell in rows[1][2:5]] == [
        f"{here:.3f}",
        f"{there:.3f}",
        f"{here - there:+.3f}".replace("-", "\u2212"),
    ]
    assert [cell[0] for cell in rows[0][3:5]] == ["\u2013"] * 2  # L0.H0 is only in the first
    only = page.split('id="only">')[1].split("</div>")[0]
    assert "Only in toy: L0.H0." in only and "Only in &lt;other&gt;: L0.H3, L1.H2, L1.H3." in only
    assert page.count('type="radio"') == 3


def test_heads_that_got_another_number_are_compared_with_what_they_were() -> None:
    survey = survey_of(1, 3)
    other = replace(survey, model="other").renamed({"L0.H0": "L0.H2", "L0.H1": "L0.H1"})
    page = report_html(replace(survey, profiles=survey.profiles[:2]), against=other)
    assert 'class="name">L0.H0 (L0.H2)</th>' in page and 'class="name">L0.H1</th>' in page
    values = [s.scores["entropy"].mean for s in (survey.profiles[0], survey.profiles[2])]
    assert [cell.split(",")[0] for cell in cells_of(page)[0][2:4]] == [f"{value:.3f}" for value in values]
    assert "Only in other: L0.H0 (gone)." in page and "it stands in brackets" in page


def test_a_comparison_of_unlike_surveys_says_so() -> None:
    survey = survey_of(1, 2)
    other = replace(survey, model="other", statistics={"entropy": "nats", "odd": "?"}, tokens=("x",) * 41)
    page = report_html(survey, against=other)
    assert "Only toy has confidence" in page and "Only other has odd" in page and "may come from the text" in page
    assert headings_of(page)[2:8] == ["this", "other", "diff."] * 2
    same = report_html(survey, against=replace(survey, model="other"))
    assert 'class="notice notes"' not in same and 'id="only"' not in same


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"profiles": ()}, "toy has 0 heads"),
        ({"passage": 99}, "passage=99 but there are 41 tokens"),
        ({"roles": ()}, "L0.H0 has the role 'previous token', which is not among the 0"),
    ],
)
def test_a_survey_that_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(HeadwiseError, match=message):
        report_html(survey_of(**change))
    with pytest.raises(HeadwiseError, match=message):
        report_html(survey_of(), against=survey_of(**change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"first_key": np.zeros(3, np.float32)}, r"\(32, 32\) and a first key of shape \(3,\)"),
        ({"thumbnail": np.full((32, 32), np.nan, np.float32)}, "from nan to nan, outside 0 to 1"),
        ({"top_keys": np.zeros((41, 2), np.int64)}, r"\(41, 2\) and top weights of shape \(41, 5\)"),
        ({"name": "L0.H1"}, "L0.H1 is given 2 times among 6 heads"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    survey = survey_of()
    broken = replace(survey, profiles=(replace(survey.profiles[0], **change), *survey.profiles[1:]))
    with pytest.raises(HeadwiseError, match=message):
        report_html(broken)


def test_a_hostile_survey_makes_no_element() -> None:
    page = Page(report_html(broken_survey(), against=replace(broken_survey(), model="<script>other")))
    tags = [tag for tag, _ in page.elements]
    assert tags.count("script") == 4 and "img" not in tags
    assert not any("alert(" in script for script in page.raw["script"][1:])
    assert len(page.data["tokens"]) == len(HOSTILE_TOKENS)
    for tag, attributes in page.elements:
        assert not any(name.startswith("on") or name == "style" for name in attributes), (tag, attributes)
