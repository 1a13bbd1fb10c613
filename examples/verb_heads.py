"""What the heads of the default model look at, measured: writes docs/heads.md and docs/heads.png.

    python examples/verb_heads.py          # trains three models, about a minute and a half

A causal model predicts the token after a position from that position, so each role is the weight that a head gives,
at the position that predicts, to the word that decides. It is compared with the same model before training, with a
look spread evenly over all that may be seen, and with what silencing the head costs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from headwise.gpt import verbs
from headwise.gpt.data import Corpus
from headwise.gpt.gpt import GPT
from headwise.gpt.run import Settings
from headwise.gpt.train import evaluate, train
from headwise.heads.maps import head_maps
from headwise.models.sites import attention_layers

DOCS = Path(__file__).resolve().parents[1] / "docs"
SEEDS = (0, 1, 2)
CLEAR = 2.5  # times an even look, with every seed: then a role is called one
PICTURED = "he will write = él escribirá"

Place = tuple[int, int]  # (the position that predicts, the position of the word that decides)


def person(words: Sequence[str]) -> list[Place]:
    """From `=` the Spanish pronoun is predicted: the English pronoun decides."""
    return [(words.index("="), 1)] if "=" in words else []


def translation(words: Sequence[str]) -> list[Place]:
    """From the Spanish pronoun its verb is predicted: the English verb, right before `=`, decides which one."""
    return [(words.index("=") + 1, words.index("=") - 1)] if "=" in words else []


def tense(words: Sequence[str]) -> list[Place]:
    """The same position, where English has an auxiliary: it decides the tense."""
    return [(words.index("=") + 1, 2)] if "=" in words and words.index("=") > 3 else []


def earlier_verb(words: Sequence[str]) -> list[Place]:
    """In `I work , you work , ...` a pronoun predicts a form of the verb that stands before the comma."""
    commas = [i for i, word in enumerate(words) if word == ","]
    return [(comma + 1, comma - 1) for comma in commas]


def locality(words: Sequence[str]) -> list[Place]:
    """Every position and the one before it."""
    return [(i, i - 1) for i in range(1, len(words))]


ROLES: dict[str, Callable[[Sequence[str]], list[Place]]] = {
    "person": person,
    "translation": translation,
    "tense": tense,
    "earlier verb": earlier_verb,
    "locality": locality,
}


def scores(model: GPT, corpus: Corpus, lines: Sequence[str]) -> dict[str, np.ndarray]:
    """For each role the mean weight (layers, heads) over all its places in the lines; under "even" the mean of 1/n."""
    n_layers, n_heads = model.config.n_layers, model.config.n_heads
    sums = {role: np.zeros(n_layers * n_heads) for role in ROLES}
    even = dict.fromkeys(ROLES, 0.0)
    counts = dict.fromkeys(ROLES, 0)
    for line in lines:
        ids = corpus.tokens.prompt(line)
        words = corpus.tokens.shown(ids)
        weights = np.stack([head.weights for head in head_maps(model, ids, words, "").maps])
        for role, places in ROLES.items():
            for looking, decides in places(words):
                sums[role] += weights[:, looking, decides]
                even[role] += 1 / (looking + 1)
                counts[role] += 1
    means = {role: (total / counts[role]).reshape(n_layers, n_heads) for role, total in sums.items()}
    return means | {f"even {role}": np.array(even[role] / counts[role]) for role in ROLES}


@torch.no_grad()
def cost_of_silence(model: GPT, corpus: Corpus) -> np.ndarray:
    """Held-out loss without a head, less the loss with it, (layers, heads), nats per token."""
    whole = evaluate(model, corpus.data)
    costs = np.zeros((model.config.n_layers, model.config.n_heads))
    for layer, head in np.ndindex(*costs.shape):
        silenced = copy.deepcopy(model)
        silent = attention_layers(silenced)[layer].heads[head]
        silent.wo = torch.zeros_like(silent.wo)
        costs[layer, head] = evaluate(silenced, corpus.data) - whole
    return costs


def trained(seed: int) -> tuple[Corpus, GPT, GPT]:
    """The corpus, the default model before training, and after."""
    corpus, config, recipe = Settings(seed=seed).resolve()
    torch.manual_seed(seed)
    before = GPT(config).eval()
    with TemporaryDirectory() as folder:
        after, _ = train(Path(folder), config, recipe, corpus.data, seed, lambda progress: None)
    return corpus, before, after


def picture(model: GPT, corpus: Corpus, path: Path) -> None:
    """The maps of all heads on one line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ids = corpus.tokens.prompt(PICTURED)
    words = corpus.tokens.shown(ids)
    maps = head_maps(model, ids, words, "").maps
    figure, axes = pyplot.subplots(model.config.n_layers, model.config.n_heads, figsize=(11, 6), layout="constrained")
    for axis, head in zip(axes.flat, maps, strict=True):
        axis.imshow(head.weights, cmap="Blues", vmin=0, vmax=1)
        axis.set_title(head.name, fontsize=10)
        axis.set_xticks(range(len(words)), words, rotation=90, fontsize=7)
        axis.set_yticks(range(len(words)), words if head.head == 0 else [""] * len(words), fontsize=7)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def page(results: list[tuple[dict[str, np.ndarray], dict[str, np.ndarray], np.ndarray]]) -> str:
    after, before, costs = results[0]
    names = [f"L{layer}.H{head}" for layer, head in np.ndindex(*costs.shape)]
    rows = []
    for place, name in zip(np.ndindex(*costs.shape), names, strict=True):
        cells = [f"{after[role][place]:.2f} ({before[role][place]:.2f})" for role in ROLES]
        rows.append([name, *cells, f"{costs[place]:+.2f}"])
    rows.append(["even look", *[f"{after[f'even {role}']:.2f}" for role in ROLES], ""])
    strongest = []
    for role in ROLES:
        best = []
        for now, _, cost in results:
            place = np.unravel_index(now[role].argmax(), now[role].shape)
            best.append(f"L{place[0]}.H{place[1]} {now[role][place]:.2f}, silenced {cost[place]:+.2f}")
        strongest.append([role, *best])
    clear = [role for role in ROLES if all(now[role].max() >= CLEAR * now[f"even {role}"] for now, _, _ in results)]
    faint = [role for role in ROLES if role not in clear]
    return f"""# What the heads of the verb model look at

Written by `python examples/verb_heads.py`, which trains the default model with the seeds {SEEDS} and measures. The
numbers are of one machine; another may differ in the last digits.

![The maps of all heads on the line "{PICTURED}"](heads.png)

Row: the token that looks. Column: the token looked at. This is the model of seed 0.

## The roles

A causal model predicts the next token from the position before it. So a role is the mean weight that a head gives, at
the position that predicts, to the word that decides:

- **person**: at `=`, on the English pronoun; the Spanish pronoun comes next.
- **translation**: at the Spanish pronoun, on the English verb right before `=`; the Spanish verb comes next.
- **tense**: at the Spanish pronoun, on the English auxiliary (`will`, `would`, `am`, `has`), where there is one.
- **earlier verb**: in `I work , you work , he works`, at a pronoun, on the verb before the comma.
- **locality**: at every position, on the one before.

In brackets: the same head before training. "Even look" is the weight that a head would give if it spread its look
evenly over all it may see. The last column is what silencing the head adds to the held-out loss (the Spanish half of 36
unseen cells), in nats per token.

{table(["head", *ROLES, "silenced"], rows)}

## The strongest head of each role, seed by seed

{table(["role", *[f"seed {seed}" for seed in SEEDS]], strongest)}

## What this shows, and what not

With every seed some head gives at least {CLEAR} times an even look to: {", ".join(clear)}. Not so, and so no role to
speak of: {", ".join(faint) or "none"}. Which head plays a role differs by seed: nothing in training names the heads.
A large weight is not a cause: compare it with what silencing costs. A head can be silenced at little cost because
others do the same, and one with no role on this list can be costly. These are two layers and a corpus whose rules are
known; nothing here says that the heads of a large model divide their work like this.
"""


def main() -> None:
    results = []
    for seed in SEEDS:
        corpus, before, after = trained(seed)
        lines = [*verbs.conjugation_lines()[:120], *(cell.line for cell in corpus.cells)]
        results.append((scores(after, corpus, lines), scores(before, corpus, lines), cost_of_silence(after, corpus)))
        if seed == SEEDS[0]:
            picture(after, corpus, DOCS / "heads.png")
        print(f"seed {seed}: measured")
    (DOCS / "heads.md").write_text(page(results), encoding="utf-8")
    print(f"wrote {DOCS / 'heads.md'} and heads.png")


if __name__ == "__main__":
    main()
