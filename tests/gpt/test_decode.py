"""The decode form computes what the model computes, and `generate` writes the same text through it."""

import dataclasses
from typing import Any

import pytest
import torch
from cases import refuses
from small_models import shaken, tiny

from headwise.gpt.generate import Decoder, Source, Texts, continued, generate, looked_up, why_not
from headwise.gpt.gpt import GPT
from headwise.gpt.presets import PRESETS

pytestmark = pytest.mark.usefixtures("no_gradients")

CONTEXT = 43
ROWS = [[3, 1, 4, 1, 5, 9, 2], [6, 5, 3], [5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6]]


def read_in_pieces(decoder: Decoder, row: list[int], pieces: tuple[int, ...]) -> torch.Tensor:
    texts, done, logits = Texts(decoder, CONTEXT), 0, []
    for piece in pieces:
        logits.append(texts([row[done : done + piece]], piece))
        done += piece
    return torch.cat(logits, 1)[0]


def variants(tiny: Any) -> dict[str, GPT]:
    models = {name: tiny(name, context=CONTEXT) for name in PRESETS}
    windows = dataclasses.replace(models["llama"].config, windows=(None, 5), qk_norm=True, n_layers=2)
    return models | {"windows": shaken(GPT(windows))}


@pytest.mark.parametrize("rows", [1, 5])
def test_the_form_computes_what_the_model_computes(rows: int) -> None:
    row = [(7 * n + n * n) % 19 for n in range(41)]
    for name, model in variants(tiny).items():
        narrow, wide = model(torch.tensor([row]))[0], model.double()(torch.tensor([row]))[0]
        bound = 20 * (narrow - wide).abs().max() + 1e-6
        decoder = Decoder(model.float(), rows=rows)
        for pieces in ((41,), (1,) * 41, (19, 1, 1, 1, 7, 1, 11)):
            assert (read_in_pieces(decoder, row, pieces) - wide).abs().max() < bound, (name, pieces)


def test_texts_that_begin_apart() -> None:
    models = variants(tiny)
    for name in ("verbs", "course", "windows"):
        model = models[name]
        texts = Texts(Decoder(model, rows=3), CONTEXT)
        whole = [list(row) for row in ROWS]
        logits = texts(whole)[:, 0]
        for n in range(9):
            expected = torch.stack([model(torch.tensor([row]))[0, -1] for row in whole])
            assert torch.allclose(logits, expected, atol=1e-4), (name, n)
            new = [[(n * 5 + k) % 19] for k in range(3)]
            whole = [row + more for row, more in zip(whole, new, strict=True)]
            logits = texts(new)[:, 0]


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 1.3, "seed": 4, "stop": 7}], ids=str)
@pytest.mark.parametrize("form", [True, False])
def test_several_texts_are_those_of_each(options: dict[str, Any], form: bool) -> None:
    """Beyond the context of 11, with the form and without it."""
    model, together = tiny("llama"), [[], [], []]  # type: ignore[var-annotated]
    more = {name: value for name, value in options.items() if name not in ("stop", "seed")}
    seed, stops = options.get("seed", 0), {options["stop"]} if "stop" in options else set()
    for step in continued(source_of(model, form), ROWS, 37, **more, seed=seed, stops=stops):
        for text, token in zip(together, step, strict=True):
            text += [] if token is None else [token]
    more["stop"] = options.get("stop")
    assert together == [
        list(generate(model, row, 37, cache=False, seed=seed + n, **more)) for n, row in enumerate(ROWS)
    ]


def source_of(model: GPT, form: bool = True) -> Source:
    def begin() -> Any:
        caches = model.new_caches()
        return lambda ids: model(ids, caches, last_only=True)[0, -1]

    context, size = model.config.context, model.config.vocab_size
    return Source(begin, context, size, Decoder(model, rows=len(ROWS)) if form else None)


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 0.5, "seed": 3}], ids=str)
def test_lookup_writes_the_same_text_in_fewer_steps(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = tiny("llama", context=97), []
    call = Texts.__call__
    monkeypatch.setattr(Texts, "__call__", lambda self, ids, last=1: calls.append(last) or call(self, ids, last))
    plain = [step[0] for step in continued(source_of(model), [ROWS[0]], 89, **options)]
    assert len(calls) == 89
    ahead = [step[0] for step in continued(source_of(model), [ROWS[0]], 89, lookup=4, **options)]
    assert ahead == plain and len(calls) - 89 < 89


def test_what_is_looked_up_and_what_int8_loses() -> None:
    assert looked_up([1, 2, 3, 4, 1, 2], 3) == [3, 4, 1]
    assert looked_up([1, 2, 3, 1, 2, 4, 1, 2], 1) == [4]
    assert looked_up([1, 1, 1], 2) == [1] and looked_up([1, 2, 3, 1], 2) == [] and looked_up([1, 2, 1, 2], 0) == []
    for name, model in variants(tiny).items():
        row = torch.tensor([[(7 * n + n * n) % 19 for n in range(31)]])
        theirs = model(row)[0].log_softmax(-1)
        ours = Texts(Decoder(model, int8=True), CONTEXT)(row.tolist(), 31)[0].log_softmax(-1)
        loss = (theirs.exp() * (theirs - ours)).sum(-1).mean()
        assert 1e-7 < loss < 0.05, (name, loss)
    assert any(continued(Source(lambda: lambda ids: torch.full((9,), 6e4).half(), None, 9), [[1]], 1))  # loud


def test_who_has_no_form() -> None:
    assert why_not(tiny("llama")) is None and "float32" in str(torch.autocast("cpu")(why_not)(tiny("llama")))
    assert "float32" in str(why_not(tiny("llama").double()))
    watched = tiny("llama")
    watched.blocks[0].register_forward_hook(lambda *_: None)
    assert "watches" in str(why_not(watched))
    capped = tiny("llama")
    capped.blocks[1].attention.spec = capped.blocks[1].attention.spec.replace(softcap=2.0)
    assert "options" in str(why_not(capped))
    other = tiny("llama")
    other.blocks[1].feed_forward.down = torch.nn.Sequential(other.blocks[1].feed_forward.down)
    refuses(lambda: Decoder(other), "no decode form: Sequential is no part that it knows")


def test_watching_in_between_sees_the_model() -> None:
    model, seen = tiny("llama"), []
    expected = list(generate(model, ROWS[0], 23, temperature=0))
    stream = generate(model, ROWS[0], 23, temperature=0)
    text = [next(stream) for _ in range(5)]
    handle = model.blocks[0].register_forward_hook(lambda *_: seen.append(1))
    text += [next(stream) for _ in range(2)]
    handle.remove()
    assert len(seen) == 2 and text + list(stream) == expected
    # Texts that the form has read together go on one by one, those that have not ended.
    model, options = tiny("llama"), {"temperature": 1.3, "seed": 4}
    alone = [list(generate(model, row, 23, **options | {"seed": 4 + n})) for n, row in enumerate(ROWS)]
    stop = alone[0][3]
    expected = [text[: text.index(stop)] if stop in text else text for text in alone]
    assert min(map(len, expected)) < 5 and max(map(len, expected)) > 9
    stream = continued(source_of(model), ROWS, 23, stops={stop}, **options)  # type: ignore[arg-type]
    steps = [next(stream) for _ in range(5)]
    handle = model.blocks[0].register_forward_hook(lambda *_: None)
    steps += [next(stream) for _ in range(3)]
    handle.remove()
    steps += stream
    assert expected == [[token for token in text if token is not None] for text in zip(*steps, strict=True)]
