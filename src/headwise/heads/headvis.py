"""A survey in the format of HeadVis (Anthropic 2026), the browser of heads that Neuronpedia hosts, too.

A tree of files: config.json, scatter_data.json (a row a head), server_config.json and attributions/manifest.json
(empty: no server), and heads/L3H5.json, which has documents, those with the strongest weight first. Of the weights of a
document only large ones are listed: of each row the 8 largest, and of these those of at least 0.005. Two lists of equal
length have them: the indices, query * seq_len + key, and the weights.
"""

from __future__ import annotations

import json
import math
import random
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headwise.corpus.documents import Text
from headwise.errors import HeadwiseError
from headwise.files import packaged, read_text, whole_folder
from headwise.heads.blocks import top_keys
from headwise.heads.documents import Document, run_documents
from headwise.heads.table import DISTANCES, HeadProfile, Row, Survey
from headwise.models.sites import Site
from headwise.records import Call

# ROW, LEAST, SEED, SAMPLES, STRONGEST and BINS are the defaults of Neuronpedia's own pipeline.
ROW, LEAST = 8, 0.005  # weights of a row at most, and the smallest that is listed
CONFIG: dict[str, Any] = json.loads(read_text(packaged("headvis", "json")))  # what is the same of every survey
# Statistic -> what HeadVis calls it, where that is another name. It is taken out: `_config` writes the rest as it is.
NAMES: dict[str, str] = CONFIG.pop("names")
INTERVALS: int = CONFIG["n_intervals"]  # bands of about equally many documents, ranked by their largest weight
SEED = 0  # draws the samples
SAMPLES, STRONGEST = 3, 10  # documents that are shown of a band, and of the last one, which has the strongest
BINS = 50  # of the histogram of the strongest weights; also the most query tokens that are listed
Sparse = dict[tuple[str, int], tuple[list[int], list[float]]]  # head and document -> indices and weights


def check_headvis(folder: Path) -> None:
    """Raise HeadwiseError unless the tree can be written there: a new folder, or an empty one."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise HeadwiseError(f"headvis={str(folder)!r} is there already and not empty; pass a new folder")
    if not folder.absolute().parent.is_dir():
        raise HeadwiseError(f"headvis={str(folder)!r}: the folder {folder.parent} does not exist; make it first")


@torch.no_grad()
def write_headvis(folder: Path, model: nn.Module, text: Text, survey: Survey) -> None:
    """Write the tree, whole or not at all.

    The model reads the documents once more, to find those that a head shows. It reads these again for their weights:
    those of all would be too many to keep.

    Raises HeadwiseError for a model of several stacks, whose heads HeadVis cannot name.
    """
    parts = {profile.part for profile in survey.profiles}
    if parts != {""}:
        raise HeadwiseError(f"HeadVis names heads by layer and number alone, and {survey.model} has several stacks")
    check_headvis(folder)
    strongest = _strongest(model, text)
    chosen = {name: _choose(values, random.Random(f"{SEED} {name}")) for name, values in strongest.items()}
    rows = _sparse(model, text, chosen)
    with whole_folder(folder) as tree:
        _write(tree / "server_config.json", {})
        _write(tree / "attributions" / "manifest.json", {})
        scatter = []
        for profile in survey.profiles:
            row: Row = {"layer": profile.layer, "head": profile.head}
            for key in survey.statistics:
                mean = profile.means.get(key, math.nan)  # not every head has every statistic; null is none
                row[NAMES.get(key, key)] = round(mean, 4) if math.isfinite(mean) else None
            scatter.append(row)
            content = _head(profile, strongest[profile.name], chosen[profile.name], rows, text)
            _write(tree / "heads" / f"L{profile.layer}H{profile.head}.json", content)
        _write(tree / "scatter_data.json", scatter)
        _write(tree / "config.json", _config(survey))


def _rows(call: Call, b: int) -> tuple[Tensor, Tensor]:
    """The keys with the largest weights of every query, and those weights, (H,T,8); missing ones have weight 0."""
    keys, weights = top_keys(call, b, range(call.n_queries), ROW)
    return keys.cpu(), weights.cpu()


def _strongest(model: nn.Module, text: Text) -> dict[str, list[float]]:
    """Of each head the largest weight in each document, without the first row and column, as HeadVis counts."""
    strongest = defaultdict(list)

    def take(number: int, site: Site, call: Call, b: int, document: Document) -> None:
        keys, weights = _rows(call, b)
        weights = weights.masked_fill(keys == 0, 0)[:, 1:]  # (H,T-1,8); a document has two tokens or more
        for name, value in zip(site.heads, weights.amax((1, 2)).tolist(), strict=True):
            strongest[name].append(value)

    run_documents(model, text.documents, take)
    return strongest


def _choose(values: Sequence[float], draw: random.Random) -> dict[int, int]:
    """Documents that a head shows -> the band of each, 1 to INTERVALS by the rank of its largest weight.

    values  of the head, the largest weight in each document
    draw    of all bands but the last, the strongest, SAMPLES documents are drawn
    """
    strongest_first = sorted(range(len(values)), key=lambda n: -values[n])
    # Of ten bands the first tenth of the ranks is band 10, the last one band 1.
    bands = defaultdict(list)
    for rank, number in enumerate(strongest_first):
        bands[INTERVALS - rank * INTERVALS // len(values)].append(number)
    chosen: dict[int, int] = {}
    for band, numbers in sorted(bands.items()):
        if band == INTERVALS:
            shown = numbers[:STRONGEST]
        else:
            shown = draw.sample(numbers, min(SAMPLES, len(numbers)))
        chosen |= dict.fromkeys(shown, band)
    return chosen


def _sparse(model: nn.Module, text: Text, chosen: dict[str, dict[int, int]]) -> Sparse:
    """The sparse rows of each head in each document that it shows."""
    rows = {}
    numbers = sorted(set().union(*chosen.values()))  # documents that any head shows

    def take(place: int, site: Site, call: Call, b: int, document: Document) -> None:  # `place` among `numbers`
        heads = [h for h, name in enumerate(site.heads) if numbers[place] in chosen[name]]
        if heads:
            keys, weights = _rows(call, b)
            indices = torch.arange(keys.shape[1])[:, None] * keys.shape[1] + keys  # query * seq_len + key, (H,T,8)
            for h in heads:
                is_large = weights[h] >= LEAST
                index, order = indices[h][is_large].sort()  # row by row, and in each by key
                values = [round(value, 4) for value in weights[h][is_large][order].tolist()]
                rows[site.head(h), numbers[place]] = index.tolist(), values

    run_documents(model, [text.documents[number] for number in numbers], take)
    return rows


def _head(profile: HeadProfile, strongest: Sequence[float], chosen: dict[int, int], rows: Sparse, text: Text) -> Row:
    """What heads/L3H5.json says of a head; `strongest` and `chosen` are those of the head, `rows` of all heads."""
    sequences = []
    looking: dict[str, float] = defaultdict(float)  # token that looks -> its listed weights, added up
    # The highest band first, and in it the strongest document.
    for number in sorted(chosen, key=lambda n: (-chosen[n], -strongest[n])):
        tokens = text.shown(text.documents[number])
        indices, values = rows[profile.name, number]
        for index, value in zip(indices, values, strict=True):
            looking[tokens[index // len(tokens)]] += value  # of the index the query
        sequences.append(
            {
                "sequence_id": number,
                "interval": chosen[number],
                "tokens": tokens,
                "seq_len": len(tokens),
                "attention_indices": indices,
                "attention_values": values,
                "max_activation": round(strongest[number], 4),
            }
        )
    queries = sorted(looking.items(), key=lambda item: -item[1])[:BINS]
    counts, edges = np.histogram(strongest, BINS, (0, 1))  # a weight lies between 0 and 1
    # How many bins of distances, up to the last that is not empty; they have one edge more. A head of cross attention
    # has no distances, and gets one empty bin.
    last = max((n for n, count in enumerate(profile.distances) if count), default=0) + 1
    return {
        "sequences": sequences,
        "qk_distance_histogram": {"bin_edges": DISTANCES[: last + 1], "bin_values": profile.distances[:last] or (0,)},
        "top_query_tokens": [{"token": token, "weight": round(weight, 4)} for token, weight in queries],
        "top_key_tokens": [{"token": token, "weight": round(share, 4)} for token, share in profile.attended],
        "histogram": {"bin_edges": edges.round(4).tolist(), "bin_values": counts.tolist()},
        # The browser labels n_samples "Samples kept"; the mean is that of all documents, shown or not.
        "statistics": {"n_samples": len(sequences), "mean_max_activation": round(float(np.mean(strongest)), 4)},
    }


def _config(survey: Survey) -> Row:
    """config.json, which the browser reads first."""
    return {
        "model_name": survey.model,
        "dataset_name": ", ".join(survey.texts),
        "heads": [[profile.layer, profile.head] for profile in survey.profiles],
        "n_layers": 1 + max(profile.layer for profile in survey.profiles),
        "n_heads": 1 + max(profile.head for profile in survey.profiles),
        "metrics": [NAMES.get(key, key) for key in survey.statistics],
        "metric_descriptions": {NAMES.get(key, key): meaning for key, meaning in survey.statistics.items()},
        "pipeline_config": {
            "made_by": "headwise",
            "n_sequences": survey.n_documents,
            "n_tokens": survey.n_tokens,
            "sparse_topk_per_row": ROW,
            "sparse_threshold": LEAST,
            "sample_seed": SEED,
        },
        **CONFIG,
    }


def _write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
