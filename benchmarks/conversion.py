"""Every way to a smaller cache on one larger parent: healed on the same tokens, at a quarter and an eighth of it.

The parent: RMSNorm, RoPE, SwiGLU, 6 layers of 8 heads, 10.7 million parameters, trained on 0.4 million characters of
tinyshakespeare with Muon, products in bfloat16; kept in build/conversion, by its seed and digest. Ways: key/value heads
shared (`hw.share`); a latent and one rotary key for all heads (`latent.converted`); keys and values of low rank, in the
factors that cacheshrink 0.1.5 gives for the same text, if it is there. Losses on 6,400 held-out characters, above the
parent's. Healing: KL and hidden states, attention alone, 2.5 % of the parent's tokens, products in bfloat16.

    pip install --no-deps cacheshrink==0.1.5 geoopt scipy datasets multiprocess dill xxhash httpx httpcore h11
"""

from __future__ import annotations

import copy
import hashlib
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from benchmarks.latent import converted
from benchmarks.reshape import TEXT
from headwise.corpus.sources import Sources
from headwise.corpus.training import Corpus, text_corpus
from headwise.gpt.checkpoint import load_model, save_model
from headwise.gpt.gpt import GPT, GPTConfig
from headwise.gpt.presets import Recipe
from headwise.gpt.train import evaluate, fit
from headwise.models.open import open_folder
from headwise.reshape.align import moments
from headwise.reshape.arguments import HealRecipe
from headwise.reshape.heal import Healing
from headwise.reshape.share import share_heads
from headwise.reshape.text import Calibration, read_calibration

PARENTS = Path(__file__).resolve().parents[1] / "build" / "conversion"
SHAPE: dict[str, Any] = {"context": 128, "n_layers": 6, "n_heads": 8, "head_dim": 48, "d_model": 384, "d_ff": 1024}
RECIPE = Recipe(steps=200, batch=16, lr=3e-3, muon_lr=0.015, weight_decay=0.1, warmup=20, final_lr=0.02)
HEALING = HealRecipe(steps=20, batch=4, evaluations=1)  # 2.5 % of the tokens above; looked at before and after alone
EVALUATION = 6_400  # held-out characters
Make = Callable[[], nn.Module]  # of a child
# The products of a training in bfloat16, in half the time; the weights stay float32. No cast of a weight is kept, or
# the next step would compute with the weight of the step before.
half = partial(torch.autocast, "cpu", torch.bfloat16, cache_enabled=False)


def parent_of(seed: int) -> tuple[Corpus, GPT]:
    """The trained parent: from build/, or trained now."""
    corpus, folder = text_corpus(Sources([TEXT]), False, SHAPE["context"], seed), PARENTS / f"seed{seed}"
    if not (folder / "model.safetensors").exists():
        folder.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(seed)
        model, began = GPT(GPTConfig(vocab_size=len(corpus.tokens), **SHAPE)), time.process_time()
        with torch.enable_grad(), half():
            fit(model, RECIPE, corpus.data, seed)
        save_model(folder, model.eval(), corpus.tokens)
        print(f"{folder}: trained in {time.process_time() - began:.0f} s of processor time", file=sys.stderr)
    return corpus, load_model(folder)[0]


def run(runs: int) -> dict[str, Any]:
    """Each way, healed with so many seeds."""
    if not TEXT.exists():
        return {"table": f"not run: {TEXT} is absent (the complete tinyshakespeare, 1,115,394 characters)"}
    corpus, parent = parent_of(0)
    digest = hashlib.sha256((PARENTS / "seed0" / "model.safetensors").read_bytes()).hexdigest()
    bench, rows = _Bench(corpus, parent), {}
    for part in (4, 8):
        for name, make in ways(bench, part).items():
            rows[f"1/{part} {name}"] = bench.healed(f"1/{part} {name}", make, range(runs))
    result = {"parent": bench.loss, "parameters": parent.n_parameters, "sha256": digest, "rows": rows}
    return result | {"table": _table(result)}


def ways(bench: _Bench, part: int) -> dict[str, Make]:
    """What makes a child whose cache is one of so many parts of the parent's: 768 numbers a token and layer."""
    heads, width = SHAPE["n_heads"], SHAPE["head_dim"]
    numbers = 2 * heads * width // part  # of a token and layer that the child keeps
    makers: dict[str, Make] = {}
    for method in ("mean", "aligned", "aligned+norm", "principal"):
        makers[method] = partial(bench.shared, heads // part, method, "adjacent")
        if method in ("aligned+norm", "principal") and part < heads:  # one group holds all
            makers[f"{method}, best groups"] = partial(bench.shared, heads // part, method, "best")
    makers["latent and rotary key"] = partial(bench.latent, numbers - width)
    try:
        import cacheshrink  # noqa: F401
    except ImportError as error:
        print(f"conversion: cacheshrink is left out ({error}); the top of the file tells how", file=sys.stderr)
    else:
        makers["cacheshrink, separate"] = partial(bench.low_rank, numbers // 2)
    return makers


class _Bench:
    """The parent, and what is made of it and measured against it."""

    def __init__(self, corpus: Corpus, parent: GPT) -> None:
        self.corpus, self.parent = corpus, parent
        for parameter in parent.parameters():
            parameter.requires_grad_(False)
        self.calibration: Calibration = read_calibration(TEXT, open_folder(PARENTS / "seed0"))
        self.statistics = self.calibration.statistics[
            :1
        ]  # 32 documents: alignment, ranks and groups are chosen by them
        self.roots = [*moments(parent, self.statistics)]
        self.loss = evaluate(parent, corpus.data, EVALUATION)

    def healed(self, name: str, make: Make, seeds: Sequence[int]) -> list[dict[str, float]]:
        """Nats above the parent before and after healing, for each of its seeds."""
        rows = []
        for seed in seeds:
            child: Any = make()
            before = evaluate(child, self.corpus.data, EVALUATION) - self.loss
            with torch.enable_grad(), half():
                recipe = replace(HEALING, seed=seed)
                Healing(self.parent, child, self.calibration.train, self.calibration.glance, recipe).run()
            after = evaluate(child, self.corpus.data, EVALUATION) - self.loss
            rows.append({"before": before, "after": after, "percent": 100 * after / self.loss})
            print(f"conversion {name}, seed {seed}: {rows[-1]}", file=sys.stderr)
        return rows

    def shared(self, n_kv_heads: int, method: str, groups: str) -> nn.Module:
        return share_heads(self.parent, n_kv_heads, method, groups, self.roots).model

    @torch.no_grad()
    def latent(self, n: int) -> nn.Module:
        child = copy.deepcopy(self.parent)
        for block, root in zip(child.blocks, self.roots, strict=True):
            layer: Any = converted(block.attention, root[:-1], n, rest=True)  # without the row of biases
            block.attention = layer
        return child

    @torch.no_grad()
    def low_rank(self, n: int) -> nn.Module:
        """Keys before RoPE and values of rank n, by the factors of cacheshrink: they are what heals."""
        from cacheshrink.initialization import init_compression_from_calibration

        child = copy.deepcopy(self.parent)
        for block, x in zip(child.blocks, self._inputs(), strict=True):
            layer: Any = block.attention
            weights = layer.k_proj.weight, layer.v_proj.weight
            with redirect_stdout(sys.stderr):
                *downs, k_up, v_up = init_compression_from_calibration(*weights, n, x)
            for projection, up, down in zip((layer.k_proj, layer.v_proj), (k_up, v_up), downs, strict=True):
                parametrize.register_parametrization(projection, "weight", _Product(up, down))
        return child

    def _inputs(self) -> list[Tensor]:
        """What each layer's projections read of the calibration text, (N,C)."""
        inputs: dict[nn.Module, list[Tensor]] = {block.attention_norm: [] for block in self.parent.blocks}

        def keep(module: nn.Module, args: Any, output: Tensor) -> None:
            inputs[module].append(output.flatten(0, 1))

        hooks = [module.register_forward_hook(keep) for module in inputs]
        for ids in self.statistics:
            self.parent(ids)
        for hook in hooks:
            hook.remove()
        return [torch.cat(pieces) for pieces in inputs.values()]


class _Product(nn.Module):
    """A weight that is the product of two, which learn."""

    def __init__(self, up: Tensor, down: Tensor) -> None:
        super().__init__()
        self.begin = up.clone(), down.clone()

    def forward(self, up: Tensor, down: Tensor) -> Tensor:
        return up @ down

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        return self.begin


def _table(result: dict[str, Any]) -> str:
    head = f"parent: {result['parameters']:,} parameters, held-out {result['parent']:.4f}, {result['sha256'][:16]}"
    lines = [head, f"{'cache, way':32} {'before, nats':>12}  healed, % above the parent"]
    for name, rows in result["rows"].items():
        each = ", ".join(f"{row['percent']:.2f}" for row in rows)
        lines.append(f"{name:32} {rows[0]['before']:12.3f}  {each}")
    return "\n".join(lines)
