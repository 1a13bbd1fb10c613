"""microgpt: three rungs, one function; and the published run, loss by loss and letter by letter."""

import functools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import refuses_table

from headwise.lab.microgpt import RUNGS, Characters, Draw, Replay, array, learning_rate, plain, replay, shapes, tensor
from headwise.rungs.autograd import Value

# All letters, so that the vocabulary is 27; the last name is longer than the context.
LINES = """
ada alma anouk bela cyril dagny edda elif enzo fynn gesa hedda ilse ines jonas juno kaia kilian lasse leonie
lotte mara milo nele odette ole paul quentin rosa ruben selma sten tilda tove ursula vito wanda xenia yusuf zora
bartholomewalexander
"""
NAMES = LINES.split()
STEPS = 50  # more than there are names: the list begins again

# Frozen from the plain rung, step: loss. The long name is that of step 41; step 42 is the first of the second round.
LOSSES = {
    1: 3.295479603455, 2: 3.296899006270, 3: 3.179663673131, 17: 3.077328057952, 41: 3.058792977033,
    42: 2.390571303355, 50: 2.660060330907,
}  # fmt: skip
SAMPLES = ["hesa", "jo", "pura", "vdno", "ala"]

NAMES_FILE = Path(__file__).parents[2] / ".." / "shared" / "data" / "names.txt"
PUBLISHED_FIRST = [3.3659669476, 3.4242727839, 3.1778021255, 3.0663556842, 3.2208830898]  # steps 1 to 5
PUBLISHED_LAST = [2.4764, 2.4730, 2.6497]  # steps 998 to 1000
PUBLISHED_SAMPLES = """
kamon ann karai jaire vialan karia yeran anna areli kaina konna keylen liole alerin earan lenne kana lara alela anton
"""

# Sums in another order differ by some 1e-15 here; 1e-9 leaves room for 1,000 steps and for other processors.
CLOSE = 1e-9


@functools.cache
def short_run(rung: str) -> Replay:
    return replay(NAMES, rung, STEPS, n_samples=5)


@functools.cache
def published_run(rung: str) -> Replay:
    return replay(published_names(), rung)


def published_names() -> list[str]:
    if not NAMES_FILE.exists():
        pytest.skip(f"{NAMES_FILE} is absent (makemore's names.txt, 32,033 names)")
    return NAMES_FILE.read_text(encoding="utf-8").splitlines()


def test_the_private_stream_is_that_of_the_module() -> None:
    draw = Draw(NAMES, seed=42)
    weights = [x for matrix in draw.weights.values() for row in matrix for x in row]
    state = random.getstate()
    try:
        random.seed(42)
        shuffled = list(NAMES)
        random.shuffle(shuffled)
        assert draw.documents == shuffled
        assert weights == [random.gauss(0, 0.08) for _ in weights]
        shares = [float(i) for i in range(draw.tokens.size)]
        for _ in range(7):
            assert draw.choose(shares) == random.choices(range(draw.tokens.size), weights=shares)[0]
    finally:
        random.setstate(state)


@pytest.mark.parametrize("rung", RUNGS)
def test_the_streams_of_others_are_left_alone(rung: str) -> None:
    python, numpy, of_torch = random.getstate(), np.random.get_state()[1], torch.get_rng_state()
    replay(NAMES, rung, 1, n_samples=1)
    assert random.getstate() == python
    assert (np.random.get_state()[1] == numpy).all()
    assert (torch.get_rng_state() == of_torch).all()


@pytest.mark.slow
def test_sizes_of_the_model() -> None:
    tokens = Characters(["cab", "bad"])
    assert (tokens.characters, tokens.end, tokens.size) == (["a", "b", "c", "d"], 4, 5)
    assert tokens.encode("dab") == [4, 3, 0, 1, 4]
    assert tokens.decode([4, 3, 0, 1, 4]) == "dab"
    draw = Draw(NAMES, seed=42)
    lengths = {name: len(draw.document(step)) for step, name in enumerate(draw.documents)}
    assert lengths["bartholomewalexander"] == 17
    assert lengths["ole"] == 5
    assert draw.document(2) == draw.document(2 + len(NAMES))
    assert sum(rows * columns for rows, columns in shapes(27).values()) == 4192
    for rung in RUNGS:
        parameters = short_run(rung).parameters
        assert {key: (len(matrix), len(matrix[0])) for key, matrix in parameters.items()} == shapes(27)
    assert [learning_rate(step, 1000) for step in (0, 250, 1000)] == [0.01, 0.0075, 0.0]
    assert learning_rate(250, 20) == 0.0075  # a short run is the beginning of the full one
    assert learning_rate(500, 2000) == 0.0075
    assert replay(NAMES, steps=3, n_samples=0).losses == short_run("array").losses[:3]
    assert replay(["  ada\n", "", "bela", " \t"], steps=2) == replay(["ada", "bela"], steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("rung", RUNGS)
def test_the_frozen_run(rung: str) -> None:
    run = short_run(rung)
    assert len(run.losses) == STEPS
    assert {step: run.losses[step - 1] for step in LOSSES} == pytest.approx(LOSSES, rel=CLOSE)
    assert run.samples == SAMPLES


@pytest.mark.slow
@pytest.mark.parametrize("rung", ["array", "tensor"])
def test_every_loss_and_every_weight_is_that_of_plain(rung: str) -> None:
    run, expected = short_run(rung), short_run("plain")
    assert run.losses == pytest.approx(expected.losses, rel=CLOSE)
    for key, matrix in expected.parameters.items():
        np.testing.assert_allclose(run.parameters[key], matrix, rtol=0, atol=CLOSE, err_msg=key)


def slopes_of_plain(draw: Draw, ids: list[int]) -> tuple[float, dict[str, np.ndarray]]:
    weights = {key: [[Value(x) for x in row] for row in matrix] for key, matrix in draw.weights.items()}
    loss = plain.Model(weights, draw.n_heads, draw.n_layers).loss(ids)
    assert isinstance(loss, Value)
    loss.backward()
    return loss.data, {key: np.array([[x.grad for x in row] for row in m]) for key, m in weights.items()}


def slopes_of_array(draw: Draw, ids: list[int]) -> tuple[float, dict[str, np.ndarray]]:
    model = array.Model(draw.weights, draw.n_heads)
    model.gradient([0] * 16, [0] * 16)  # what a longer document left behind must be gone
    return model.gradient(ids[:-1], ids[1:]), model.slopes.named


def slopes_of_tensor(draw: Draw, ids: list[int]) -> tuple[float, dict[str, np.ndarray]]:
    model = tensor.build(draw.weights, draw.n_heads)
    loss = tensor.loss_of(model, ids)
    loss.backward()
    return loss.item(), {key: model.get_parameter(tensor.name_of(key)).grad.numpy() for key in draw.weights}


@pytest.mark.parametrize(
    ("name", "shape"),
    [("a", (4, 1)), ("anna", (4, 1)), ("bartholomewalexander", (4, 1)), ("anna", (2, 3)), ("anna", (1, 2))],
)
@pytest.mark.parametrize("slopes_of", [slopes_of_array, slopes_of_tensor])
def test_the_gradient_of_every_weight_is_that_of_plain(slopes_of: Any, name: str, shape: tuple[int, int]) -> None:
    draw = Draw(NAMES, 42, *shape)  # heads, layers
    ids = draw.tokens.encode(name)[:17]
    expected_loss, expected = slopes_of_plain(draw, ids)
    loss, slopes = slopes_of(draw, ids)
    assert loss == pytest.approx(expected_loss, rel=1e-12)
    assert slopes.keys() == expected.keys()
    for key, slope in expected.items():
        assert np.abs(slope).max() > 1e-5, f"{key} is not tested by this"
        np.testing.assert_allclose(slopes[key], slope, rtol=0, atol=1e-12, err_msg=key)


@pytest.mark.slow
def test_other_numbers_of_heads_and_layers_are_one_function_on_all_rungs() -> None:
    """More layers are drawn after the first one; more heads change no draw, since a head is a slice of the width."""
    runs = [replay(NAMES, rung, 5, n_samples=2, n_heads=2, n_layers=3) for rung in RUNGS]
    for run in runs[1:]:
        assert run.losses == pytest.approx(runs[0].losses, rel=CLOSE)
        assert run.samples == runs[0].samples and run.parameters.keys() == runs[0].parameters.keys()
    assert len(runs[0].parameters) == 3 + 3 * 6 and runs[0].losses[0] != short_run("plain").losses[0]
    one, two = Draw(NAMES, 42, 4, 1), Draw(NAMES, 42, 8, 2)
    assert all(one.weights[key] == two.weights[key] for key in one.weights)


@pytest.mark.parametrize("rung", RUNGS)
def test_the_report_is_told_every_step(rung: str) -> None:
    told: list[tuple[int, float]] = []
    run = replay(NAMES, rung, 3, n_samples=0, report=lambda step, loss: told.append((step, loss)))
    assert told == list(enumerate(run.losses, 1))
    assert run.samples == []


def test_what_is_refused() -> None:
    refuses_table("microgpt", {"replayed": lambda **changes: replay(**{"documents": NAMES, **changes})}, exact=True)


@pytest.mark.slow
@pytest.mark.parametrize("rung", ["array", "tensor"])
def test_the_published_run(rung: str) -> None:
    run = published_run(rung)
    assert run.losses[:5] == pytest.approx(PUBLISHED_FIRST, rel=CLOSE)
    assert [round(loss, 4) for loss in run.losses[-3:]] == PUBLISHED_LAST
    assert run.samples == PUBLISHED_SAMPLES.split()
