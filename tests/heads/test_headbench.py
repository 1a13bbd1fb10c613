"""The models of the bench are what is said of them, and what ranks heads finds their circuits."""

import random

import pytest
from cases import rows

import headwise as hw
from benchmarks.headbench import bench
from benchmarks.headbench_checks import faults
from benchmarks.headbench_methods import marks, patched, tried
from benchmarks.headbench_models import FORMS, Known
from benchmarks.headbench_tasks import HEADLESS, TASKS, known
from headwise.errors import HeadwiseError

pytestmark = pytest.mark.slow

NAMES = [task.name for task in TASKS]


def model_of(task: str, form: str) -> Known:
    return known(NAMES.index(task), [form.name for form in FORMS].index(form))


@pytest.mark.parametrize("task, form", rows("known_models"))
def test_a_model_does_what_is_said_of_it_and_its_circuit_is_found(task: str, form: str) -> None:
    model = model_of(task, form)
    draw = random.Random(11)
    assert faults(model, [TASKS[NAMES.index(task)].pair(draw) for _ in range(7)]) == []
    assert tried(model, patched())[:3] == (1, 1, 1)


def test_what_the_bench_says() -> None:
    model = model_of("relay", "MLA, RoPE")
    idle = next(head for head in model.heads if head not in model.circuit)
    wrong = Known(**vars(model) | {"circuit": frozenset({idle})})
    assert len(faults(wrong, model.pairs)) >= 3
    for t in range(len(HEADLESS)):
        model = known(t, 2, tasks=HEADLESS)
        assert max(map(abs, model.effects(model.pairs, None).values())) < 0.1
    scores = {"a": 0.5, "b": -0.3, "c": 0.3, "d": 0.0, "e": 9.0}
    auroc, precision, *rest = marks(scores, right={"a", "b"}, beside={"e"})
    assert (auroc, precision) == (3.5 / 4, (1 + 2 / 3) / 2)  # b and c are tied, and e counts neither way
    assert rest == [0, 0, pytest.approx(0.3, rel=1e-5)]
    table = bench(lambda model, clean, corrupted, target: {}, ["relay"])  # a head without a score has 0
    assert table["relay"][:3] == (0.5, pytest.approx(0.19, abs=0.05), 0)


def test_heads_that_stand_in_for_each_other_and_are_needed_together_show_beside_random_halves() -> None:
    model = model_of("two lookups, each by either of two", "GQA, RoPE")
    alone = tried(model, patched()).smallest
    beside = min(abs(model.effects(model.pairs[:3], 8)[head]) for head in model.circuit)
    assert alone < 0.3 < 0.6 < beside
    clean, corrupted, target = model.texts()
    with pytest.raises(HeadwiseError, match="contexts=8 tries all heads"):
        hw.patch(model.model, clean, corrupted, target=target, contexts=8, heads=["L0.H1"])
