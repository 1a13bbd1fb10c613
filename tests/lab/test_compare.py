"""Experiments: arms that are what they say, units that are done once, verdicts that follow from the figures."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import refuses, refuses_table
from comparisons import ACCURACY, LOSS

import headwise as hw
from headwise.corpus.training import IGNORED, Corpus
from headwise.errors import HeadwiseError
from headwise.gpt.gpt import GPT, GPTConfig
from headwise.gpt.train import one_thread
from headwise.intervals import Interval, interval_of
from headwise.lab import compare as run
from headwise.lab.claims import in_turn, median_ratio
from headwise.lab.compare import EXPERIMENTS, find_experiment, units_of
from headwise.lab.experiments import (
    NAMES,
    NUMBERS,
    SHAPE,
    TWO_LOOKUPS,
    VERBS_OR_TEXT,
    Arm,
    Experiment,
    Scored,
    Unit,
    by_model_width,
    count_parameters,
    lines,
    lookups,
    places,
    role_scores,
    run_unit,
    unscaled,
    with_attention,
    without_output,
)
from headwise.lab.results import DEPENDS, FAILS, HOLDS, Comparison, effect, of_all, sentence
from headwise.models.hook import observe
from headwise.models.sites import attention_layers
from headwise.records import Call

TINY = {"context": 64, "n_layers": 1, "n_heads": 2, "d_model": 12, "d_ff": 5, "tied": True}
CONFIG = GPTConfig(vocab_size=29, **{**SHAPE, "n_layers": 1, "d_model": 24, "n_heads": 3, "d_ff": 7})


def broken(config: GPTConfig) -> GPT:
    """A model whose loss is no number from the start."""
    model = GPT(config)
    torch.nn.init.constant_(model.final_norm.weight, math.nan)
    return model


def tiny(*arms: Arm, **changes: Any) -> Experiment:
    arms = arms or (Arm(name="two", shape=TINY), Arm(name="three", shape={**TINY, "n_heads": 3}))
    return Experiment(**{"name": "tiny", "question": "Why?", "task": VERBS_OR_TEXT, "arms": arms} | changes)


def compare(experiment: Experiment, *arguments: Any, **options: Any) -> Comparison:
    return run.compare([experiment], *arguments, **options)[0]


def no_times(comparison: Comparison) -> Comparison:
    return replace(comparison, cpu_seconds=0.0)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_all_arms_have_as_many_parameters_as_whole_numbers_allow(name: str) -> None:
    experiment = EXPERIMENTS[name]
    configs = [experiment.config(arm, 137) for arm in experiment.arms]
    counts = [count_parameters(config, arm.build) for config, arm in zip(configs, experiment.arms, strict=True)]
    for arm, config, count in zip(experiment.arms, configs, counts, strict=True):
        if arm.name == "1 head, more neurons":
            assert count > counts[0]
            continue
        one_wider = count_parameters(replace(config, d_ff=config.feed_forward_width + 1), arm.build) - count
        assert abs(count - counts[0]) <= (one_wider / 2 if arm.widened else 0), arm.name


@pytest.mark.slow
def test_arms_and_answers() -> None:
    spec = EXPERIMENTS["heads"].config(EXPERIMENTS["heads"].arms[2], 137).attention
    for name in ("heads", "sharing", "output-projection", "scale"):
        for arm in EXPERIMENTS[name].arms:
            own = EXPERIMENTS[name].config(arm, 137).attention
            assert not own.qk_norm and own.out_proj
            assert own.n_heads * own.head_dim == spec.n_heads * spec.head_dim
    heads = [EXPERIMENTS["heads"].config(arm, 137).attention.n_heads for arm in EXPERIMENTS["heads"].arms]
    assert heads == [1, 2, 4, 8, 16]
    shared = [EXPERIMENTS["sharing"].config(arm, 137).attention.n_kv_heads for arm in EXPERIMENTS["sharing"].arms]
    assert shared == [8, 2, 1]
    torch.manual_seed(3)
    plain = GPT(CONFIG)
    torch.manual_seed(3)
    model = without_output(CONFIG)
    (layer,), (other,) = attention_layers(model), attention_layers(plain)
    assert layer.o_proj is None and torch.equal(layer.q_proj.weight, other.q_proj.weight)
    other.o_proj.weight.data = torch.eye(24)
    x = torch.randn(2, 5, 24)
    torch.testing.assert_close(layer(x), other(x))
    assert plain.n_parameters - model.n_parameters == 24 * 24
    drawn = list(lines(50, seed=5))
    assert drawn == list(lines(50, seed=5)) and drawn != list(lines(50, seed=6))
    for line in drawn:
        *facts, question, answer = line.split()
        assert sorted(fact[0] for fact in facts) == list(NAMES)
        numbers = {fact[0]: fact[1:] for fact in facts}
        assert question[0] != question[1]
        assert answer == numbers[question[0]][0] + numbers[question[1]][1]
    corpus = lookups(None, 0)
    batches = [corpus.data.batch(torch.Generator().manual_seed(1), 7), next(corpus.data.held_out_batches(11))]
    for inputs, targets in batches:
        assert ((targets != IGNORED).sum(1) == 1).all()
        rows, at = (targets != IGNORED).nonzero(as_tuple=True)
        for row, asked, answer in zip(rows, inputs[rows, at], targets[rows, at], strict=True):
            words = corpus.tokens.shown([*inputs[row].tolist(), int(answer)])
            numbers = {word[0]: word[1:] for word in words if len(word) == 3 and word[0] in NAMES and "?" not in word}
            one, other, _ = corpus.tokens.shown([int(asked)])[0]
            assert words[-1] == numbers[one][0] + numbers[other][1]
    arm = replace(TWO_LOOKUPS.arms[0], trained=False)
    scores = run_unit(Unit(TWO_LOOKUPS, arm, 0)).scores
    assert scores["accuracy"] < 3 / NUMBERS**2
    assert str(round(1 / NUMBERS**2, 3)) in TWO_LOOKUPS.notes[0]


@pytest.mark.parametrize(
    ("build", "scale"),
    [(by_model_width, 24**-0.5), (unscaled, 1.0), (lambda c: with_attention(c, scale=8**-0.5), None)],
)
def test_another_scale_is_that_of_the_scores_alone(build: Callable[[GPTConfig], GPT], scale: float | None) -> None:
    torch.manual_seed(3)
    plain = GPT(CONFIG).eval()
    torch.manual_seed(3)
    model = build(CONFIG).eval()
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))
    ids, calls = torch.arange(17)[None] % 29, []
    with observe(attention_layers(model)[0], calls.append):
        logits = model(ids)
    call: Call = calls[0]
    torch.testing.assert_close(call.out, hw.attend(call.q, call.k, call.v, mask=hw.Causal(), scale=scale))
    assert torch.allclose(logits, plain(ids), rtol=0, atol=1e-6) == (scale is None)


def test_where_a_role_looks() -> None:
    bilingual = places("he will work = él trabajará", ["∅", "he", "will", "work", "=", "él", "trabajará"])
    assert bilingual["person"] == [(4, [1])] and bilingual["translation"] == [(5, [3])]
    conjugation = places("I work , you work ,", ["∅", "I", "work", ",", "you", "work", ","])
    assert conjugation["person"] == conjugation["translation"] == []
    assert conjugation["same token"] == [(5, [2]), (6, [3])]
    assert conjugation["previous token"] == [(i, [i - 1]) for i in range(1, 7)]


def test_the_scores_of_roles_come_from_the_maps() -> None:
    corpus: Corpus = VERBS_OR_TEXT.corpus(None, 0)
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=len(corpus.tokens), **TINY)).eval()
    for parameter in model.blocks[0].attention.q_proj.parameters():
        torch.nn.init.zeros_(parameter)  # every query likes all keys alike
    scores = role_scores(model, corpus)
    for role in ("previous token", "same token", "person", "translation"):
        assert scores[role] == pytest.approx(scores[f"even {role}"], abs=1e-6)
        assert scores[f"silenced {role}"] != 0


def test_sentences_and_claims() -> None:
    better, worse, nothing = Interval(-0.2, -0.3, -0.1, 5), Interval(0.2, 0.1, 0.3, 5), Interval(0.2, -0.1, 0.5, 5)
    assert [effect(one, LOSS) for one in (better, worse, nothing)] == [1, -1, 0]
    assert [effect(one, ACCURACY) for one in (better, worse, nothing)] == [-1, 1, 0]
    assert sentence("a", "b", better, LOSS) == (
        "a against b: held-out loss lower by 0.200 nats (95 % interval 0.100 to 0.300, 5 seeds)"
    )
    assert sentence("a", "b", worse, ACCURACY) == (
        "a against b: share of exact answers higher by 0.200 (95 % interval 0.100 to 0.300, 5 seeds)"
    )
    assert sentence("a", "b", nothing, LOSS) == (
        "a against b: no detectable difference in held-out loss (+0.200 nats, half width 0.300, 5 seeds)"
    )
    assert [of_all([True, True]), of_all([True, False]), of_all([False])] == [HOLDS, DEPENDS, FAILS]
    assert find_experiment("scale") is EXPERIMENTS["scale"]
    refuses(lambda: find_experiment("two-lookup"), r"no experiment 'two-lookup'; did you mean two-lookups\?")
    refuses(lambda: find_experiment("xyz"), r"there are heads, .*claims")
    refuses(lambda: run.compare([TWO_LOOKUPS], Path("nowhere"), text=Path("text")), "alone; leave text= out")


def test_arms_are_compared_seed_by_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = {("two", 0): 1.0, ("two", 1): 3.0, ("three", 0): 1.5, ("three", 1): 3.75}

    def scored(unit: Unit) -> Scored:
        return Scored(31, {"loss": figures[unit.arm.name, unit.seed]}, None, 2.0)

    monkeypatch.setattr(run, "run_unit", scored)
    found = compare(tiny(), tmp_path, n_seeds=2)
    first, other = found.arms
    assert first.scores["loss"].difference is None and first.scores["loss"].values == (1.0, 3.0)
    expected = interval_of([0.5, 0.75])
    assert other.scores["loss"].difference == expected
    assert other.scores["loss"].mean == interval_of([1.5, 3.75])
    assert found.verdicts == (sentence("three", "two", expected, LOSS),)
    assert found.cpu_seconds == 8.0 and found.steps == VERBS_OR_TEXT.recipe.steps
    assert found.notes == ()
    (note,) = compare(tiny(), tmp_path, n_seeds=2, steps=3).notes
    assert note.startswith(f"Trained for 3 of the recipe's {VERBS_OR_TEXT.recipe.steps:,} steps")


def test_a_run_that_was_stopped_goes_on_and_ends_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = compare(tiny(), tmp_path / "whole", n_seeds=2, steps=3)
    done: list[str] = []

    def stopping(unit: Unit) -> Scored:
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(unit.label)
        return run_unit(unit)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(run, "run_unit", stopping)
        compare(tiny(), tmp_path / "parts", n_seeds=2, steps=3)
    assert len(list((tmp_path / "parts").iterdir())) == 3
    messages: list[tuple[str, int, int]] = []
    resumed = compare(tiny(), tmp_path / "parts", n_seeds=2, steps=3, report=lambda *message: messages.append(message))
    assert no_times(resumed) == no_times(whole)
    assert [message[1:] for message in messages] == [(3, 4), (4, 4)] and "finished before" in messages[0][0]


def test_a_unit_of_other_settings_is_another_unit(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("some words to learn\n" * 99, encoding="utf-8")
    base = Unit(tiny().as_asked(3, None), tiny().arms[0], 0)
    others = [
        replace(base, seed=1),
        replace(base, experiment=tiny().as_asked(4, None)),
        replace(base, experiment=tiny().as_asked(3, text)),
        replace(base, arm=tiny().arms[1]),
        replace(base, arm=Arm(name="two", shape=TINY, build=unscaled)),
        replace(base, arm=Arm(name="two", shape=TINY, trained=False)),
        replace(base, experiment=tiny(measure=role_scores).as_asked(3, None)),
        replace(base, experiment=tiny(task=replace(VERBS_OR_TEXT, corpus=lookups)).as_asked(3, None)),
    ]
    keys = [json.dumps(unit.key, sort_keys=True) for unit in (base, *others)]
    assert len(set(keys)) == len(keys)
    assert replace(base, experiment=tiny(name="other").as_asked(3, None)).key == base.key
    assert not any("headwise." in key for key in keys)  # modules move, and what is done stays done


def test_experiments_share_what_they_have_in_common() -> None:
    def keys(name: str) -> dict[str, str]:
        return {unit.arm.name: json.dumps(unit.key) for unit in units_of(EXPERIMENTS[name], [0])}

    heads = keys("heads")
    assert heads["8 heads"] == keys("sharing")["MHA"]
    assert heads["4 heads"] == keys("scale")["1/sqrt(head_dim)"] == keys("output-projection")["with W_O"]


@pytest.mark.slow
def test_results_repeat(tmp_path: Path) -> None:
    one = replace(TWO_LOOKUPS, arms=TWO_LOOKUPS.arms[:1])
    alone, beside = (compare(one, tmp_path / str(n), n_seeds=2, steps=2, workers=n) for n in (1, 2))
    assert no_times(alone) == no_times(beside)
    found = []
    for state, seed in ((1, 0), (2, 0), (1, 1)):
        torch.manual_seed(state)
        found.append(run_unit(Unit(tiny().as_asked(2, None), tiny().arms[0], seed)).scores["loss"])
    assert found[0] == found[1] != found[2]
    torch.manual_seed(7)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    compare(tiny(), tmp_path, n_seeds=2, steps=1)
    assert torch.equal(torch.get_rng_state(), state) and torch.get_num_threads() == threads
    arms = (Arm(name="two", shape=TINY), Arm(name="bad", shape=TINY, build=broken))
    found = compare(tiny(*arms), tmp_path, n_seeds=2, steps=1)
    assert found.arms[0].scores and not found.arms[1].scores
    assert found.arms[1].failure is not None and "step 1" in found.arms[1].failure
    assert found.verdicts[0].startswith("bad: training diverged with seed 0: loss is nan at step 1")
    turned = compare(tiny(*arms[::-1]), tmp_path, n_seeds=2, steps=1)
    assert turned.arms[1].scores["loss"].difference is None and len(turned.verdicts) == 1


def test_a_text_takes_the_place_of_the_built_in_data(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("some words to learn, and some to be tested on\n" * 60, encoding="utf-8")
    found = compare(tiny(), tmp_path / "out", n_seeds=2, steps=2, text=text)
    assert found.data == "text.txt" and found.arms[0].parameters != count_parameters(GPTConfig(vocab_size=300, **TINY))
    assert found.arms[0].scores["loss"].mean.mean < 4  # of about 20 characters; the verbs are over 300 words


def test_what_cannot_be_run(tmp_path: Path) -> None:
    refuses_table("compare", globals() | {"out": tmp_path / "out"})
    assert not (tmp_path / "out").exists()


def test_a_damaged_unit_is_named(tmp_path: Path) -> None:
    compare(tiny(), tmp_path, n_seeds=2, steps=1)
    path = next(tmp_path.iterdir())
    for damage in (
        "",
        "{}",
        path.read_text().replace('"scored"', '"scorn"'),
        path.read_text().replace('"cpu_seconds": ', '"cpu_seconds": 1'),
        path.read_text().replace("tied", "tiled"),
    ):
        path.write_text(damage)
        with pytest.raises(HeadwiseError, match=rf"{path.name} is damaged .* remove it"):
            compare(tiny(), tmp_path, n_seeds=2, steps=1)
    (tmp_path / "file").write_text("")
    refuses(lambda: compare(tiny(), tmp_path / "file", n_seeds=2, steps=1), "is a file")


def test_what_dead_processes_left_is_removed(tmp_path: Path) -> None:
    """Half-written units of this process, and files of other names, stay."""
    unit = f".unit-{'0' * 16}.json"
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    kept = [f"{unit}.{os.getpid()}.tmp", f".notes.txt.{dead.pid}.tmp", f"{unit}.tmp"]
    for name in (*kept, f"{unit}.{dead.pid}.tmp"):
        (tmp_path / name).write_text("{")
    run.Store(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)


def test_every_way_is_timed_in_every_round_after_a_start() -> None:
    order: list[str] = []
    times = in_turn({name: lambda name=name: order.append(name) for name in "ab"}, rounds=3)
    assert "".join(order) == "ab" + "ab" + "ba" + "ab"
    assert all(len(found) == 3 for found in times.values())
    assert median_ratio({"a": [2.0, 3.0, 10.0], "b": [1.0, 1.0, 1.0]}, "a", "b") == 3.0


def test_times_are_taken_on_one_thread() -> None:
    seen: list[int] = []
    torch.set_num_threads(2)
    in_turn({"a": lambda: seen.append(torch.get_num_threads())}, rounds=1)
    assert seen == [1, 1] and torch.get_num_threads() == 2

    block = one_thread()
    with ThreadPoolExecutor(1) as pool:
        with one_thread():  # a thread that starts now finds one, and is not left with it
            pool.submit(block.__enter__).result()
            with one_thread():
                pass
            assert torch.get_num_threads() == 1
        assert pool.submit(torch.get_num_threads).result() == 1  # its own block goes on
        pool.submit(block.__exit__, None, None, None).result()
        assert pool.submit(torch.get_num_threads).result() == torch.get_num_threads() == 2
