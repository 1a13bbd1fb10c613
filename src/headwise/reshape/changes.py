"""The two changes a job can make: share key/value heads, prune query heads."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.heads.effect import ablation, importance
from headwise.heads.survey import Text, survey
from headwise.models.ask import predicts
from headwise.models.open import Folder
from headwise.models.weights import attentions, head_counts
from headwise.reshape.group import adjacent
from headwise.reshape.job import Change, Changed
from headwise.reshape.moments import moments
from headwise.reshape.prune import Pruned, cache_note, named_heads, obstacle, prune, weakest
from headwise.reshape.share import Shared, check_share, needs_text, share
from headwise.reshape.text import Calibration

SCORES = ("importance", "ablation", "role")


def sharing(n_kv_heads: int, method: str, grouping: str) -> Change:
    """Share key/value heads."""

    def check(model: nn.Module) -> None:
        check_share(model, n_kv_heads, method, grouping)

    def apply(folder: Folder, calibration: Calibration) -> Changed:
        before = head_counts(folder.model)[1]
        blind = n_kv_heads == before or not needs_text(method, grouping)
        roots: list[Tensor] = [] if blind else moments(folder.model, calibration.statistics)
        return _shared(share(folder.model, n_kv_heads, method, grouping, roots), before)

    return Change({"share": n_kv_heads, "method": method, "group": grouping}, check, apply)


def _shared(shared: Shared, before: int) -> Changed:
    n_heads, after, _ = head_counts(shared.model)
    r = n_heads // before
    origins = [[g * r + i for group in groups for g in group for i in range(r)] for groups in shared.groups]
    if after == before:
        notes: tuple[str, ...] = (f"the model has {before} key/value heads already: nothing changes",)
    else:
        said = dict.fromkeys(text for text in shared.turned if text)
        notes = tuple(f"keys were aligned by what is exact here: {text}" for text in said)
        if shared.groups != (adjacent(before, after),) * len(shared.groups):
            rows = (" | ".join(" ".join(map(str, group)) for group in groups) for groups in shared.groups)
            notes += tuple(f"layer {n}, key/value heads that share: {row}" for n, row in enumerate(rows))
    what = f"key/value heads for {n_heads} query heads: {after}, {before} before"
    return Changed(shared.model, what, {"groups": shared.groups}, origins, notes)


def pruning(heads: str | None, keep: float | None, by: str | None, uniform: bool) -> Change:
    """Prune the named heads, or those with the lowest scores (default: importance) until a share `keep` remains."""
    if (heads is None) == (keep is None):
        raise HeadwiseError("say which heads go: --heads L0.H1,L3.H5, or --keep 0.75 with --by; one of the two")
    if heads is not None and by is not None:
        raise HeadwiseError(f"by={by!r} chooses heads where --keep says how many stay; --heads names them")
    by = by or SCORES[0]
    if by not in SCORES:
        raise HeadwiseError(f"by={by!r} is not known; one of {', '.join(SCORES)}")

    def check(model: nn.Module) -> None:
        if heads is not None:
            obstacle(model, named_heads(model, heads), uniform)
        if keep is not None:
            if by != "role" and predicts(model) != "next":
                raise HeadwiseError(
                    f"by={by!r} needs the loss of a next token, and {type(model).__name__} predicts none; "
                    f"pass --by role, or --heads"
                )
            n_heads = head_counts(model)[0]
            ties = {f"L{n}.H{h}": 0.0 for n in range(len(attentions(model))) for h in range(n_heads)}
            obstacle(model, weakest(model, ties, keep, uniform), uniform)

    def apply(folder: Folder, calibration: Calibration) -> Changed:
        if heads is not None:
            return _pruned(folder.model, prune(folder.model, named_heads(folder.model, heads), uniform), {})
        assert keep is not None
        scores = head_scores(by, folder, calibration)
        return _pruned(folder.model, prune(folder.model, weakest(folder.model, scores, keep, uniform), uniform), scores)

    settings: dict[str, object] = {
        "prune": heads,
        "keep": keep,
        "by": by if keep is not None else None,
        "uniform": uniform,
    }
    return Change(settings, check, apply)


def head_scores(by: str, folder: Folder, calibration: Calibration) -> dict[str, float]:
    """A score for each head, larger for those to keep.

    importance   by the gradient, relative to the layer (Michel et al. 2019, arXiv 1905.10650)
    ablation     the change in loss when the head alone is silenced
    role         heads that earn a role before those that do not; by importance among equals
    """
    batches = calibration.statistics
    if by == "ablation":
        return {name: change.mean for name, change in ablation(folder.model, batches).items()}
    if by == "importance":
        return importance(folder.model, batches)
    assert folder.tokens is not None
    documents = [ids.tolist() for batch in calibration.statistics for ids in batch]
    text = Text(documents, folder.tokens.shown, folder.tokens.specials, folder.tokens.frame)
    found = survey(folder.model, text, folder.name, folder.family, context=folder.context, ablate=None)
    return {head.name: (head.importance or 0.0) + 2.0 * bool(head.roles) for head in found.profiles}


def _pruned(parent: nn.Module, pruned: Pruned, scores: Mapping[str, float]) -> Changed:
    n_heads = head_counts(parent)[0]
    kept = [[h for h in range(n_heads) if h not in gone] for gone in pruned.heads]
    total = n_heads * len(kept)
    if pruned.reason is None:
        origins, what, notes = kept, f"heads out of the weights: {len(pruned.names)} of {total}", []
    else:
        origins = [list(range(n_heads)) for _ in kept]
        what, notes = f"heads zeroed: {len(pruned.names)} of {total}", [f"zeroed, not removed: {pruned.reason}"]
    notes.append(f"gone: {', '.join(pruned.names)}")
    details: dict[str, object] = {"heads": pruned.names, "zeroed": pruned.reason is not None}
    if scores:
        details["scores"] = dict(scores)
    silent = pruned.heads if pruned.reason is not None else ()
    notes.append(cache_note(parent, pruned))
    return Changed(pruned.model, what, details, origins, tuple(notes), silent)
