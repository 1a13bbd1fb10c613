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

import numpy as np
import pytest

from headwise.errors import HeadwiseError
from headwise.records import CurvePoint, HeadMap, HeadMaps, RunSummary
from headwise.view.report import report_html, round_steps, write_report

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
    def data(self) -> dict[str, object]:
        return json.loads(self.raw["script"][0])  # type: ignore[no-any-return]


def unpacked(head: dict[str, str], length: int, causal: bool) -> np.ndarray:
    levels = np.frombuffer(base64.b64decode(head["weights"]), dtype="<u2")
    full = np.zeros((length, length))
    full[np.tri(length, dtype=bool) if causal else np.ones((length, length), dtype=bool)] = levels / 65535
    return full


@pytest.mark.parametrize("causal", [True, False])
def test_the_numbers_survive_to_half_a_step(causal: bool) -> None:
    maps = maps_of(13, causal=causal)
    data = Page(report_html(maps)).data
    assert data["causal"] is causal
    for head, stored in zip(maps.maps, data["heads"], strict=True):  # type: ignore[call-overload]
        assert stored["name"] == head.name
        assert np.abs(unpacked(stored, 13, causal) - head.weights).max() <= 0.5 / 65535 + 1e-9


def test_one_head_that_looks_ahead_keeps_every_map_whole() -> None:
    maps = maps_of(5)
    ahead = HeadMap(1, 0, np.full((5, 5), 0.2, dtype=np.float32))
    assert Page(report_html(replace(maps, maps=(*maps.maps, ahead)))).data["causal"] is False


def test_a_weight_a_rounding_above_one_stays_one() -> None:
    maps = HeadMaps("toy", ("a",), (HeadMap(0, 0, np.array([[1.0000002]], dtype=np.float32)),))
    assert unpacked(Page(report_html(maps)).data["heads"][0], 1, True)[0, 0] == 1.0  # type: ignore[index]


def test_hostile_text_makes_no_element() -> None:
    tame = Page(report_html(maps_of(11), replace(SUMMARY, facts={"a": "b", "c": "d"}, samples=("x", "y"))))
    maps = replace(maps_of(11, tokens=HOSTILE), model="</title><script>alert(4)</script>")
    hostile = Page(report_html(maps, SUMMARY))
    # The tokens bring one more paragraph, the legend of signs; the model's name and the samples bring nothing.
    tags = [tag for tag, _ in hostile.elements]
    assert tags.count("script") == [tag for tag, _ in tame.elements].count("script") == 2
    assert sorted(tags) == sorted([*(tag for tag, _ in tame.elements), "p"])
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
    page = report_html(maps_of(11, tokens=HOSTILE))
    block = page.split('id="data">')[1].split("</script>")[0]
    assert not set(block) & set("<>&\u2028")
    assert block.isascii()


def test_nothing_is_loaded_from_anywhere() -> None:
    page = Page(report_html(maps_of(7), SUMMARY))
    for tag, attributes in page.elements:
        for name in ("src", "srcset", "href", "action", "data", "poster"):
            value = attributes.get(name)
            assert value is None or value.startswith("data:"), (tag, name, value)
        assert not any(name.startswith("on") or name == "style" for name in attributes), (tag, attributes)
    for text in page.raw["style"] + page.raw["script"][1:]:
        assert not re.search(r"https?:|url\(|@import|import\s*\(|fetch\(|XMLHttp|WebSocket|sendBeacon", text)


def test_only_this_packages_own_script_and_style_may_run() -> None:
    page = Page(report_html(maps_of(7)))
    policy = next(a["content"] for tag, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None and policy.startswith("default-src 'none';") and "unsafe" not in policy
    for text in (page.raw["style"][0], page.raw["script"][1]):
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
    page = report_html(maps_of(7), replace(SUMMARY, baseline_loss=baseline))
    assert words in page
    assert ('class="baseline" x1="78"' in page) == (baseline in (2.5, 2.0, 2.3))


def test_the_bars_start_at_zero_and_share_a_scale() -> None:
    page = report_html(maps_of(7), SUMMARY)
    assert '<rect class="ours" width="92.00%"' in page and '<rect class="theirs" width="100.00%"' in page


def test_the_curve_has_words_for_those_who_do_not_see_it() -> None:
    page = report_html(maps_of(7), SUMMARY)
    assert "From step 0 to step 130 the training loss goes from 5.300 to 2.000" in page
    assert "The baseline is at 2.500." in page and "<td>130</td><td>2.000</td><td>2.300</td>" in page


@pytest.mark.parametrize("losses", [(), (math.nan,), (math.inf, 2.0), (3.0,), (2.0, 2.0)])
def test_short_and_broken_curves_are_drawn_or_explained(losses: tuple[float, ...]) -> None:
    curve = tuple(CurvePoint(index * 7, loss, loss) for index, loss in enumerate(losses))
    page = report_html(maps_of(7), replace(SUMMARY, curve=curve, baseline_loss=None))
    assert (' d="M' in page) == any(map(math.isfinite, losses))
    drawing = page.split("</main>")[0].split('class="curve"')
    assert len(drawing) == 1 or not re.search(r'[" ](nan|inf)', drawing[1].split("</title>")[1].split("</svg>")[0])


def test_without_a_summary_there_is_no_run_section() -> None:
    assert "The training run" not in report_html(maps_of(7))


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (1.7, 6.4), (2.0, 2.0), (0.001, 0.0011), (0.0, 0.0), (3, 9000)])
def test_round_steps_hold_the_range_and_are_few(low: float, high: float) -> None:
    steps = round_steps(low, high)
    assert steps[0] <= low and steps[-1] >= high and 2 <= len(steps) <= 7
    assert np.ptp(np.diff(steps)) < 1e-9


def test_maps_that_do_not_fit_their_tokens_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    maps = maps_of(7)
    with pytest.raises(HeadwiseError, match=r"\(7, 7\).*5 tokens"):
        write_report(tmp_path / "report.html", replace(maps, tokens=maps.tokens[:5]))
    assert list(tmp_path.iterdir()) == []


def test_the_file_is_the_page(tmp_path: Path) -> None:
    write_report(tmp_path / "report.html", maps_of(7), SUMMARY)
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == report_html(maps_of(7), SUMMARY)
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
