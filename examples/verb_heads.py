"""What the heads of the default model look at, measured: writes docs/heads.md and docs/heads.png.

    python examples/verb_heads.py              # trains three models, about a minute and a half
    python examples/verb_heads.py RUN RUN RUN  # takes runs of `headwise train` with the seeds 0, 1, 2

All numbers are those of `hw.survey`, and so of `headwise heads RUN` and of the report of the run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import headwise as hw
from headwise.corpus import verbs
from headwise.heads.watch import head_maps
from headwise.models.open import open_folder
from headwise.view.survey import head_sentence

DOCS = Path(__file__).resolve().parents[1] / "docs"
SEEDS = (0, 1, 2)
PICTURED = "he will write = él escribirá"


def picture(run: Path, path: Path) -> None:
    """The maps of all heads on one line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder = open_folder(run)
    assert folder.tokens is not None
    ids = folder.tokens.prompt(PICTURED)
    words = folder.tokens.shown(ids)
    maps = head_maps(folder.model, ids, words, "").maps
    n_layers = 1 + max(head.layer for head in maps)
    figure, axes = pyplot.subplots(n_layers, len(maps) // n_layers, figsize=(11, 6), layout="constrained")
    for axis, head in zip(axes.flat, maps, strict=True):
        axis.imshow(head.weights, cmap="Blues", vmin=0, vmax=1)
        axis.set_title(head.name, fontsize=10)
        axis.set_xticks(range(len(words)), words, rotation=90, fontsize=7)
        axis.set_yticks(range(len(words)), words if head.head == 0 else [""] * len(words), fontsize=7)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def heads_table(survey: hw.Survey) -> str:
    """A line a head: how it follows each relation, and what silencing it costs; then the controls."""
    rows = []
    for head in survey.profiles:
        scores = [(name, head.relations[name]) for name in verbs.RELATIONS]
        cells = [
            f"{'**' * (name in head.roles)}{score.mass.mean:.2f}{'**' * (name in head.roles)} ({score.elsewhere:.2f})"
            for name, score in scores
        ]
        assert head.ablation is not None
        rows.append([head.name, *cells, f"{head.ablation.mean:+.2f}"])
    first = survey.profiles[0]
    rows.append(["even look", *[f"{first.uniform[key]:.2f}" for key in verbs.RELATIONS], ""])
    rows.append(["best untrained", *[f"{(survey.untrained or {})[key]:.2f}" for key in verbs.RELATIONS], ""])
    return table(["head", *verbs.RELATIONS, "silenced"], rows)


def seeds_table(surveys: Sequence[hw.Survey]) -> str:
    """The head that follows each relation best, seed by seed."""
    rows = []
    for name in verbs.RELATIONS:
        cells = []
        for survey in surveys:
            head = max(survey.profiles, key=lambda profile: profile.relations[name].mass.mean)
            mass = head.relations[name].mass
            earned = "" if name in head.roles else ", no role"
            assert head.ablation is not None
            cells.append(
                f"{head.name} {mass.mean:.2f} [{mass.low:.2f}-{mass.high:.2f}]{earned}; "
                f"silenced {head.ablation.mean:+.2f}"
            )
        rows.append([name, *cells])
    return table(["role", *[f"seed {seed}" for seed in SEEDS]], rows)


def page(surveys: Sequence[hw.Survey]) -> str:
    first = surveys[0]
    always = [name for name in verbs.RELATIONS if all(any(name in h.roles for h in s.profiles) for s in surveys)]
    tense = max(first.profiles, key=lambda profile: profile.relations["tense"].mass.mean)
    meanings = "\n".join(f"- **{name}**: {meaning}." for name, meaning in verbs.RELATIONS.items())
    return f"""# What the heads of the verb model look at

Written by `python examples/verb_heads.py`, which trains the default model with the seeds {SEEDS} and measures. The
numbers are of one machine; on another, other heads can do it. `headwise heads RUN` has the same numbers with their
intervals, and each head in a sentence, as of {tense.name}:
"{head_sentence(first, tense)}"

![The maps of all heads on the line "{PICTURED}"](heads.png)

Row: the token that looks. Column: the token looked at. This is the model of seed 0.

## The roles

A causal model predicts the next token from the position before it. So a role is the mean weight that a head gives, at
the position that predicts, to the word that decides:

{meanings}

The lines are the 36 unseen cells and 120 conjugations. Bold: the head has the role. Its weight is then at least 0.4,
and the whole 95 % interval lies above three controls: an even look, the best head of the untrained model, and, in
brackets, the same head at the same distances from other words. "Silenced" is what its silence adds to the loss of the
Spanish half of the unseen cells, in nats per token.

{heads_table(first)}

## The strongest head of each role, seed by seed

{seeds_table(surveys)}

## What this shows, and what not

With every seed some head has these roles: {", ".join(always) or "none"}. Which
head it is differs by seed: nothing in training names the heads. A large weight is not a cause: compare it with
what silencing costs, little where others do the same. Nothing here says that the heads of a large model divide their
work like this.
"""


def write(runs: Sequence[Path]) -> None:
    surveys = [hw.survey(run) for run in runs]
    for run, seed in zip(runs, SEEDS, strict=True):
        trained = json.loads((run / "run.json").read_text(encoding="utf-8"))["settings"]["seed"]
        assert trained == seed, f"{run} has the seed {trained}, not {seed}"
    picture(runs[0], DOCS / "heads.png")
    (DOCS / "heads.md").write_text(page(surveys), encoding="utf-8")
    print(f"wrote {DOCS / 'heads.md'} and heads.png")


def main() -> None:
    if len(sys.argv) > 1:
        write([Path(name) for name in sys.argv[1:]])
        return
    with TemporaryDirectory() as folder:
        runs = [Path(folder) / f"seed{seed}" for seed in SEEDS]
        for run, seed in zip(runs, SEEDS, strict=True):
            hw.train(out=run, seed=seed)
            print(f"seed {seed}: trained")
        write(runs)


if __name__ == "__main__":
    main()
