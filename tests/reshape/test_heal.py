"""Healing: it brings the child nearer, keeps zeroed heads zero, and loses nothing when it is stopped."""

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import refuses_table
from reshape_models import build, plain_mean
from torch import Tensor, nn

from headwise import HeadwiseError
from headwise.models.ask import answers
from headwise.reshape import heal
from headwise.reshape.heal import HealPoint, HealRecipe, compared, divergence, drawn, heal_child
from headwise.reshape.prune import prune_heads

RECIPE = HealRecipe(steps=12, batch=2, lr=0.05, hidden=0.0, evaluations=4)


@contextmanager
def stopped_at(step: int) -> Iterator[None]:
    """Ctrl-C in this step of a healing."""
    asked = iter(range(1, 1000))

    @contextmanager
    def interrupted() -> Iterator[Callable[[], bool]]:
        yield lambda: next(asked) == step

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headwise.reshape.heal.interrupts", interrupted)
        yield


def documents(n: int, seed: int, lengths: tuple[int, ...] = (13, 11)) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(31, (lengths[i % len(lengths)],), generator=generator) for i in range(n)]


TRAIN, HELD_OUT = documents(37, 0), [torch.stack(documents(5, 1, (13,)))]


def pair(name: str = "rope", dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module]:
    """A parent and its child with half of the key/value heads, or without one head where they cannot be shared."""
    parent = build(name, dtype=dtype)
    if name in ("gpt2", "bert"):
        return parent, prune_heads(parent, ((1,), (2,))).model
    return parent, plain_mean(parent, 3)


@pytest.mark.parametrize("name", ["rope", "qk-norm", "llama", "gpt2", "bert"])
@pytest.mark.parametrize("hidden", [0.0, 3.0])
def test_healing_brings_the_child_nearer(name: str, hidden: float) -> None:
    parent, child = pair(name)
    kept = {key: tensor.clone() for key, tensor in parent.state_dict().items()}
    seen = [torch.stack(TRAIN[::2])]  # of random tokens there is nothing to learn about others
    healed = heal_child(parent, child, TRAIN, seen, replace(RECIPE, hidden=hidden))
    first, last = healed.curve[0].distance, compared(parent, child, seen)[1]
    assert last < 0.9 * first
    assert last == pytest.approx(min(point.distance for point in healed.curve), rel=1e-5)
    assert all(torch.equal(kept[key], tensor) for key, tensor in parent.state_dict().items())


def test_curves_and_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    ends, rates = [], list[float]()
    for hidden in (0.0, 3.0):
        parent, child = pair()
        heal_child(parent, child, TRAIN, HELD_OUT, replace(RECIPE, hidden=hidden))
        ends.append(child)
    assert any(not torch.equal(a, b) for a, b in zip(ends[0].parameters(), ends[1].parameters(), strict=True))

    def noted(*arguments: Any, whole: Any = heal.take_step) -> float:
        rates.append(arguments[4])
        return float(whole(*arguments))

    monkeypatch.setattr(heal, "take_step", noted)
    heal_child(*pair(), TRAIN, HELD_OUT, replace(RECIPE, steps=20, warmup=0.2, lr=1e-4))
    wanted = [0.25, 1, 1, 0.5, 0.5 - 0.5 * math.cos(math.pi / 16)]
    assert [rates[step] for step in (0, 3, 4, 12, 19)] == pytest.approx(wanted)
    heard: list[HealPoint] = []
    healed = heal_child(*pair(), TRAIN, HELD_OUT, RECIPE, heard.append)
    assert [point.step for point in healed.curve] == [0, 3, 6, 9, 12]
    assert tuple(heard) == healed.curve
    assert healed.curve[0].tokens == 0
    assert 12 * 2 * 11 <= healed.curve[-1].tokens <= 12 * 2 * 13
    assert all(point.held_out_loss is not None for point in healed.curve)
    healed = heal_child(*pair("bert"), TRAIN, HELD_OUT, replace(RECIPE, steps=2, evaluations=1))
    assert all(point.held_out_loss is None and point.distance > 0 for point in healed.curve)


@pytest.mark.parametrize("name", ["rope", "llama", "gpt2"])
def test_attention_alone_learns(name: str) -> None:
    parent, child = pair(name)
    before = {key: tensor.clone() for key, tensor in child.state_dict().items()}
    heal_child(parent, child, TRAIN, HELD_OUT, RECIPE)
    after = child.state_dict()
    changed = {key for key, tensor in before.items() if not torch.equal(tensor, after[key])}
    assert changed and all("attention" in key or "attn" in key for key in changed)
    assert len(changed) >= 2 * (2 if name == "gpt2" else 4)  # matrices of two layers, at least


def test_zeroed_heads_stay_zero() -> None:
    parent = build("gpt2", dtype=torch.float32)
    for silent, is_kept in ((((1,), (0, 2)), True), ((), False)):
        child = prune_heads(parent, ((1,), (0, 2))).model
        heal_child(parent, child, TRAIN, HELD_OUT, RECIPE, silent=silent)
        again = prune_heads(child, ((1,), (0, 2))).model
        pairs = zip(child.parameters(), again.parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs) == is_kept


def test_it_stops_early_and_hands_out_the_best() -> None:
    parent, child = pair()
    recipe = replace(RECIPE, steps=40, lr=3.0, evaluations=20, patience=3, clip=100.0)
    healed = heal_child(parent, child, TRAIN, HELD_OUT, recipe)
    assert healed.curve[-1].step == healed.best_step + 3 * 2 < 40
    best = min(point.distance for point in healed.curve)
    assert compared(parent, child, HELD_OUT)[1] == pytest.approx(best, rel=1e-5)


def test_ctrl_c_ends_a_healing_with_its_best_weights() -> None:
    """At a rate that destroys the child those before the first step are the best."""
    for rate, best in ((30.0, 0), (RECIPE.lr, None)):
        parent, child = pair()
        with stopped_at(7):
            healed = heal_child(parent, child, TRAIN, HELD_OUT, replace(RECIPE, lr=rate, clip=1e9))
        assert healed.stopped and healed.curve[-1].step == 7 and best in (None, healed.best_step)
        least = min(point.distance for point in healed.curve)
        assert compared(parent, child, HELD_OUT)[1] == pytest.approx(least, rel=1e-5)


def test_each_document_is_read_once_before_any_comes_again() -> None:
    # 19 and 18 documents of two lengths, two at a time: 19 batches
    batches = [[tuple(ids.tolist()) for ids in batch] for batch in itertools.islice(drawn(TRAIN, RECIPE), 38)]
    first, second = (sorted(ids for batch in some for ids in batch) for some in (batches[:19], batches[19:]))
    assert first == second == sorted(tuple(ids.tolist()) for ids in TRAIN)
    assert batches[:19] != batches[19:]


def test_a_loss_that_is_no_number_is_said() -> None:
    parent, child = pair()
    with torch.no_grad():
        next(child.parameters())[0] = math.inf
    with pytest.raises(HeadwiseError, match="loss is nan at step 1"):
        heal_child(parent, child, TRAIN, HELD_OUT, RECIPE)
    parent, child = pair()  # a last step that is too large leaves what stood before it
    curve = heal_child(parent, child, TRAIN, HELD_OUT, replace(RECIPE, steps=1, lr=1e38)).curve
    assert math.isnan(curve[1].distance)
    assert compared(parent, child, HELD_OUT)[1] == pytest.approx(curve[0].distance, rel=1e-5)


def test_recipes_that_make_no_sense_are_refused() -> None:
    refuses_table("recipes", globals())


def test_divergence_is_that_of_the_formula() -> None:
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.randn(2, 3, 5, generator=generator) for _ in range(2))
    a, b = torch.softmax(p, -1), torch.softmax(q, -1)
    wanted = (a * (a / b).log()).sum(-1).mean()
    torch.testing.assert_close(divergence(p, q), wanted)
    assert divergence(p, p) < 1e-6


def test_compared_counts_tokens_whatever_the_batches() -> None:
    parent, child = pair(dtype=torch.float64)
    ids = torch.stack(TRAIN[:10:2])
    whole, split = ((vars(loss), kl) for loss, kl in (compared(parent, child, x) for x in ([ids], [ids[:1], ids[1:]])))
    assert split[1] == pytest.approx(whole[1]) and split[0] == pytest.approx(whole[0])
    with torch.no_grad():
        logits = answers(parent, ids)[:, :-1]
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
    assert whole[0]["before"] == pytest.approx(wanted.item())
