"""The model in the page: in a real Chromium it computes what the torch backend does, and reads text as Python does."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from browser_types import Browser, Page
from browsing import opener
from cases import every, rows
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

import headwise as hw
from headwise.corpus.tokens import BOUNDARY, Tokens
from headwise.gpt.gpt import GPT, GPTConfig
from headwise.gpt.presets import PRESETS
from headwise.heads.watch import head_maps
from headwise.models.pack import MOST, pack_model, unread_part
from headwise.view.page import json_block, page

pytestmark = pytest.mark.usefixtures("no_gradients")

SCRIPT = "model.js"
TEXT = "el gato escribe\nshe writes, don't stop! élan vital  twice  日本 🙂 naïve 12 34th\n"
EXACTLY = 1e-4  # the bound, of logits and weights in float32


def words(count: int) -> Tokens:
    return Tokens.words([" ".join(f"w{i}" for i in range(count - 1))])


def model_of(preset: str, vocab_size: int, **changes: Any) -> GPT:
    """The preset's shape with weights that hide nothing: no gain is 1, no bias 0, no head even."""
    torch.manual_seed(7)
    model = GPT(GPTConfig(vocab_size=vocab_size, **{**PRESETS[preset].shape, **changes}))
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape) * (0.2 if parameter.ndim == 1 else 0.06))
    return model.eval()


SMALLER: dict[str, dict[str, int]] = {"llama": {"n_layers": 2}, "fast": {"n_layers": 1}}  # but one is in float16
SMALLER |= {"book": {"n_layers": 1, "d_model": 96, "d_ff": 128}}
CASES: dict[str, Callable[[], GPT]] = {
    **{name: (lambda name=name: model_of(name, 67, **SMALLER.get(name, {}))) for name in PRESETS},  # type: ignore[misc]
    "biases": lambda: model_of("nanogpt", 67, bias=True, n_layers=2, n_heads=2, d_model=22, activation="gelu_tanh"),
    "wide heads": lambda: model_of("verbs", 67, head_dim=14, n_heads=6, n_kv_heads=2, tied=False, bias=True),
    "one key head": lambda: model_of("llama", 67, n_layers=2, n_kv_heads=1, d_model=40, norm_gain=False, qk_norm=True),
}


@pytest.fixture(scope="module")
def browsed(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """One page for all: models come and go as blocks of data."""
    path = tmp_path_factory.mktemp("model") / "page.html"
    html = page("test", "<main><h1>x</h1></main>", title=("page.language", {}), script=SCRIPT)
    path.write_text(html, encoding="utf-8")
    with opener(browser) as opened:
        yield opened(path, inside=True)


def load(browsed: Page, block: dict[str, Any]) -> None:
    browsed.evaluate("block => offer(window.model = readModel(JSON.parse(block)))", json_block(block))


def run(browsed: Page, text: str, **changes: Any) -> dict[str, Any]:
    return browsed.evaluate("given => window.headwise.run(...given)", [text, changes])  # type: ignore[no-any-return]


def largest_gap(result: dict[str, Any], model: GPT, ids: list[int]) -> float:
    """By how much logits and maps of the page differ from those of the torch backend."""
    gaps = [(torch.tensor(result["logits"]) - model(torch.tensor([ids]))[0]).abs().max()]
    maps = head_maps(model, ids, [""] * len(ids), "x").maps
    gaps += [(torch.tensor(result["maps"][head.name]) - torch.from_numpy(head.weights)).abs().max() for head in maps]
    return float(max(gaps))


@pytest.mark.browser
@every("name", CASES)
def test_the_page_computes_the_same_function(browsed: Page, name: str) -> None:
    model, tokens = CASES[name](), words(67)
    block = pack_model(model, tokens)
    load(browsed, block)
    draw = random.Random(3)
    heads = [f"L{n}.H{h}" for n in range(model.config.n_layers) for h in range(model.config.n_heads)]
    for length in (2, 13):
        text = " ".join(f"w{draw.randrange(66)}" for _ in range(length))
        ids = tokens.prompt(text)
        result = run(browsed, text)
        assert result["ids"] == ids and result["unknown"] == []
        assert result["tokens"] == [BOUNDARY, *text.split()]
        assert largest_gap(result, model, ids) <= EXACTLY
        silenced = draw.sample(heads, 2)
        with hw.ablate(model, silenced):
            assert largest_gap(run(browsed, text, silence=silenced), model, ids) <= EXACTLY
            assert largest_gap(run(browsed, text, scale=dict.fromkeys(silenced, 0)), model, ids) <= EXACTLY


@pytest.mark.browser
def test_what_a_head_adds_and_a_scaled_head(browsed: Page) -> None:
    """A layer's output is the sum of what its heads add and the bias; scaled heads add so much of it."""
    model, tokens = CASES["wide heads"](), words(67)
    load(browsed, pack_model(model, tokens))
    ids = torch.tensor([tokens.prompt("w1 w5 w2 w8 w13")])
    factors = {f"L{n}.H{h}": 0.25 + 0.5 * h - n for n in range(2) for h in range(6)}
    outputs: list[torch.Tensor] = []
    for block in model.blocks:
        block.attention.register_forward_hook(lambda module, given, output: outputs.append(output[0]))
    with hw.steer(model, factors):
        logits = model(ids)[0]
    result = run(browsed, "w1 w5 w2 w8 w13", scale=factors)
    assert torch.allclose(torch.tensor(result["logits"]), logits, atol=EXACTLY)
    for n, output in enumerate(outputs):
        added = sum(torch.tensor(result["heads"][f"L{n}.H{h}"]) for h in range(6))
        assert torch.allclose(added + model.blocks[n].attention.o_proj.bias, output, atol=EXACTLY)


@pytest.mark.browser
def test_a_token_is_drawn_by_its_probability(browsed: Page) -> None:
    draw = "r => sample(Float32Array.of(0.25, 0.5, 0.25), r)"
    assert [browsed.evaluate(draw, r) for r in (0, 0.24, 0.26, 0.74, 0.76, 0.99999)] == [0, 0, 1, 1, 2, 2]


@pytest.mark.browser
def test_a_wrong_call_says_why(browsed: Page) -> None:
    from playwright.sync_api import Error

    load(browsed, pack_model(model_of("verbs", 67, context=5), words(67)))
    with pytest.raises(Error, match=r"there is no head L9.H9; the model has L0.H0, L0.H1"):
        run(browsed, "w1", silence=["L9.H9"])
    with pytest.raises(Error, match=r"6 tokens exceed the model's context of 5"):
        run(browsed, "w1 w2 w3 w4 w5")


def trained(kind: str) -> Tokens:
    """A byte-pair tokenizer of the library, trained on the text."""
    tokenizer = Tokenizer(models.BPE(unk_token=None if kind == "bytes" else BOUNDARY))
    alphabet: list[str] = []
    if kind == "bytes":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    elif kind == "signs":
        tokenizer.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.Lowercase()])
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    else:
        tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\u2581?[^\u2581\n]+|\n"), "isolated")
    options: dict[str, Any] = {"special_tokens": [BOUNDARY], "initial_alphabet": alphabet, "show_progress": False}
    tokenizer.train_from_iterator([TEXT] * 3, trainers.BpeTrainer(vocab_size=300, **options))
    return Tokens(tokenizer)


TOKENIZERS: dict[str, Callable[[], Tokens]] = {
    "characters": lambda: Tokens.characters(TEXT, boundary=False),
    "characters of lines": lambda: Tokens.characters(TEXT, boundary=True),
    "words": lambda: Tokens.words(TEXT.splitlines()),
    **{kind: (lambda kind=kind: trained(kind)) for kind in ("bytes", "signs", "marks")},  # type: ignore[misc]
}


@pytest.mark.browser
@every("kind", TOKENIZERS)
def test_the_page_reads_text_as_python_does(browsed: Page, kind: str) -> None:
    tokens = TOKENIZERS[kind]()
    model = model_of("verbs", len(tokens), n_heads=1, d_model=2, d_ff=2, n_layers=1, context=512)
    load(browsed, pack_model(model, tokens))
    draw = random.Random(5)
    whole = TEXT.split() if kind == "words" else list(TEXT)
    gap = " " if kind == "words" else ""
    texts = [TEXT, TEXT.strip(), " twice", "", *(gap.join(draw.choices(whole, k=23)) for _ in range(19))]
    for text in texts:
        result = browsed.evaluate("text => inputOf(window.model, text)", text)
        assert result["ids"] == tokens.prompt(text), text
        assert all(piece["known"] for piece in result["pieces"])
        shown = browsed.evaluate("ids => ids.map(id => window.model.tokens.shown[id])", result["ids"])
        assert tuple(shown) == tokens.shown(result["ids"])


@pytest.mark.browser
@every(
    "kind, text, unknown",
    [
        ("words", "she xyzzy writes, <b>", [(1, "xyzzy"), (3, "<b>")]),
        ("characters", "shQe", [(2, "Q")]),
        ("signs", "she Ж", [(None, "ж")]),
    ],
)
def test_what_the_vocabulary_lacks_is_marked(browsed: Page, kind: str, text: str, unknown: list[Any]) -> None:
    tokens = TOKENIZERS[kind]()
    load(browsed, pack_model(model_of("verbs", len(tokens), n_layers=1), tokens))
    result = run(browsed, text)
    begin = tokens.boundary is not None
    assert [piece["text"] for piece in result["unknown"]] == [piece for _, piece in unknown]
    for (at, _), piece in zip(unknown, result["unknown"], strict=True):
        assert at is None or piece["at"] == at + begin
        assert len(result["tokens"]) == len(result["ids"]) == len(result["logits"])


def test_a_model_that_does_not_fit_says_why() -> None:
    model, tokens = model_of("verbs", 67), words(67)
    assert pack_model(torch.nn.Linear(2, 3), tokens) == {"reason": "foreign"}
    assert pack_model(model, None) == {"reason": "foreign"}
    pruned = model_of("verbs", 67)
    pruned.blocks[0].attention.spec = replace(pruned.blocks[0].attention.spec, softcap=3.0)
    assert pack_model(pruned, tokens) == {"reason": "reshaped"}
    large = GPT(GPTConfig(vocab_size=MOST // 16, context=5, n_layers=1, n_heads=1, d_model=16, tied=False))
    assert pack_model(large, tokens)["reason"] == "size"
    odd = Tokens.words(["a b"])
    odd._tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    assert pack_model(model, odd) == {"reason": "tokenizer", "part": "pre_tokenizer Metaspace"}


@every("changes, part", rows("unread_parts"))
def test_a_tokenizer_that_the_page_cannot_follow_is_named(changes: dict[str, Any], part: str) -> None:
    layout = {"model": {"type": "WordLevel"}, "added_tokens": [], "normalizer": None, "pre_tokenizer": None}
    assert unread_part({**layout, **changes}) == (part or None)
