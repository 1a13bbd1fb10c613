"""Sharing and pruning heads of a small RoPE model: what is lost before any training, and what healing brings back.

Parents: RMSNorm, RoPE, SwiGLU, 3 layers of 8 heads, trained on the characters of tinyshakespeare with Muon, one for
each seed; kept in build/reshape, where an interrupted run goes on. Losses are on 100,000 held-out characters, in nats
above the parent's. Statistics for alignment and importance: 50,000 characters of the training part. Healing: KL and
hidden states, attention alone, 5 % of the tokens that the parent was trained on. Precision float32.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headwise.corpus.training import Corpus, text_corpus
from headwise.files import Sources
from headwise.gpt.checkpoint import load_model, save_model
from headwise.gpt.gpt import GPT, GPTConfig
from headwise.gpt.presets import Recipe
from headwise.gpt.train import evaluate, train
from headwise.heads.ablate import importance
from headwise.models.open import open_folder
from headwise.models.weights import grouped, read_layers, with_layers
from headwise.reshape.align import moments
from headwise.reshape.heal import HealRecipe, heal_child
from headwise.reshape.job import Calibration, calibrate, read_user_text
from headwise.reshape.prune import prune_heads, weakest
from headwise.reshape.share import share_heads

TEXT = Path(__file__).resolve().parents[1] / ".." / "shared" / "data" / "tinyshakespeare.txt"
PARENTS = Path(__file__).resolve().parents[1] / "build" / "reshape"
SHAPE = {"context": 128, "n_layers": 3, "n_heads": 8, "head_dim": 32, "d_model": 168, "d_ff": 384}
RECIPE = Recipe(steps=2000, batch=16, lr=5e-3, muon_lr=0.015, weight_decay=0.1, warmup=50, final_lr=0.02)
HEALING = HealRecipe(steps=400, batch=4, evaluations=1)  # 5 % of the tokens above; looked at before and after alone
WAYS = ("plain mean", "adjacent", "best")  # neighbours without an alignment, and the two ways of `share`


def run(runs: int) -> dict[str, Any]:
    if not TEXT.exists():
        return {"table": f"not run: {TEXT} is absent (the complete tinyshakespeare, 1,115,394 characters)"}
    rows = []
    for seed in range(runs):
        rows.append(measured(seed))
        print(f"share seed {seed}: {rows[-1]}", file=sys.stderr)
    return {"seeds": rows, "table": _table(rows)}


def measured(seed: int) -> dict[str, Any]:
    """All figures of one parent."""
    corpus, parent = parent_of(seed, PARENTS, SHAPE, RECIPE)
    folder = open_folder(PARENTS / f"seed{seed}")
    calibration = calibrate(*read_user_text(TEXT, folder.path), folder)
    for parameter in parent.parameters():
        parameter.requires_grad_(False)
    loss = evaluate(parent, corpus.data)
    roots = [*moments(parent, calibration.statistics)]
    bench = _Bench(parent, corpus, calibration, roots, loss, seed)
    row: dict[str, Any] = {"seed": seed, "parent": loss, "parameters": parent.n_parameters}
    row["zero training"] = {f"{n}:1 {way}": bench.damage(bench.shared(8 // n, way)) for n in (2, 4) for way in WAYS}
    row["healed"] = {f"4:1 {way}": bench.healed(bench.shared(2, way)) for way in ("plain mean", "best")}
    row |= bench.pruning()
    return row


def parent_of(seed: int, parents: Path, shape: dict[str, Any], recipe: Recipe) -> tuple[Corpus, GPT]:
    """The trained parent of a seed: from a folder of build/, or trained now."""
    corpus, folder = text_corpus(Sources([TEXT]), False, shape["context"], seed), parents / f"seed{seed}"
    if not (folder / "model.safetensors").exists():
        folder.mkdir(parents=True, exist_ok=True)
        config, began = GPTConfig(vocab_size=len(corpus.tokens), **shape), time.perf_counter()
        with torch.enable_grad():
            model, _ = train(folder, config, recipe, corpus.data, seed, lambda progress: None)
        save_model(folder, model, corpus.tokens)
        print(f"{folder}: trained in {time.perf_counter() - began:.0f} s", file=sys.stderr)
    return corpus, load_model(folder)[0]


class _Bench:
    """One parent, and what is measured against it."""

    def __init__(
        self,
        parent: GPT,
        corpus: Corpus,
        calibration: Calibration,
        roots: Sequence[Tensor],
        loss: float,
        seed: int,
    ) -> None:
        self.parent, self.corpus, self.calibration, self.roots = parent, corpus, calibration, roots
        self.loss, self.recipe = loss, replace(HEALING, seed=seed)

    def shared(self, n: int, way: str) -> nn.Module:
        """The parent with n key/value heads in each layer."""
        if way != "plain mean":
            return share_heads(self.parent, n, self.roots, way).model
        layers = []
        for w in read_layers(self.parent):
            layers.append(replace(w, wk=grouped(w.wk, n).mean(1), wv=grouped(w.wv, n).mean(1)))
        return with_layers(self.parent, layers, n_kv_heads=n)

    def damage(self, child: nn.Module) -> float:
        """Nats above the parent on held-out text."""
        assert isinstance(child, GPT)
        return evaluate(child, self.corpus.data) - self.loss

    def healed(self, child: nn.Module) -> dict[str, float]:
        before = self.damage(child)
        began = time.perf_counter()
        learned, held_out = self.calibration.train, self.calibration.glance
        tokens = heal_child(self.parent, child, learned, held_out, self.recipe).curve[-1].tokens
        after = self.damage(child)
        budget = tokens / (RECIPE.steps * RECIPE.batch * SHAPE["context"])
        seconds = time.perf_counter() - began
        return {"before": before, "after": after, "percent": 100 * after / self.loss, "budget": budget, "s": seconds}

    def pruning(self) -> dict[str, Any]:
        """A quarter of the heads, as many from each layer: the least important ones, and random ones."""
        scores = importance(self.parent, self.calibration.statistics)
        drawn = torch.rand(len(scores), generator=torch.Generator().manual_seed(self.recipe.seed)).tolist()
        sides = {"importance": scores, "random": dict(zip(scores, drawn, strict=True))}
        gone = {name: weakest(self.parent, side, 0.75, True) for name, side in sides.items()}
        return {
            f"pruned by {name}": self.healed(prune_heads(self.parent, heads, True).model)
            for name, heads in gone.items()
        }


def _table(rows: Sequence[dict[str, Any]]) -> str:
    """Means over the seeds, the worst of them, and the bars."""
    parents = ", ".join(f"{row['parent']:.4f}" for row in rows)
    lines = [f"parents: held-out loss {parents}"]
    lines.append("zero training, nats above the parent (mean over seeds; share of plain mean's, the worst seed)")
    for name in rows[0]["zero training"]:
        baseline = f"{name[:3]} plain mean"
        shares = [row["zero training"][name] / row["zero training"][baseline] for row in rows]
        mean = statistics.fmean(row["zero training"][name] for row in rows)
        lines.append(f"  {name:28} {mean:7.3f}   {statistics.fmean(shares):5.2f} (worst {max(shares):.2f})")
    lines.append("  bars for best: 0.33 at 2:1, 0.50 at 4:1")
    lines.append("healed, percent above the parent's loss, each seed (bar: 1)")
    for name, each in [(name, [row["healed"][name] for row in rows]) for name in rows[0]["healed"]]:
        lines.append(_healed_line(name, each))
    names = ("pruned by importance", "pruned by random")
    lines += [_healed_line(f"25 % {name}", [row[name] for row in rows]) for name in names]
    return "\n".join(lines)


def _healed_line(name: str, each: Sequence[dict[str, float]]) -> str:
    after = ", ".join(f"{x['percent']:.2f}" for x in each)
    before = statistics.fmean(x["before"] for x in each)
    return f"  {name:28} {after}   (from {before:.3f} nats, {100 * each[0]['budget']:.1f} % of the tokens)"
