"""`why`: the story of a prediction, against a patching of its own, on decoders, encoders and encoder-decoders."""

from pathlib import Path
from typing import Any

import pytest
import torch
from cases import refuses, refuses_table
from families import TABLES, untrained
from planted import induction_model
from small_models import shaken
from torch import Tensor, nn

import headwise as hw
from headwise.models.open import remember
from headwise.models.sites import sites_of

pytestmark = pytest.mark.usefixtures("no_gradients")

LETTERS = "abcdefghijklmnopq"
V = 23
MODELS = TABLES["predicting"]


class Letters:
    """A tokenizer of letters: `a` is 4; `?` is the mask, 3; an encoder has 21 before a text and 22 behind it."""

    unknown = None
    mask = "?"
    specials = frozenset({3, 21, 22})

    def __init__(self, framed: bool) -> None:
        self.frame: tuple[list[int], list[int]] = ([21], [22]) if framed else ([], [])

    def __len__(self) -> int:
        return V

    def encode(self, text: str) -> list[int]:
        return [3 if letter == "?" else 4 + LETTERS.index(letter) for letter in text if letter != " "]

    def prompt(self, text: str) -> list[int]:
        return self.frame[0] + self.encode(text)

    def shown(self, ids: Any) -> tuple[str, ...]:
        return tuple("?" if i == 3 else LETTERS[i - 4] if 4 <= i < 21 else f"[{i}]" for i in ids)


def opened(kind: str, scale: float = 0.3) -> nn.Module:
    torch.manual_seed(5)
    model: nn.Module = shaken(untrained(kind, "predicting"), size=scale)
    if kind == "bart":  # its decoder begins with two
        model.generation_config.forced_bos_token_id = 0  # type: ignore[union-attr]
    tokens: Any = Letters(framed=kind != "next")
    remember(model, Path(kind), tokens, kind)
    return model


def row_of(kind: str, model: Any, ids: list[int]) -> Tensor:
    """The logits of the answer, by the model's own forward."""
    text = torch.tensor([ids])
    if kind == "masked":
        row: Tensor = model(input_ids=text).logits[0, ids.index(3)]
    elif kind == "next":
        row = model(input_ids=text).logits[0, -1]
    else:
        start = torch.tensor([[0] if kind == "t5" else [2, 0]])
        row = model(input_ids=text, decoder_input_ids=start).logits[0, -1]
    return row.double()


def own_patching(kind: str, model: Any, clean: Any, corrupted: Any, a: int, b: int | None) -> dict[str, Any]:
    """Head by head at W_O's input, by hooks of torch: nothing of headwise but the names of modules."""
    sites, kept = sites_of(model), {}

    def value(ids: list[int]) -> float:
        row = row_of(kind, model, ids)
        return float(row.log_softmax(-1)[a] if b is None else row[a] - row[b])

    hooks = []
    for site in sites:
        assert site.projection is not None

        def keep(module: Any, args: Any, name: str = site.name) -> None:
            kept[name] = args[0].clone()

        hooks.append(site.projection.register_forward_pre_hook(keep))
    good = value(clean)
    for hook in hooks:
        hook.remove()
    bad, effects = value(corrupted), {}
    for site in sites:
        for h, name in enumerate(site.heads):

            def change(module: Any, args: Any, site: Any = site, h: int = h) -> Any:
                joined = args[0].clone()
                width = joined.shape[-1] // site.n_heads
                part = slice(h * width, (h + 1) * width)
                joined[..., part] = kept[site.name][..., part]
                return (joined,)

            hook = site.projection.register_forward_pre_hook(change)  # type: ignore[union-attr]
            effects[name] = (value(corrupted) - bad) / (good - bad)
            hook.remove()
    return {"effects": effects, "clean": good, "corrupted": bad}


TEXTS = {"next": ("abcdeafg", "abcdebfg"), "masked": ("abc?eafg", "abh?eafg")}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("counts", ["logits", "probability"])
def test_it_tells_what_a_patching_of_its_own_tells(kind: str, counts: str) -> None:
    """Every head, those that work against the answer included; the difference of logits, or of log-probabilities."""
    model = opened(kind)
    clean, corrupted = TEXTS.get(kind, TEXTS["next"])
    tokens = Letters(framed=kind != "next")
    ids = [[*tokens.prompt(text), *tokens.frame[1]] for text in (clean, corrupted)]
    pair: tuple[Any, ...] = ("i", "j")
    a, b = (tokens.encode(letter)[0] for letter in pair)
    if counts == "probability":  # what is asked for is what the model says to the second text as well
        a, b = int(row_of(kind, model, ids[1]).argmax()), None
        pair = (a,)
    expected = own_patching(kind, model, *ids, a, b)
    story = hw.why(model, clean, corrupted, *pair)
    assert story.counts == counts
    assert [story.clean_value, story.corrupted_value] == pytest.approx([expected["clean"], expected["corrupted"]], 1e-4)
    effects = {part.head: part.brings for part in story.heads}
    assert effects == pytest.approx(expected["effects"], abs=2e-3)
    assert min(expected["effects"].values()) < -0.005 and max(expected["effects"].values()) > 0.02
    strongest = sorted(effects, key=lambda name: -abs(effects[name] or 0.0))
    assert [part.head for part in story.heads] == strongest
    assert all(part.without is not None for part in story.heads[:3])
    sites = {site.name: site for site in sites_of(model)}
    for part in story.heads[:3]:
        read = [clean[t] for t, _ in part.looks] if kind == "next" else part.looks
        assert read or sites[part.head.rpartition(".")[0]].name.startswith("decoder")


@pytest.mark.parametrize("kind", ["next", "masked", "t5"])
def test_half_precision_tells_the_same_story(kind: str) -> None:
    """In nats: a share divides them by the difference of two texts, which is small beside the rounding of each."""
    texts, dtype = TEXTS.get(kind, TEXTS["next"]), torch.float16 if kind == "masked" else torch.bfloat16
    size = 0.15 if kind == "t5" else 0.3  # T5 scales no score, so that larger weights enlarge what is rounded
    nats = []
    for story in (hw.why(opened(kind, size).to(number), *texts, "i", "j") for number in (torch.float32, dtype)):
        whole = story.clean_value - (story.corrupted_value or 0.0)
        nats.append({part.head: whole * (part.brings or 0.0) for part in story.heads})
    assert nats[1] == pytest.approx(nats[0], abs=16 * torch.finfo(dtype).eps) and max(map(abs, nats[0].values())) > 0.3


def test_a_text_goes_where_ids_go() -> None:
    """Of a model whose tokenizer is known; else the way out is told."""
    model, text = opened("next"), "abcdeafg"
    ids, other = (torch.tensor(Letters(False).encode(letters)) for letters in (text, "abcdebfg"))
    assert hw.attribute(model, text, ("i", "j")).heads == hw.attribute(model, ids, (12, 13)).heads
    of_ids = hw.patch(model, ids, other, target=(12, 13)).effects
    assert hw.patch(model, text, "abcdebfg", target=("i", "j")).effects == of_ids
    assert hw.why(model, ids.tolist(), other.tolist(), 12, 13).heads == hw.why(model, text, "abcdebfg", "i", "j").heads
    with hw.watch(model) as seen:
        model(ids[None])
    with hw.watch(model, text) as read:
        pass
    assert {name: head.means for name, head in read.items()} == {name: head.means for name, head in seen.items()}
    stranger = untrained("next", "predicting")
    refuses(lambda: hw.attribute(stranger, text, 7), r"no tokenizer of this LlamaForCausalLM is known, .*\.open")
    refuses(lambda: hw.attribute(model, text, "ij"), "'ij' is 2 tokens, 'i' 'j'; pass one")
    refuses(lambda: hw.attribute(model, 98 * "a", "i"), "98 tokens, and LlamaForCausalLM takes 97")


def test_bad_requests() -> None:
    refuses_table("why", globals())


def test_a_story_is_shown_in_words_and_a_table() -> None:
    """Heads on either side are named as such; what is not known of the model is left out by name."""
    story = hw.why(opened("masked"), *TEXTS["masked"], "i ", "j")
    text = " ".join(story.text(300).split())
    sides = {sign: [part.head for part in story.told if sign * story.moves(part) > 0] for sign in (1, -1)}
    assert sides[1] and sides[-1]
    assert f"{sides[1][0]} (" in text and " against i." in text and "For the masked word of" in text
    assert "What each head adds directly is left out: the last hidden state becomes logits in more than one" in text
    assert story.answer == "i" and "its keys alone carry" in text
    first = hw.why(opened("t5"), TEXTS["next"][0])
    sizes = [-abs(part.without or 0.0) for part in first.heads]
    assert first.asks == "first" and sizes == sorted(sizes) and sizes[11] < 0


def test_attention_outside_the_interface_is_patched_alike() -> None:
    """GPT-Neo multiplies its weights with the values itself, so that no queries are known; what heads give is."""
    model = shaken(untrained("gpt_neo", "outside"), size=0.1)
    tokens: Any = Letters(framed=False)
    remember(model, Path("gpt_neo"), tokens, "gpt_neo")
    expected = own_patching("next", model, *(tokens.encode(text) for text in TEXTS["next"]), 12, 13)
    story = hw.why(model, *TEXTS["next"], "i", "j")
    assert {part.head: part.brings for part in story.heads} == pytest.approx(expected["effects"], abs=2e-3)


def test_a_difference_near_0_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares of it are large whatever the heads do."""
    story = hw.why(opened("next"), *TEXTS["next"], "i", "j")
    moved = abs(story.clean_value - (story.corrupted_value or 0.0))
    for faint in (0.9 * moved, 1.1 * moved):
        monkeypatch.setattr(type(story), "FAINT", faint)
        line = f"{moved:.2f} nats: shares of it can be large"
        assert (line in story.text(300)) == (moved < faint)


def test_amounts_have_the_sign_of_their_side() -> None:
    """Also where the prompt favours the answer less than the corrupted text does, so that shares turn around."""
    differences = []
    for pair in ("ij", "ji"):
        story = hw.why(opened("next"), *TEXTS["next"], *pair)
        differences.append(story.clean_value - (story.corrupted_value or 0.0))
        text = " ".join(story.opening())
        assert all((f"*{part.head}* (\u2212" in text) == (story.moves(part) < 0) for part in story.told)
    assert min(differences) < 0 < max(differences)


def test_a_survey_as_a_figure() -> None:
    seen = hw.survey(opened("next"), [[4, 5, 6, 7, 8, 9], [5, 6, 7, 9, 4, 4]], ablate="none")
    assert seen.figure("entropy").axes[0].images[0].get_array()[1, 2] == seen["L1.H2"].entropy.mean  # type: ignore[index]


def copy_heads(first: Any, *others: Any) -> None:
    for head in others:
        for name in ("wq", "wk", "wv", "wo"):
            getattr(head, name).copy_(getattr(first, name))


def test_heads_that_do_each_others_work_are_tried_as_one() -> None:
    """Three heads look for the token that was behind the last one: each alone brings a third of the answer."""
    model = induction_model()
    layers: Any = [block.attention.heads for block in model.blocks]
    copy_heads(*layers[1])
    story = hw.why(model, [7, 2, 9, 4, 1, 8, 2], [7, 3, 9, 4, 1, 8, 2], 9, 4)
    carried = {part.head: part for part in story.keys}
    together = carried.pop(next(name for name in carried if "+" in name))
    assert sorted(together.head.split("+")) == ["L1.KV0", "L1.KV1", "L1.KV2"]
    assert together.k > 0.9 and abs(together.v) < 0.1 and all(0.2 < carried[f"L1.KV{n}"].k < 0.4 for n in range(3))
    path = story.paths[0]
    assert (path.sender, path.receiver, path.at) == ("L0.H1", together.head, "k") and path.effect > 0.9
    assert path.reader in ("L1.H0", "L1.H1", "L1.H2")
    assert f"{together.head}: its keys alone carry" in " ".join(story.text(300).split())
    # so are those that look at one token from there
    copy_heads(layers[0][1], layers[0][0], layers[0][2])
    paths = hw.why(model, [7, 2, 9, 4, 1, 8, 2], [7, 3, 9, 4, 1, 8, 2], 9, 4).paths
    assert paths[0].sender == "L0.H0+L0.H1+L0.H2" and paths[0].effect > 0.9
