"""The report of the default run in pictures, in English and Spanish: writes docs/report*.md and docs/report-*.png.

    headwise train                                     # a minute: runs/verbs
    python examples/report_pictures.py runs/verbs      # some seconds, with the package playwright and a Chromium

It does what a reader does: opens the page, asks its three questions, silences what reads the tense, and puts two heads
side by side. What docs/report.md says of heads is what the page says.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Page

DOCS = Path(__file__).resolve().parents[1] / "docs"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")

# In each place of a page: what the report says, or the end of a picture's name.
PAGES = {
    "en": """# The report

*[En español](report.es.md)*

Written by `python examples/report_pictures.py`, which opens the report of the default run (seed 0) in a browser,
does these steps, and copies what the page says. The words are those of one machine: on another, other heads can do
it, and your page says which.

`make run` ends with `runs/verbs/report.html`. The file needs no network, and the model itself is inside it.

![The report opens with a sentence](report-sentence{end}.png)

**Choose a word.** The page opens with `{text}`, and looks at the last word but one: the next word is predicted from
there. The row of that word lights up in every head's picture, and the words it looks at are coloured.

**Three questions.** Each leads to a word and to a move: silence a head, read what stays and what changes. Guess,
and the page answers, with its words:

{answers}

A badge below a picture says where a head looks; what it does, its silence says.

![Without what reads the tense](report-silenced{end}.png)

**Your own sentence.** Maps and the expected word follow at each key. A word that the model does not know is refused
before it predicts anything, and the nearest that it knows are offered; `___` is the place to fill. The temperature
stands beside the prediction.

![The whole model](report-whole{end}.png)

**The whole model in one picture**, from the tokens to the next word, with the size of each part: open one, and it
grows.

![Two heads side by side](report-heads{end}.png)

**Look closer.** The name below a picture enlarges it, and another head can stand beside it. `#{head}/5` behind the
address opens that head at that word, so that you can send a link. A slider there multiplies what the head gives by
-1 to 2, and the prediction follows; a link leads to the walk through the head, step by step, and back.

Which head reads the tense differs from seed to seed; [the picture book](heads.md) has three.
""",
    "es": """# El informe

*[In English](report.md)*

Lo escribe `python examples/report_pictures.py`, que abre en un navegador el informe del entrenamiento por defecto
(semilla 0), da estos pasos y copia lo que dice la página. Las palabras son las de una máquina: en otra pueden
hacerlo otras cabezas, y tu página dice cuáles.

`make run` termina con `runs/verbs/report.html`. El archivo no necesita red y lleva dentro el propio modelo.

![El informe abre con una frase](report-sentence{end}.png)

**Elige una palabra.** La página abre con `{text}` y mira la penúltima palabra: desde allí se predice la siguiente.
Su fila se ilumina en la imagen de cada cabeza, y se colorean las palabras que mira.

**Tres preguntas.** Cada una lleva a una palabra y a una jugada: silencia una cabeza y lee qué se mantiene y qué
cambia. Da tu respuesta, y la página contesta con su prueba:

{answers}

La etiqueta bajo una imagen dice adónde mira la cabeza; lo que hace lo dice su silencio.

![Sin lo que lee el tiempo verbal](report-silenced{end}.png)

**Tu propia frase.** Los mapas y la palabra esperada siguen cada tecla. Una palabra que el modelo no conoce se
rechaza antes de predecir nada, y se ofrecen las más parecidas; `___` es el hueco que se llena. La temperatura está
junto a la predicción.

![Todo el modelo](report-whole{end}.png)

**Todo el modelo en una imagen**, de los tokens a la palabra siguiente, con el tamaño de cada parte: abre una y crece.

![Dos cabezas lado a lado](report-heads{end}.png)

**De cerca.** El nombre bajo una imagen la amplía, y otra cabeza puede ponerse al lado. `#{head}/5` tras la
dirección abre esa cabeza en esa palabra, para enviar un enlace. Un control multiplica por -1 a 2 lo que aporta la
cabeza, y la predicción lo sigue; un enlace lleva al recorrido por la cabeza, paso a paso, y de vuelta.

Qué cabeza lee el tiempo verbal cambia con la semilla; [el libro de imágenes](heads.md) (en inglés) muestra tres.
""",
}


def within_reach(report: Path, folder: Path) -> Path:
    """A copy of the report whose script is a classic one: its names can be asked for from outside."""
    copy = folder / report.name
    html = report.read_text(encoding="utf-8")
    copy.write_text(html.replace('<script type="module">', "<script>"), encoding="utf-8")
    return copy


def answer(page: Page, part: str) -> str:
    """Asks a question, guesses that no head does it alone, and gives the question, the answer and the proofs."""
    page.click(f"#quests [data-part={part}]")
    page.locator("#guesses button").last.click()
    page.wait_for_selector("#quest-answer .found")
    question = page.inner_text(f"#quests [data-part={part}]")
    proofs = " ".join(f"{proof}." for proof in page.locator(".proofs li").all_inner_texts())
    return f"- *{question}* {page.inner_text('#quest-answer .found')} {proofs}"


def walk_through(page: Page, address: str, lang: str) -> None:
    """Does the steps in one language, and writes the page and its pictures."""
    end = "" if lang == "en" else f".{lang}"
    page.goto(f"{address}?lang={lang}")
    page.wait_for_function("() => document.getElementById('main').dataset.drawn > 0")
    text = page.input_value("#own-text")
    page.wait_for_timeout(200)
    page.screenshot(path=DOCS / f"report-sentence{end}.png")
    page.locator("#whole").screenshot(path=DOCS / f"report-whole{end}.png")
    answers = "\n".join(answer(page, part) for part in ("person", "verb", "tense"))
    head, *others = page.evaluate("[...answer.trials, ...answer.all].flatMap((each) => each.names)")
    for name in page.evaluate("answer.trials[0].names"):  # one head, or those that share the work
        page.locator(f".head[data-number='{page.evaluate(f'numberOf.get({name!r})')}'] .picture").click()
    page.mouse.move(640, 60)
    page.evaluate("scrollTo(0, 0)")
    page.screenshot(path=DOCS / f"report-silenced{end}.png")
    page.click("#wake")
    page.locator(f".head .name[aria-label^='{head},']").click()
    page.select_option("#beside", next(name for name in others if name != head))
    page.screenshot(path=DOCS / f"report-heads{end}.png")
    page.click("#close")
    words = PAGES[lang].format(text=text, answers=answers, head=head, end=end)
    (DOCS / f"report{end}.md").write_text(words, encoding="utf-8")


def main() -> None:
    from playwright.sync_api import sync_playwright

    report = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/verbs").resolve() / "report.html"
    chromium = next(filter(None, map(shutil.which, BROWSERS)), None)
    with sync_playwright() as playwright, TemporaryDirectory() as folder:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--headless", "--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme="light")
        for lang in PAGES:
            walk_through(page, within_reach(report, Path(folder)).as_uri(), lang)
        browser.close()
    print(f"wrote {DOCS / 'report.md'}, its Spanish twin, and four pictures of each")


if __name__ == "__main__":
    main()
