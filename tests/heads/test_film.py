"""The film of a training: its frames are what a survey of the model at those steps gives, and nothing is lost."""

import itertools
import json
import math
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import every, refuses
from small_models import quiet

from headwise import HeadwiseError
from headwise.corpus.training import Corpus
from headwise.files import text_path
from headwise.gpt.gpt import GPT, GPTConfig
from headwise.gpt.presets import Recipe
from headwise.gpt.run import FILM, Settings, run_training
from headwise.gpt.train import METRICS, Progress, Stopped, train
from headwise.heads.film import FRAMES, Film, fitting, frame_steps, packed, read_film, unpacked
from headwise.heads.survey import survey
from headwise.heads.table import ROLES
from headwise.heads.watch import head_maps

VERBS = Settings(seed=3, steps=26, shape={"n_layers": 2, "d_model": 20, "n_heads": 5, "context": 17})
STREAM = Settings(
    preset="nanogpt", text=str(text_path("tale")), steps=41, shape={"n_layers": 1, "d_model": 12, "n_heads": 3}
)


@dataclass
class Filmed:
    """A training that was filmed: its folder, the film, the models of its frames and the trained one."""

    folder: Path
    film: Film
    models: dict[int, GPT]
    model: GPT


def filmed(folder: Path, settings: Settings, report: Any = quiet) -> Filmed:
    corpus, config, recipe = settings.resolve()
    folder.mkdir(exist_ok=True)
    film, models = Film(folder, corpus, config, recipe), dict[int, GPT]()

    def look(model: GPT, step: int) -> None:
        film(model, step)
        if step in film.due:
            models[step] = GPT(config)
            models[step].load_state_dict(model.state_dict())

    model, _ = train(folder, config, recipe, corpus.data, settings.seed, report, look=look)
    return Filmed(folder, film, models, model)


@pytest.fixture(scope="module")
def verbs(tmp_path_factory: pytest.TempPathFactory) -> Filmed:
    return filmed(tmp_path_factory.mktemp("verbs"), VERBS)


@pytest.mark.slow
@every("settings", [VERBS, STREAM], ids=["lines", "stream"])
def test_a_frame_is_a_survey_of_the_model_at_its_step(tmp_path_factory: Any, verbs: Filmed, settings: Settings) -> None:
    """Scores are those of a survey of the same documents; maps those of the model, to half a level of 255."""
    run = verbs if settings is VERBS else filmed(tmp_path_factory.mktemp("run"), settings)
    film, models = run.film, run.models
    header, frames, _ = read_film(run.folder) or ({}, [], [])
    expected = [step for step in (0, 1, 2, 4, 8, 16, 32) if step < settings.steps] + [settings.steps]
    assert [frame["step"] for frame in frames] == sorted(models) == expected
    first = frames[0]["scores"]
    for frame in frames[::3]:
        model = models[frame["step"]].eval()
        found = survey(model, film.text, controls=False, ablate="none")
        assert list(found) == header["heads"]
        probes = {"duplicate", "induction"}  # of other random tokens: a survey takes more of them
        for n, profile in enumerate(found.profiles):
            relations = set() if settings is STREAM else {"person", "translation", "tense", "earlier verb"}
            assert set(profile.relations) == relations
            known = {role.score for role in ROLES if role.score in profile.scores} - probes - {"next"} | relations
            assert known == set(frame["scores"]) - probes
            for name in known:
                assert frame["scores"][name][n] == pytest.approx(profile.means[name], abs=6e-5), (profile.name, name)
                if name in profile.uniform:
                    assert header["even"][name] == pytest.approx(profile.uniform[name], abs=6e-5), name
            for name, score, threshold in header["roles"]:
                if score in frame["scores"]:
                    value = frame["scores"][score][n]
                    high = value >= threshold and value > header["even"].get(score, -math.inf)
                    high = high and (score not in relations or value > profile.relations[score].elsewhere)
                    assert (name in frame["roles"][n]) == (high and frame["step"] > 0 and value > max(first[score]))
        for place, line in enumerate(film.lines):
            exact = head_maps(model, line, header["lines"][place], "model")
            for item in exact.maps:
                drawn = unpacked(header, frame)[item.name][place]
                assert abs(drawn - item.weights).max() <= 0.5 / 255 + 1e-6


def test_repeated_tokens_are_scored_as_a_survey_scores_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwise.heads.film.PROBES", 4)  # as many as a survey draws
    corpus, config, recipe = VERBS.resolve()
    film = Film(tmp_path, corpus, config, recipe)
    torch.manual_seed(1)
    model = GPT(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)  # heads that look somewhere
    film(model, 0)
    assert film.log is not None
    found = survey(model, film.text, controls=False, ablate="none")
    for name in ("duplicate", "induction"):
        scores = [profile.means[name] for profile in found.profiles]
        assert film.log.rows[0]["scores"][name] == pytest.approx(scores, abs=6e-5)
        assert film.header["even"][name] == pytest.approx(found.profiles[0].uniform[name], abs=6e-5)


def test_heads_are_as_alike_as_their_maps(tmp_path: Path) -> None:
    corpus, config, recipe = VERBS.resolve()
    film = Film(tmp_path, corpus, config, recipe)
    torch.manual_seed(0)
    film(GPT(config), 0)
    assert film.log is not None
    frame = film.log.rows[0]
    maps = unpacked(film.header, frame)
    for layer, alike in enumerate(frame["alike"]):
        heads = [maps[f"L{layer}.H{h}"] for h in range(5)]
        pairs = [
            sum(min(p, q) for p, q in zip(a[line][row], b[line][row], strict=True))
            for i, a in enumerate(heads)
            for b in heads[:i]
            for line in range(len(film.lines))
            for row in range(1, len(film.lines[line]))
        ]
        rows = [1 / len(film.lines) / (len(line) - 1) for line in film.lines for _ in line[1:]] * 10
        expected = sum(pair * weight for pair, weight in zip(pairs, rows, strict=True)) / 10
        assert alike == pytest.approx(expected, abs=0.01)
    one = GPTConfig(**{**vars(config), "n_heads": 1, "head_dim": 20})
    lonely = Film(tmp_path / "one", corpus, one, recipe)
    (tmp_path / "one").mkdir()
    lonely(GPT(one), 0)
    assert lonely.log is not None and lonely.log.rows[0]["alike"] == [None, None]


@pytest.mark.slow
def test_interrupted_and_resumed_has_the_same_bytes(tmp_path: Path, verbs: Filmed) -> None:
    """Also where a kill has cut a frame short, and where frames are there that the saved state does not know yet."""
    whole = (verbs.folder / FILM).read_bytes()
    folder, lines = tmp_path / "run", whole.splitlines(keepends=True)

    def press(progress: Progress) -> None:
        if progress.step in (8, 16):
            os.kill(os.getpid(), signal.SIGINT)

    for cut in (0, 71):
        with pytest.raises(Stopped):
            filmed(folder, VERBS, report=press)
        taken = len((folder / FILM).read_bytes().splitlines())
        assert (folder / FILM).read_bytes() == b"".join(lines[:taken])
        with (folder / FILM).open("ab") as file:
            file.write(b"".join(lines[taken:])[: -cut or None])
    filmed(folder, VERBS)
    assert (folder / FILM).read_bytes() == whole


def test_a_film_of_other_lines_is_begun_anew(tmp_path: Path) -> None:
    corpus, config, recipe = VERBS.resolve()
    (tmp_path / FILM).write_text('{"heads": []}\n{"step": 0, "scores": {}}\n')
    film = Film(tmp_path, corpus, config, recipe)
    film(GPT(config), 0)
    header, *frames = map(json.loads, (tmp_path / FILM).read_text().splitlines())
    assert header["heads"] and len(frames) == 1
    damaged = [json.dumps(header), json.dumps(frames[0] | {"scores": {"previous": 1.5}})]
    (tmp_path / FILM).write_text("\n".join(damaged) + "\n")
    with pytest.raises(HeadwiseError, match=r"is damaged .previous is 1.5.*remove it to resume"):
        Film(tmp_path, corpus, config, recipe)(GPT(config), 1)


@every("steps", [1, 2, 3, 31, 100, 977, 1000, 5003, 10**6])
def test_frames_come_early_and_then_evenly(steps: int) -> None:
    due = sorted(frame_steps(steps, FRAMES, 25))
    assert len(due) <= FRAMES and due[0] == 0 and due[-1] == steps
    assert set(due) >= {step for step in (1, 2, 4, 8, 16) if step <= steps}
    gaps = [b - a for a, b in itertools.pairwise(due)]
    even = max(gaps)
    later = [gap for gap, step in zip(gaps, due, strict=False) if step >= even][:-1]
    assert set(later) <= {even}
    assert (
        (steps < 900 or len(due) > 40)
        and len(frame_steps(steps, 5, 32)) <= 5
        and frame_steps(steps, 0, 25) == {0, steps}
    )  # 0: of thousands of heads


@every("n_heads, layers, steps", [(1, 1, 10**4), (4, 4, 2000), (12, 12, 5000)])
def test_a_film_stays_under_a_megabyte(tmp_path_factory: Any, n_heads: int, layers: int, steps: int) -> None:
    folder = tmp_path_factory.mktemp("run")
    corpus, _, _ = VERBS.resolve()
    config = GPTConfig(vocab_size=len(corpus.tokens), context=64, n_layers=layers, n_heads=n_heads, d_model=2 * n_heads)
    film = Film(folder, corpus, config, Recipe(steps=steps, batch=1009, lr=1e-3))
    film(GPT(config), 0)
    header, frame = (folder / FILM).read_bytes().splitlines()
    largest = len(frame) + layers * n_heads * len('"copying", ')  # no head has a role yet
    assert film.lines and len(header) + len(film.due) * largest < 1e6
    assert len(film.due) > FRAMES - 9 or n_heads * layers > 100


@pytest.mark.slow
def test_a_film_is_small_and_exact(tmp_path: Path, verbs: Filmed) -> None:
    maps = [torch.rand(n, n).softmax(-1).tril().numpy() for n in (2, 7)]
    header = {"heads": ["L0.H0"], "lines": [["a"] * 2, ["b"] * 7]}
    for was, now in zip(maps, unpacked(header, {"maps": packed(maps)})["L0.H0"], strict=True):
        assert abs(was - now).max() <= 0.5 / 255 + 1e-6
    assert [len(line) for line in fitting([[0] * 50, [1] * 9, [2] * 9, [3] * 9], 10**4)] == [32, 9, 9]
    assert [len(line) for line in fitting([[0] * 50, [1] * 9], 45)] == [9]
    assert [len(line) for line in fitting([[0] * 9, [1] * 9], 45 + 44)] == [9]
    assert [[len(line) for line in fitting([[0] * 9, [1] * 9], cells)] for cells in (-9, 1)] == [[2], [2]]
    corpus, config, recipe = VERBS.resolve()
    other, _ = train(tmp_path, config, recipe, corpus.data, VERBS.seed, quiet)
    assert all(torch.equal(a, b) for a, b in zip(verbs.model.parameters(), other.parameters(), strict=True))
    rows: list[dict[str, Any]] = []

    def make(folder: Path, corpus: Corpus, config: GPTConfig, recipe: Recipe) -> Film:
        return Film(folder, corpus, config, recipe, rows.append)

    run_training(tmp_path / "run", VERBS, quiet, resume=False, n_samples=0, film=make)
    lines = (tmp_path / "run" / FILM).read_text().splitlines()
    assert [json.loads(line) for line in lines] == rows


def test_a_damaged_film_is_said(tmp_path: Path) -> None:
    assert read_film(tmp_path) is None
    header = {"heads": ["L0.H0"], "lines": [["a", "b"]], "roles": [], "even": {}, "steps": 1, "documents": 1}
    frame = {"step": 0, "alike": [None], "roles": [[]], "maps": "AAAA", "scores": {}}
    (tmp_path / FILM).write_text(f"{json.dumps(header)}\n{json.dumps(frame)}\n")
    (tmp_path / METRICS).write_text('{"step": 1, "loss": 2}\n')
    assert read_film(tmp_path) == (header, [frame], [{"step": 1, "loss": 2}])
    for name, text in (
        (FILM, "{"),
        (FILM, ""),
        (FILM, "[" * 100_000),
        (FILM, json.dumps(frame)),
        (FILM, json.dumps(header) + "\n" + json.dumps(frame | {"maps": "AA=="})),
        (FILM, json.dumps(header) + "\n" + json.dumps(frame | {"step": "x"})),
        (FILM, json.dumps(header) + "\n" + json.dumps(frame | {"scores": [5]})),
        (METRICS, '{"step": 1, "loss": 1e999}'),
        (METRICS, "5"),
    ):
        whole = (tmp_path / name).read_bytes()
        (tmp_path / name).write_text(text)
        refuses(lambda: read_film(tmp_path), rf"{name} cannot be read .*; remove film.jsonl: the run is")
        (tmp_path / name).write_bytes(whole)
