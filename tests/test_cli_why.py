"""`headwise why`: the heads of the verb model, bad requests, and the page; `headwise trace` without a run."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from browsing import Opener, faults
from invoking import Invoke

from headwise.corpus import verbs
from headwise.corpus.tokens import Tokens
from headwise.gpt.checkpoint import save_model
from headwise.gpt.gpt import GPT, GPTConfig

pytestmark = pytest.mark.slow

TENSE = ("--prompt", "he will work = él", "--corrupt", "he would work = él")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model of the verbs, whose weights are random and so large that its heads tell texts apart."""
    torch.manual_seed(26)
    tokens = Tokens.words(verbs.corpus().train_lines)
    shape = {"n_layers": 2, "n_heads": 3, "head_dim": 4, "d_model": 12, "d_ff": 20}
    model = GPT(GPTConfig(vocab_size=len(tokens), context=17, position="rope", **shape))
    for parameter in model.parameters():
        parameter.data *= 2 if parameter.ndim == 2 else 1
    folder = tmp_path_factory.mktemp("why") / "verbs"
    save_model(folder, model, tokens)
    return folder


def told(invoke: Invoke, run: Path, *words: str) -> dict[str, Any]:
    outcome = invoke("why", str(run), *words, "--json")
    assert outcome.code == 0, outcome.err
    story: dict[str, Any] = json.loads(outcome.out)
    return story


def test_it_is_told_in_words(run: Path, invoke: Invoke) -> None:
    story = told(invoke, run, *TENSE)
    assert all(part["looks"] for part in story["heads"])
    carried = [abs(part["brings"]) for part in story["heads"]]
    assert carried == sorted(carried, reverse=True) and carried[0] > 0.1
    parts = sum(part["adds"] for part in story["heads"]) + sum(story["feed_forwards"].values())
    assert parts + story["embedding"] + story["bias"] == pytest.approx(story["logit"], abs=1e-4)
    text = invoke("why", str(run), *TENSE).out
    assert f"it looks at {story['tokens'][story['heads'][0]['looks'][0][0]]}" in text
    assert re.search(f" brings? {story['answer']}", text)  # one head, or several
    alone = invoke("why", str(run), "--prompt", "he will work =").out
    assert "Below it is compared with" in alone and "carries the difference" not in alone


def test_texts_with_the_same_answer_are_compared_by_its_probability(run: Path, invoke: Invoke) -> None:
    story = told(invoke, run, "--prompt", "he will work =", "--corrupt", "he will write =")
    assert story["counts"] == "probability" and story["clean_value"] == pytest.approx(math.log(story["probability"]))
    named = told(invoke, run, *TENSE, "--answer", "trabajará", "--other", "escribirá ")
    assert (named["counts"], named["other"]) == ("logits", "escribirá")
    assert named["notes"] == []


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


def test_a_trace_without_a_run(invoke: Invoke, tmp_path: Path) -> None:
    page = tmp_path / "emma.html"
    outcome = invoke("trace", "--text", "emma", "--head", "L0.H2", "--at", 3, "--html", page)
    assert outcome.code == 0
    assert "L0.H2 at position 3" in outcome.out
    assert "a small model, trained on names just now" in outcome.err
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    document = json.loads(invoke("trace", "--text", "emma", "--head", "L0.H2", "--at", 3, "--json").out)
    assert sum(key["weight"] for key in document["keys"]) == pytest.approx(1)
