"""A model that answers while it is touched: its numbers are those of `watch` and `ablate`; bad questions are said."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import refuses_table
from word_models import word_folder

import headwise as hw
from headwise.corpus.tokens import Tokens
from headwise.heads.look import Desk
from headwise.models.open import open_folder

TEXT = "Ann met Bob .\nThe cat saw Ann"
READ: dict[str, Any] = {"do": "read", "slot": "a", "changes": {}, "at": -1, "follow": -1}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: word_folder(tmp_path_factory.mktemp(kind), kind) for kind in ("next", "masked", "states")}


@pytest.fixture
def desk(folders: dict[str, Path]) -> Desk:
    return Desk(open_folder(folders["next"]))


def chances(desk: Desk, *silent: str) -> torch.Tensor:
    ids = torch.tensor([desk.readings["a"].ids])
    with torch.no_grad(), hw.ablate(desk.folder.model, silent):
        return torch.as_tensor(desk.folder.model(ids).logits[0, -1].softmax(-1))


def test_a_text_is_read_as_watch_and_ablate_see_it(desk: Desk) -> None:
    answer = desk.answer({**READ, "text": TEXT, "changes": {"L0.H1": 0, "L1.H5": 2}})
    ids = desk.readings["a"].ids
    assert [word[0] for word in answer["words"]] == ["[CLS]", "Ann", "met", "Bob", ".", "The", "cat", "saw", "Ann"]
    assert [word[2] for word in answer["words"]] == [0, 0, 0, 0, 0, 1, 0, 0, 0] and answer["words"][0][3]
    assert answer["at"] == len(ids) - 1
    torch.testing.assert_close(desk.readings["a"].plain, chances(desk))
    desk.answer({**READ, "text": TEXT, "changes": {"L0.H1": 0}})
    torch.testing.assert_close(desk.readings["a"].now, chances(desk, "L0.H1"))
    with hw.watch(desk.folder.model, maps=True) as seen, torch.no_grad(), hw.ablate(desk.folder.model, ["L0.H1"]):
        desk.folder.model(torch.tensor([ids]))
    maps = desk.answer({"do": "maps", "slot": "a", "heads": [0, 7]})["maps"]
    assert list(maps) == [0, 7]
    for number, weights in maps.items():
        np.testing.assert_allclose(weights, seen[desk.heads[number]].map, atol=1e-6)
    desk.tokens = Tokens.characters("\n ", boundary=False)  # of a token without a place the label is bare, too
    assert [(label, lines) for label, _, lines, _ in desk._words("", [0, 1])] == [("", 1), ("", 0)]


def test_a_text_is_read_and_compared(desk: Desk) -> None:
    answer = desk.answer({**READ, "text": TEXT, "changes": {"L1.H2": 0}})
    rows = {row[1]: row[2:] for row in answer["next"]}
    before, after = chances(desk), chances(desk, "L1.H2")
    assert answer["follow"] == int(before.argmax())
    for i, _, *found in answer["next"]:
        assert found == pytest.approx([float(before[i]), float(after[i])], abs=1e-6)
    earlier = desk.answer({**READ, "text": TEXT, "at": 3})
    shorter = desk.answer({**READ, "text": "Ann met Bob"})
    assert earlier["next"][0][:2] == shorter["next"][0][:2]
    assert earlier["next"][0][2] == pytest.approx(shorter["next"][0][2], abs=1e-6)
    follow = desk.answer({**READ, "text": TEXT})["follow"]
    first, second = ({"do": "each", "layer": layer, "follow": follow} for layer in (0, 1))
    rows = desk.answer(first)["each"] + desk.answer(second)["each"]
    assert desk.answer(first)["left"] == 1 and desk.answer(second)["left"] == 0
    assert [row[0] for row in rows] == desk.heads
    for name, chance, _ in rows:
        assert chance == pytest.approx(float(chances(desk, name)[follow]), abs=1e-6)
    answer = desk.answer({**READ, "text": TEXT})
    maps = desk.readings["a"].maps
    for t, hardest in enumerate(answer["hardest"]):
        allowed = list(range(1, t))
        best = sorted((float(max(weights[t, allowed], default=0)) for weights in maps), reverse=True)
        assert [weight for *_, weight in hardest] == pytest.approx(best[:8], abs=1e-4)
        assert all(weight == 0 or s in allowed for _, s, weight in hardest)
    desk.answer({**READ, "text": TEXT})
    answer = desk.answer({**READ, "slot": "b", "text": TEXT.replace("Bob", "dog")})
    (head, key, size), *_ = answer["differ"][-1]
    a, b = (desk.readings[slot].maps[head][-1] for slot in "ab")
    assert len(answer["next"][0]) == 5
    assert size == pytest.approx(abs(a[key] - b[key]), abs=1e-4) and size > 0.001
    assert "differ" not in desk.answer({**READ, "slot": "b", "text": "Ann met"})
    desk.answer({**READ, "slot": "b", "text": ""})
    assert "b" not in desk.readings and len(desk.answer({**READ, "text": TEXT})["next"][0]) == 4


def test_a_hidden_word_is_filled_in(folders: dict[str, Path]) -> None:
    desk = Desk(open_folder(folders["masked"]))
    answer = desk.answer({**READ, "text": "the [MASK] saw a dog"})
    assert desk.mask_text == "[MASK]" and answer["at"] == 2 and [word[3] for word in answer["words"]].count(True) == 3
    ids = torch.tensor([desk.readings["a"].ids])
    with torch.no_grad():
        best = desk.folder.model(ids).logits[0, 2].softmax(-1).max()
    assert answer["next"][0][2] == pytest.approx(float(best), abs=1e-6)
    assert "next" not in desk.answer({**READ, "text": "the cat saw a dog"})


def test_a_model_without_words_says_how_far_its_output_turns(folders: dict[str, Path]) -> None:
    desk = Desk(open_folder(folders["states"]))
    assert desk.kind is None and desk.answer({**READ, "text": "the cat"})["state"]["kept"] == pytest.approx(1)
    answer = desk.answer({**READ, "text": "the cat", "changes": {"L0.H1": 0}})
    ids = torch.tensor([desk.readings["a"].ids])
    with torch.no_grad():
        whole = desk.folder.model(ids).last_hidden_state[0].mean(0)
        with hw.ablate(desk.folder.model, ["L0.H1"]):
            less = desk.folder.model(ids).last_hidden_state[0].mean(0)
    cosine = float(torch.nn.functional.cosine_similarity(whole, less, dim=0))
    assert answer["state"]["kept"] == pytest.approx(cosine, abs=1e-5) and cosine < 0.9999
    desk.answer({**READ, "text": "the cat"})
    assert desk.answer({"do": "each", "layer": 0, "follow": -1})["each"][1][1] == pytest.approx(cosine, abs=1e-5)
    assert len(desk.answer({**READ, "slot": "b", "text": "the dog"})["state"]["alike"]) == 2


def test_what_is_refused(desk: Desk) -> None:
    refuses_table("desk", globals() | {"desk": desk})
