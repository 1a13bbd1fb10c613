"""microgpt: two files, one function; and the published run, loss by loss and letter by letter."""

import math
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from headwise.courses import microgpt, microgpt_numpy
from headwise.courses.microgpt import Draw, Value

# All letters, so that the vocabulary is 27; the last name is longer than the context.
LINES = """
ada alma anouk bela cyril dagny edda elif enzo fynn gesa hedda ilse ines jonas juno kaia kilian lasse leonie
lotte mara milo nele odette ole paul quentin rosa ruben selma sten tilda tove ursula vito wanda xenia yusuf zora
bartholomewalexander
"""
NAMES = LINES.split()
STEPS = 50  # more than there are names: the list begins again

# Frozen, step: loss. The long name is that of step 41; step 42 is the first of the second round.
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


def test_sizes_and_documents() -> None:
    draw = Draw(["  ada\n", "", *NAMES[1:], " \t"], seed=42)
    assert draw.documents == Draw(NAMES, seed=42).documents and draw.end == 26
    ids = {name: draw.ids(step) for step, name in enumerate(draw.documents)}
    assert len(ids["bartholomewalexander"]) == 17 and ids["ada"] == [26, 0, 3, 0, 26]
    assert draw.ids(2) == draw.ids(2 + len(NAMES))
    assert sum(rows * columns for rows, columns in microgpt.shapes(27).values()) == 4192
    assert list(microgpt.shapes(27, 2))[-1] == "layer1.mlp_fc2"
    with pytest.raises(ValueError, match="no names"):
        microgpt.replay([" "])


@pytest.mark.parametrize("module", [microgpt, microgpt_numpy])
def test_the_frozen_run(module: object) -> None:
    told: list[tuple[int, float]] = []
    state = random.getstate()
    report = lambda step, loss: told.append((step, loss))  # noqa: E731
    losses, samples = module.replay(NAMES, STEPS, n_samples=5, report=report)  # type: ignore[attr-defined]
    assert random.getstate() == state and told == list(enumerate(losses, 1))
    assert {step: losses[step - 1] for step in LOSSES} == pytest.approx(LOSSES, rel=CLOSE)
    assert samples == SAMPLES


@pytest.mark.parametrize("name", ["a", "anna", "bartholomewalexander"])
def test_the_gradient_by_hand_is_that_of_the_scalars(name: str) -> None:
    draw = Draw(NAMES, 42)
    ids = [26, *map(draw.characters.index, name), 26][:17]
    scalars, arrays = microgpt.Learner(draw.weights), microgpt_numpy.Learner(draw.weights)
    expected = scalars.loss(ids)
    expected.backward()
    arrays.gradient([0] * 17)  # what a longer document left behind must be gone
    loss, slopes = arrays.gradient(ids)
    assert loss == pytest.approx(expected.data, rel=1e-12)
    grads = np.array([weight.grad for weight in scalars.weights])
    assert all(np.abs(part).max() > 1e-5 for part in arrays.parts(grads))  # every matrix is tested by this
    np.testing.assert_allclose(slopes, grads, rtol=0, atol=1e-12)


def test_a_number_knows_its_slopes() -> None:
    x, y = Value(0.7), Value(-1.3)
    z = (x * y - x / 2 + 3) ** 2 + microgpt.exp(x) * microgpt.relu(y) + microgpt.log_sum_exp([x, y])
    z.backward()
    inner, share = 0.7 * -1.3 - 0.35 + 3, 1 / (1 + math.exp(-2.0))
    assert x.grad == pytest.approx(2 * inner * (-1.3 - 0.5) + share)
    assert y.grad == pytest.approx(2 * inner * 0.7 + 1 - share)


def test_the_command_prints_losses_and_names(tmp_path: Path) -> None:
    (tmp_path / "names.txt").write_text("\n".join(NAMES), encoding="utf-8")
    told = []
    for name in ("microgpt", "microgpt_numpy"):
        words = [sys.executable, "-W", "error", "-m", f"headwise.courses.{name}", "names.txt", "2"]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=300)
        told.append(done.stdout.splitlines())
    assert told[0] == told[1] and told[0][:2] == ["step    1  loss 3.2955", "step    2  loss 3.2969"]
    assert len(told[0]) == 22


@pytest.mark.slow
def test_the_published_run() -> None:
    if not NAMES_FILE.exists():
        pytest.skip(f"{NAMES_FILE} is absent (makemore's names.txt, 32,033 names)")
    names = NAMES_FILE.read_text(encoding="utf-8").splitlines()
    losses, samples = microgpt_numpy.replay(names)
    assert losses[:5] == pytest.approx(PUBLISHED_FIRST, rel=CLOSE)
    assert [round(loss, 4) for loss in losses[-3:]] == PUBLISHED_LAST
    assert samples == PUBLISHED_SAMPLES.split()
    first, _ = microgpt.replay(names, 5, n_samples=0)
    assert first == pytest.approx(PUBLISHED_FIRST, rel=CLOSE)
