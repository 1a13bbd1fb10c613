"""What is seen of a training while it goes on: the first maps in the terminal, or with --live a page of its own.

The page has the film, the loss and samples.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise.cli.app import err, out
from headwise.cli.early import in_words, language

if TYPE_CHECKING:
    from headwise.corpus.training import Corpus
    from headwise.gpt.gpt import GPT, GPTConfig
    from headwise.gpt.presets import Recipe
    from headwise.gpt.run import Settings
    from headwise.gpt.train import Film, Progress
    from headwise.view.live import Live

SAMPLES, SAMPLE_TOKENS = 10, 30  # texts that are written while training, about, and their length at most
FOREVER = 10.0**9
LINGER, MOST = 10.0, 60.0  # seconds without a request, and in all, after which the page goes where there is no terminal
LAST_WORD = 3.0  # seconds in which a page that is open asks again
EARLY = 1 / 10  # of the steps: heads differ by then, and who started the training is still watching
FIRST_HEADS, FIRST_TOKENS = 8, 16  # that the terminal shows: two rows of pictures, as a rule


def first_maps(folder: Path, corpus: Corpus, config: GPTConfig, recipe: Recipe) -> Film:
    """A film whose first frame after a tenth of the steps is drawn in the terminal."""
    from headwise.heads.film import Film, unpacked

    drawn = False

    def tell(row: dict[str, Any]) -> None:
        nonlocal drawn
        if drawn or row.get("step", -1) < EARLY * recipe.steps:
            return
        drawn = True
        if row["step"] < recipe.steps:  # not of a training that is over: its report is next
            draw(row)

    def draw(row: dict[str, Any]) -> None:
        from headwise.records import HeadMap, HeadMaps, parse_head
        from headwise.view.terminal import print_maps

        maps = []
        for name, of_lines in unpacked(film.header, row).items():
            _, layer, head = parse_head(name)
            maps.append(HeadMap(layer, head, of_lines[0][:FIRST_TOKENS, :FIRST_TOKENS]))
        tokens = tuple(film.header["lines"][0][:FIRST_TOKENS])
        err.print(in_words("tell.first_maps", step=row["step"], steps=recipe.steps), soft_wrap=True)
        print_maps(err, HeadMaps(folder.name, tokens, tuple(maps[:FIRST_HEADS])), language())

    film = Film(folder, corpus, config, recipe, tell)
    return film


@contextmanager
def live_page(folder: Path, settings: Settings, port: int | None) -> Iterator[tuple[Path, Settings, Live | None]]:
    """A training with its page from here on; without a port it has none."""
    if port is None:
        yield folder, settings, None
        return
    from headwise.view.live import Live, live_html

    live = Live(port, live_html(folder.name))
    err.print(in_words("tell.watch", address=live.address), soft_wrap=True)
    try:
        yield folder, settings, live
    except BaseException:
        live.tell("state", "stopped")
        live.linger(LAST_WORD, LAST_WORD)
        raise
    finally:
        live.close()


def told(live: Live, report: Callable[[Progress], None]) -> Callable[[Progress], None]:
    """A report that the page hears of, too."""

    def tell(progress: Progress) -> None:
        live.tell("loss", progress.row())
        report(progress)

    return tell


def filmed(live: Live, folder: Path, corpus: Corpus, config: GPTConfig, recipe: Recipe) -> Film:
    """A film that the page hears of, with a sample now and then."""
    from headwise.gpt.generate import generate
    from headwise.gpt.train import METRICS
    from headwise.heads.film import Film
    from headwise.models.ask import evaluating

    tokens, written = corpus.tokens, -recipe.steps

    def tell(row: dict[str, Any]) -> None:
        live.tell("frame" if "step" in row else "header", row)
        if "step" not in row:  # what came before, where training goes on
            for line in (folder / METRICS).read_text(encoding="utf-8").splitlines():
                live.tell("loss", json.loads(line))

    film = Film(folder, corpus, config, recipe, tell)

    def look(model: GPT, step: int) -> None:
        nonlocal written
        film(model, step)
        if step in film.due and step - written >= recipe.steps / SAMPLES:
            with evaluating(model):
                ids = list(generate(model, tokens.opening(), SAMPLE_TOKENS, temperature=0.8, stop=tokens.boundary))
            live.tell("sample", {"step": step, "text": tokens.decode(ids).strip()})
            written = step

    return look


def show_report(live: Live, report: Path) -> None:
    """The page is the report now: until Ctrl-C; where there is no terminal, until nobody asks any more."""
    live.document = report.read_text(encoding="utf-8")
    live.tell("state", "finished")
    live.last_request = max(live.last_request, time.monotonic())
    if out.is_terminal:
        err.print(in_words("tell.stays", address=live.address), soft_wrap=True)
    with suppress(KeyboardInterrupt):
        live.linger(*((FOREVER, FOREVER) if out.is_terminal else (LINGER, MOST)))
