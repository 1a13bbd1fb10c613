"""`headwise why`: the heads of the verb model, bad requests, and the page."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from browsing import Opener, faults
from invoking import Invoke

pytestmark = pytest.mark.slow

TENSE = ("--prompt", "he will work = él", "--corrupt", "he would work = él")
PERSON = ("--prompt", "he will work =", "--corrupt", "you will work =")
VERB = ("--prompt", "he will work = él", "--corrupt", "he will write = él")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The verb model after three fifths of its training: by then its heads have parted on any processor."""
    import headwise as hw

    folder = tmp_path_factory.mktemp("why") / "verbs"
    hw.train(preset="verbs", steps=360, out=folder)
    return folder


def told(invoke: Invoke, run: Path, *words: str) -> dict[str, Any]:
    outcome = invoke("why", str(run), *words, "--json")
    assert outcome.code == 0, outcome.err
    story: dict[str, Any] = json.loads(outcome.out)
    return story


def asked(run: Path, *question: str) -> dict[str, Any]:
    """What the model itself says: its answers to both texts, exact effects, and the maps of the first."""
    import torch

    import headwise as hw
    from headwise.models.open import open_folder

    folder = open_folder(run)
    assert folder.tokens is not None
    pair = [torch.tensor(folder.tokens.prompt(question[place])) for place in (1, 3)]
    with torch.no_grad(), hw.watch(folder.model, maps=True) as seen:
        answers = [int(folder.model(pair[0][None])[0, -1].argmax())]
    with torch.no_grad():
        answers.append(int(folder.model(pair[1][None])[0, -1].argmax()))
    effects = {name: effect.mean for name, effect in hw.patch(folder.model, *pair).effects.items()}
    maps = {name: seen[name].map for name in seen}
    return {"answers": folder.tokens.shown(answers), "effects": effects, "maps": maps}


@pytest.mark.parametrize("question", [TENSE, PERSON, VERB], ids=["tense", "person", "verb"])
def test_what_a_head_carries(question: tuple[str, ...], run: Path, invoke: Invoke) -> None:
    story, said = told(invoke, run, *question), asked(run, *question)
    assert (story["answer"], story["other"]) == tuple(said["answers"])
    for part in story["heads"]:
        assert part["brings"] == pytest.approx(said["effects"][part["head"]], abs=1e-4)
        place, weight = part["looks"][0]
        row = said["maps"][part["head"]][-1 if part["at"] is None else part["at"]]
        assert weight == pytest.approx(row[place], abs=1e-3) and weight >= row[1:].max() - 1e-3  # 0 is a special
    carried = sorted((part["brings"] for part in story["heads"]), reverse=True)
    assert carried[0] == pytest.approx(max(said["effects"].values()), abs=1e-4)
    parts = sum(part["adds"] for part in story["heads"]) + sum(story["feed_forwards"].values())
    assert parts + story["embedding"] + story["bias"] == pytest.approx(story["logit"], abs=1e-4)


def test_it_is_told_in_words(run: Path, invoke: Invoke) -> None:
    story = told(invoke, run, *TENSE)
    text = invoke("why", str(run), *TENSE).out
    assert f"it looks at {story['tokens'][story['heads'][0]['looks'][0][0]]}" in text
    assert re.search(f" brings? {story['answer']}", text)  # one head, or several
    alone = invoke("why", str(run), "--prompt", "he will work =").out
    assert "Below it is compared with" in alone and "carries the difference" not in alone


def test_texts_with_the_same_answer_are_compared_by_its_probability(run: Path, invoke: Invoke) -> None:
    story = told(invoke, run, "--prompt", "he will work =", "--corrupt", "he will write =")
    assert story["counts"] == "probability" and story["clean_value"] == pytest.approx(math.log(story["probability"]))
    named = told(invoke, run, *TENSE, "--answer", "trabajará", "--other", "escribirá")
    assert (named["counts"], named["other"]) == ("logits", "escribirá")
    assert [note for note in named["notes"] if "'escribirá' was taken as the token 'escribirá'" in note]


@pytest.mark.browser
def test_the_page(run: Path, invoke: Invoke, open_page: Opener, tmp_path: Path) -> None:
    path = tmp_path / "why.html"
    story = told(invoke, run, *TENSE, "--html", str(path))
    page = open_page(path, 390, 800)
    assert page.locator("h1").inner_text() == f"Why {story['answer']}?"
    buttons = page.locator("#heads button")
    assert buttons.count() >= 1 and story["heads"][0]["head"] in buttons.first.inner_text()
    (place, weight), *_ = story["heads"][0]["looks"]
    tint = page.locator(".token").nth(place).evaluate("token => parseInt(token.style.getPropertyValue('--look'))")
    assert tint == pytest.approx(100 * weight, abs=1)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    drawn = page.locator("#drawing .node text").all_text_contents()
    assert story["heads"][0]["head"] in drawn and page.locator("#drawing .goal").text_content() == story["answer"]
    assert page.locator("#drawing path.direct").count() == len(drawn)
    assert page.locator("#drawing path.path").count() == len(story["paths"])
    page.get_by_role("button", name="Español").click()
    assert page.locator("h1").inner_text() == f"¿Por qué {story['answer']}?"
    assert "mira" in buttons.first.inner_text().lower()
    assert faults(page) == []
