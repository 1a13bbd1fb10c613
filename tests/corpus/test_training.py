"""What is learned from and tested on: apart, each token scored once, padding never; the n-gram baseline."""

import math
from collections import Counter, defaultdict
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import refuses_table
from hypothesis import given
from hypothesis import strategies as st
from small_models import tiny

from headwise import HeadwiseError
from headwise.corpus import verbs
from headwise.corpus.tokens import Tokens
from headwise.corpus.training import (
    IGNORED,
    Documents,
    Stream,
    best_order,
    likeliest,
    ngram_losses,
    text_corpus,
    verb_corpus,
)
from headwise.files import Sources, read_text
from headwise.gpt.train import evaluate


def stream(n: int = 1000, context: int = 7) -> Stream:
    """A stream whose ids count up from 0, so that an id says where it stands."""
    return Stream(range(n), context)


def parts(data: Stream) -> tuple[list[int], list[int]]:
    """What is trained on and what is held out."""
    ids = data._ids.tolist()
    return ids[: data._cut], ids[data._cut :]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def documents(train: list[str], held_out: list[str], context: int = 31, scored_after: str | None = None) -> Documents:
    tokens = Tokens.words([*train, *held_out])
    return Documents(tokens, train, held_out, context, scored_after)


LINES = [f"w{i} = x{i} " + "y " * (i % 5) + f"z{i}" for i in range(23)]


def test_batches_of_a_stream() -> None:
    assert parts(stream()) == (list(range(900)), list(range(900, 1000)))
    inputs, targets = stream().batch(generator(), 20_000)
    assert inputs.shape == targets.shape == (20_000, 7)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(inputs + 1, targets)
    assert set(inputs[:, 0].tolist()) == set(range(893))  # every start, up to the last whole piece
    assert targets.max() == 899
    data = stream()
    assert torch.equal(data.batch(generator(3), 5)[0], data.batch(generator(3), 5)[0])
    assert not torch.equal(data.batch(generator(3), 5)[0], data.batch(generator(4), 5)[0])
    for inputs, targets in stream().held_out_batches(4):
        assert torch.equal(inputs + 1, targets)
        assert len(inputs) <= 4


@given(st.integers(1, 40), st.integers(20, 400), st.integers(1, 9), st.integers(1, 500))
def test_held_out_tokens_are_scored_once(context: int, n: int, size: int, limit: int) -> None:
    data = stream(max(n, 10 * (context + 1)) + 10, context)
    targets = torch.cat([targets.flatten() for _, targets in data.held_out_batches(size, limit)]).tolist()
    assert len(set(targets)) == len(targets)
    assert set(targets) <= set(parts(data)[1][1:])
    assert len(targets) <= max(limit, context)
    if limit >= len(parts(data)[1]):
        assert len(targets) > len(parts(data)[1]) - 1 - context  # all but a rest shorter than a piece


def test_a_stream_that_is_too_short() -> None:
    refuses_table("streams", globals())


def test_batches_of_lines() -> None:
    data = documents(LINES, LINES[:3])
    inputs, targets = data.batch(generator(), len(LINES))
    tokens = Tokens.words(LINES)
    read = []
    for row, goals in zip(inputs, targets, strict=True):
        ids = [int(row[0]), *(int(t) for t in goals if t != IGNORED)]
        assert ids[0] == ids[-1] == tokens.boundary
        read.append(tokens.decode(ids))
    assert sorted(read) == sorted(" ".join(line.split()) for line in LINES)
    data = documents(LINES, LINES[:3])
    data = documents(["aa bb", "cc dd", "ee " * 20], ["aa bb"])
    widths = {data.batch(generator(seed), 1)[0].shape[1] for seed in range(20)}
    assert widths == {3, 21}
    tokens = Tokens.words(LINES)
    model = tiny("llama", len(tokens), context=31)
    data = Documents(tokens, LINES, LINES[:7], 31)
    assert evaluate(model, data, batch=7) == pytest.approx(evaluate(model, data, batch=1), abs=1e-6)


def test_each_draw_of_a_line_takes_one_of_its_ways() -> None:
    lines = ["aa , bb bb , cc", "dd = ee ff gg hh"]
    tokens = Tokens.words(lines)
    data = Documents(tokens, lines, lines[:1], 31, None, verbs.clause_orders, lambda line: line != lines[0])
    drawn = Counter[str]()
    for seed in range(600):
        inputs, targets = data.batch(generator(seed), 3)
        assert inputs.shape == (3, 7) and torch.equal(inputs[:, 1:][real := targets[:, 1:] >= 0], targets[:, :-1][real])
        drawn.update(tokens.decode(row[row >= 0].tolist()) for row in targets)
    assert drawn.pop("dd = ee ff gg hh") == 1200  # twice as often
    assert len(drawn) == 6 and min(drawn.values()) > 60  # of 100 expected; 60 lies 4 deviations below
    assert drawn.keys() == set(verbs.clause_orders(lines[0]))
    assert data.held_out_documents(99) == [tokens.document(lines[0])[:-1]]  # what is looked at stays as it is


def test_marks() -> None:
    data = documents(LINES, ["w1 = x1 z1", "w2 x2 = y z2"], scored_after="=")
    scored = []
    for inputs, targets in data.held_out_batches(1):
        scored.append(int((targets != IGNORED).sum()))
        first = int((targets[0] != IGNORED).nonzero()[0])
        assert inputs[0, first] == Tokens.words([*LINES]).encode("=")[0]
    assert scored == [3, 3]  # the words behind the mark, and the boundary
    data = documents(["aa bb", "w1 w2 = x1"], ["w1 w2 = x1"], scored_after="=")
    inputs, targets = data.batch(generator(), 2)
    tokens = Tokens.words(["aa bb", "w1 w2 = x1"])
    learned = {tokens.decode(line[line >= 0].tolist()) for line in targets}
    assert learned == {"aa bb", "= x1"} and (targets >= 0).sum() == 3 + 3  # with the boundaries behind
    data = documents(["aa bb cc dd ee ff gg hh"], ["aa bb cc dd ee ff gg hh"], context=5)
    assert data.batch(generator(), 1)[0].shape == (1, 5)
    with pytest.raises(HeadwiseError, match=r"this tokenizer has no .* to put between documents"):
        Documents(Tokens.characters("ab", boundary=False), ["a"], ["b"], 7)


def test_too_few_lines() -> None:
    refuses_table("lines", globals())


def test_texts(tmp_path: Path) -> None:
    path = tmp_path / "names.txt"
    lines = [f"name{i}" for i in range(53)]
    path.write_text("\n".join(lines) + "\n\n   \n")
    corpora = [text_corpus(Sources([path]), True, 17, seed) for seed in (0, 0, 1)]
    sets = []
    for corpus in corpora:
        assert isinstance(corpus.data, Documents)
        halves = [ways[0] for ways in corpus.data._train], corpus.data._held_out
        train, held_out = (list(map(corpus.tokens.decode, half)) for half in halves)
        assert sorted(train + held_out) == sorted(lines)
        assert len(held_out) == 6
        assert corpus.example in held_out
        sets.append(held_out)
    assert sets[0] == sets[1] != sets[2]
    (tmp_path / "text.txt").write_bytes("añb\r\nc\rx\n\u2028d\U0001f600".encode())
    assert read_text(tmp_path / "text.txt") == "añb\nc\nx\n\u2028d\U0001f600"


def test_the_verb_corpus_scores_the_spanish_alone() -> None:
    corpus = verb_corpus(0, 64)
    assert isinstance(corpus.data, Documents)
    mark = corpus.tokens.encode("=")[0]
    for inputs, targets in corpus.data.held_out_batches(64):
        assert not ((inputs == mark).cumsum(1) == 0)[targets != IGNORED].any()
    assert not set(corpus.data._held_out[0]) - set(range(len(corpus.tokens)))
    assert corpus.example.startswith("he would ")  # where neither the pronoun nor the verb tells the tense


def test_a_file_that_is_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(content: bytes) -> None:
        Path("text.txt").write_bytes(content)
        read_text(Path("text.txt"))

    monkeypatch.chdir(tmp_path)
    refuses_table("files", {"read": read})


V = 7
BOUNDARY = 3


def drawn_stream(size: int, seed: int) -> np.ndarray:
    """Tokens with some structure: skewed, and each drawn towards the one before. Token V - 1 never occurs."""
    rng = np.random.default_rng(seed)
    tokens = [0]
    for fresh in rng.choice(V - 1, size - 1, p=[0.35, 0.25, 0.15, 0.12, 0.08, 0.05]):
        tokens.append(int(tokens[-1] * 2 % (V - 1)) if rng.random() < 0.5 else int(fresh))
    return np.array(tokens)


class ByTheBook:
    """Interpolated Kneser-Ney, one gram at a time. Slow, and short enough to be checked by eye."""

    def __init__(self, train: list[int], order: int, boundary: int | None) -> None:
        self.order, self.boundary = order, boundary
        raw: dict[tuple[int, ...], int] = defaultdict(int)
        before: dict[tuple[int, ...], set[object]] = defaultdict(set)
        for i, token in enumerate(train):
            start = self.start(train[:i])
            if boundary is not None and token == boundary and (i == 0 or train[i - 1] == boundary):
                continue
            for first in range(start, i + 1):
                gram = tuple(train[first : i + 1])
                raw[gram] += 1
                before[gram].add(train[first - 1] if first > start else ("nothing before occurrence", i))
        self.count = {
            gram: raw[gram] if len(gram) == order else len(before[gram]) for gram in raw if len(gram) <= order
        }

    def start(self, past: list[int]) -> int:
        return max((j for j, token in enumerate(past) if token == self.boundary), default=0)

    def discount(self, k: int) -> float:
        n1, n2 = (sum(len(gram) == k and c == n for gram, c in self.count.items()) for n in (1, 2))
        return n1 / (n1 + 2 * n2) if n1 else 0.5

    def probability(self, past: list[int], token: int) -> float:
        context = past[self.start(past) :]
        return self.recurse(tuple(context[max(0, len(context) - self.order + 1) :]), token)

    def recurse(self, h: tuple[int, ...], token: int) -> float:
        lower = self.recurse(h[1:], token) if h else 1 / V
        after = {gram[-1]: c for gram, c in self.count.items() if gram[:-1] == h}
        if not after:
            return lower
        discount = self.discount(len(h) + 1)
        kept = max(after.get(token, 0) - discount, 0)
        return (kept + discount * len(after) * lower) / sum(after.values())


@pytest.mark.parametrize("order", [1, 2, 3, 5])
@pytest.mark.parametrize("boundary", [None, BOUNDARY])
def test_losses_and_the_likeliest_equal_the_transcription(order: int, boundary: int | None) -> None:
    train, held_out = drawn_stream(211, seed=1), drawn_stream(53, seed=2)
    held_out[29] = V - 1  # never seen in training
    book = ByTheBook(train.tolist(), order, boundary)
    for i, token in enumerate(held_out.tolist()):
        loss = ngram_losses(train, held_out, V, order, np.arange(53) == i, boundary)[order]
        assert math.isclose(math.exp(-loss), book.probability(held_out[:i].tolist(), token), rel_tol=1e-12)
    prompts = [[BOUNDARY, *held_out[i : i + 3].tolist()] for i in range(29)]
    book = ByTheBook(train.tolist(), order, BOUNDARY)
    text, ends = np.concatenate(prompts), np.arange(4, 113, 4) - 1
    for prompt, token in zip(prompts, likeliest(train, text, ends, V, order, BOUNDARY), strict=False):
        p = [book.probability(prompt[:-1], w) for w in range(V)]
        assert math.isclose(sum(p), 1, rel_tol=1e-12) and math.isclose(p[token], max(p), rel_tol=1e-12)


def test_orders_are_measured_together() -> None:
    train, held_out = drawn_stream(211, seed=3), drawn_stream(53, seed=4)
    together = ngram_losses(train, held_out, V, 5, boundary=BOUNDARY)
    assert list(together) == [1, 2, 3, 4, 5]
    for order, loss in together.items():
        assert ngram_losses(train, held_out, V, order, boundary=BOUNDARY)[order] == loss


def test_a_bigram_worked_by_hand() -> None:
    # Tokens 0 1 0 1 0 2 0 1, vocabulary 3. Level 2 counts: 01 three times, 10 twice, 02 and 20 once each.
    # D_2 = 2 / (2 + 2 * 1) = 1/2. Level 1 counts what comes before: 0 after {nothing, 1, 2}, 1 after {0}, 2 after {0}.
    # n1 = 2, n2 = 0, so D_1 = 1: P_1(0) = (3 - 1 + 3/3) / 5 = 3/5, P_1(1) = P_1(2) = (0 + 3/3) / 5 = 1/5.
    # After 0 (count 4, two types): P(1) = (3 - 1/2 + 1/2 * 2 * 1/5) / 4.
    train = [0, 1, 0, 1, 0, 2, 0, 1]
    first = [math.exp(-ngram_losses(train, [w], 3, 2)[2]) for w in range(3)]
    np.testing.assert_allclose(first, [3 / 5, 1 / 5, 1 / 5], rtol=1e-12)
    after_0 = [Fraction(3, 5) / 4, (Fraction(5, 2) + Fraction(1, 5)) / 4, (Fraction(1, 2) + Fraction(1, 5)) / 4]
    p = [math.exp(-ngram_losses(train, [0, w], 3, 2, [False, True])[2]) for w in range(3)]
    np.testing.assert_allclose(p, [float(x) for x in after_0], rtol=1e-12)


def test_counts_and_losses() -> None:
    train, held_out = drawn_stream(211, seed=7), drawn_stream(53, seed=8)
    mask = np.random.default_rng(9).random(53) < 0.3
    total = ngram_losses(train, held_out, V, 3)[3]
    part, rest = (ngram_losses(train, held_out, V, 3, counted=m)[3] for m in (mask, ~mask))
    assert math.isclose(total, (part * mask.sum() + rest * (~mask).sum()) / 53, rel_tol=1e-12)
    assert part != rest
    assert best_order({3: 1.5, 2: 1.5, 7: 1.75}) == (3, 1.5)
