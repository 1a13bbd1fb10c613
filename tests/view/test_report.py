"""The report as text: everything is escaped, nothing is loaded, the numbers survive."""

import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from surveys import SUMMARY, maps_of, survey_of, survey_of_maps

from headwise.records import HeadMap, HeadMaps, RunSummary
from headwise.view.report import report_html, shares_of, write_report

HOSTILE = (
    "<script>alert(1)</script>", "</script>", "-->", "<!--", "&amp;", "\"'", "\u2028", "עברית", "🙂", "$model ${data}",
    "\ud800",
)  # fmt: skip


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
    maps = maps_of(13, 1, causal=causal)
    data = Page(page_of(maps)).data["maps"]
    assert data["causal"] is causal
    assert list(data["weights"]) == [head.name for head in maps.maps]
    for head in maps.maps:
        assert np.abs(unpacked(data["weights"][head.name], 13, causal) - head.weights).max() <= 0.5 / 65535 + 1e-9


def test_weights_at_the_edge() -> None:
    maps = maps_of(5, 1)
    ahead = HeadMap(1, 0, np.full((5, 5), 0.2, dtype=np.float32))
    assert Page(page_of(replace(maps, maps=(*maps.maps, ahead)))).data["maps"]["causal"] is False
    maps = HeadMaps("toy", ("a",), (HeadMap(0, 0, np.array([[1.0000002]], dtype=np.float32)),))
    assert unpacked(Page(page_of(maps)).data["maps"]["weights"]["L0.H0"], 1, True)[0, 0] == 1.0


def test_hostile_text_makes_no_element() -> None:
    tame = Page(page_of(maps_of(11, 1), replace(SUMMARY, facts={"a": "b", "c": "d"}, samples=("x", "y"))))
    maps = replace(maps_of(11, 1, tokens=HOSTILE), model="</title><script>alert(4)</script>")
    hostile = Page(page_of(maps, SUMMARY))
    # Tokens, the model's name, the facts and the samples bring nothing: the script puts them in as text.
    tags = [tag for tag, _ in hostile.elements]
    assert tags.count("script") == [tag for tag, _ in tame.elements].count("script") == 4
    assert sorted(tags) == sorted(tag for tag, _ in tame.elements)
    assert hostile.data["tokens"] == hostile.data["maps"]["tokens"]
    assert hostile.data["tokens"] == [*HOSTILE[:6], "<U+2028>", "עברית", "🙂", "$model␣${data}", "<U+D800>"]
    assert not any("alert(" in script for script in hostile.raw["script"][1:])
    block = page_of(maps).split('id="data">')[1].split("</script>")[0]
    assert not set(block) & set("<>&\u2028") and block.isascii()


def test_the_file_is_a_page_of_its_own(tmp_path: Path) -> None:
    page = Page(page_of(maps_of(7, 1), SUMMARY))
    for tag, attributes in page.elements:
        for name in ("src", "srcset", "href", "action", "data", "poster"):
            value = attributes.get(name)
            assert value is None or value.startswith("data:"), (tag, name, value)
        assert not any(name.startswith("on") or name == "style" for name in attributes), (tag, attributes)
    for text in page.raw["style"] + page.raw["script"][1:]:
        text = text.replace("'http://www.w3.org/2000/svg'", "")  # the name of a kind of element, which nothing loads
        assert not re.search(r"https?:|url\(|@import|import\s*\(|fetch\(|XMLHttp|WebSocket|sendBeacon", text)
    page = Page(page_of(maps_of(7, 1)))
    policy = next(a["content"] for tag, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None and policy.startswith("default-src 'none';") and "unsafe" not in policy
    for text in (page.raw["style"][0], page.raw["script"][3]):
        assert base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() in policy
    write_report(tmp_path / "report.html", survey_of_maps(maps_of(7, 1)), maps_of(7, 1), SUMMARY)
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == page_of(maps_of(7, 1), SUMMARY)
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_the_numbers_of_the_survey_survive() -> None:
    survey = survey_of(2, 3, tokens=211, passage=37, k=5)
    data = Page(report_html(survey)).data
    keys = ["ablation", "importance", *survey.statistics]  # what tells most stands first
    for profile, stored in zip(survey.profiles, data["heads"], strict=True):
        entropy = profile.scores["entropy"]
        bounds = [entropy.mean, entropy.low, entropy.high, 7]
        assert stored["values"][keys.index("entropy")] == pytest.approx(bounds, rel=1e-5)
        assert stored["values"][keys.index("importance")][0] == pytest.approx(profile.importance, rel=1e-5)
        shares, first = shares_of(survey)[profile.name]
        assert np.abs(levels(stored["shares"]).reshape(32, 32) - shares).max() <= 0.51 / 65535
        assert np.abs(levels(stored["first"]) - first).max() <= 0.51 / 65535
        assert np.abs(levels(stored["weights"]).reshape(37, 5) - profile.top_weights).max() <= 0.51 / 65535
        received = levels(stored["received"]) * stored["largest"]
        np.testing.assert_allclose(received, profile.received, atol=stored["largest"] / 65535)
        numbers = np.frombuffer(base64.b64decode(stored["keys"]), dtype="<u2")
        assert (numbers.reshape(37, 5) == profile.top_keys).all()


@pytest.mark.slow
def test_a_survey_of_144_heads_stays_under_5_mb_whatever_the_length_of_the_text() -> None:
    sizes = []
    for tokens in (128, 1024):
        survey = survey_of(12, 12, tokens=tokens, passage=128, k=8)
        survey = replace(survey, longest=1000 * tokens, n_tokens=9000 * tokens)
        sizes.append(len(report_html(survey).encode()))
    assert max(sizes) < 2e6
    assert sizes[1] - sizes[0] < 60_000  # the tokens that are shown, no more
