"""Why a model predicts what it predicts: the heads that wrote it, where they looked, and the paths between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.heads.attribution import Attribution, attribute
from headwise.heads.effect import ablate
from headwise.heads.study import Study
from headwise.models.ask import evaluating, logits
from headwise.models.open import Folder, TextTokens
from headwise.models.stacks import layers_of
from headwise.records import Story, StoryHead, StoryPath

Progress = Callable[[str, int, int], None]


@torch.no_grad()
def why(
    folder: Folder,
    prompt: str,
    answer: str | None = None,
    corrupt: str | None = None,
    progress: Progress = lambda what, done, total: None,
) -> Story:
    """The story of one prediction.

    answer   a text whose first token is explained; default what the model predicts
    corrupt  a text of as many tokens whose answer is another: heads are then ranked by what they carry of the
             difference, and the paths between them are followed
    progress is called with the name of a stage, the steps done and of all

    Without `corrupt` the answer is compared with the likeliest other token.
    """
    if folder.tokens is None:
        raise HeadwiseError(f"{folder.name} has no tokenizer, so it reads no prompt")
    model, tokens = folder.model, folder.tokens
    ids = _ids(folder, prompt)
    with evaluating(model):
        row = logits(model, torch.tensor([ids]), last=True)[0, -1].double()
        chances = row.softmax(-1)
        token = int(row.argmax()) if answer is None else _answer(tokens, prompt, ids, answer, row)
        study = None if corrupt is None else _study(folder, ids, _ids(folder, corrupt), token)
        rest = row.index_fill(0, torch.tensor([token]), -torch.inf)
        other = study.target[1] if study is not None else int(rest.argmax())
        parts = attribute(model, torch.tensor(ids), (token, other))
        effects = {} if study is None else study.effects("out", list(study.names("out")), None)
        heads = _parts(parts, effects)
        heads[: Story.MOST] = _silenced(model, torch.tensor([ids]), heads[: Story.MOST], token, progress)
        paths = [] if study is None else _paths(study, effects, progress)
    shown = tokens.shown
    return Story(
        model=folder.name,
        tokens=tuple(shown(ids)),
        corrupted=None if corrupt is None else tuple(shown(_ids(folder, corrupt))),
        answer=shown([token])[0],
        other=shown([other])[0],
        predicted=shown([int(row.argmax())])[0],
        predicted_probability=float(chances.max()),
        probability=float(chances[token]),
        logit=parts.logit,
        embedding=parts.embedding,
        bias=parts.bias,
        feed_forwards=parts.feed_forwards,
        heads=tuple(heads),
        paths=tuple(paths),
    )


def _ids(folder: Folder, text: str) -> list[int]:
    assert folder.tokens is not None
    if not text.strip():
        raise HeadwiseError("the prompt is empty; pass a text")
    ids = list(folder.tokens.prompt(text))
    if len(ids) < 2:
        raise HeadwiseError(f"the prompt {text!r} is {len(ids)} token; pass one of two or more")
    return ids


def _answer(tokens: TextTokens, prompt: str, ids: Sequence[int], answer: str, row: Tensor) -> int:
    """The first token of the answer, as it stands behind the prompt: with a space before it, or without."""
    choices, unknown = [], None
    for text in (f"{prompt.rstrip()} {answer.strip()}", prompt + answer):
        try:
            longer = list(tokens.prompt(text))
        except HeadwiseError as error:  # a vocabulary of characters may have no space
            unknown = unknown or error
            continue
        if longer[: len(ids)] == list(ids) and len(longer) > len(ids):
            choices.append(longer[len(ids)])
    if not choices:
        raise unknown or HeadwiseError(
            f"the answer {answer!r} is no token of its own behind the prompt; end the prompt before it"
        )
    return max(choices, key=lambda token: float(row[token]))


def _study(folder: Folder, clean: list[int], corrupted: list[int], token: int) -> Study:
    if len(clean) != len(corrupted):
        shown = [" ".join(folder.tokens.shown(ids)) for ids in (clean, corrupted)]  # type: ignore[union-attr]
        raise HeadwiseError(
            f"the prompt is {len(clean)} tokens ({shown[0]}) and the corrupted one {len(corrupted)} ({shown[1]}); both "
            f"need as many, each in its place"
        )
    row = logits(folder.model, torch.tensor([corrupted]), last=True)[0, -1]
    other = int(row.argmax())
    if other == token:
        raise HeadwiseError(
            f"the corrupted text has the same answer, {folder.tokens.shown([token])[0]!r}; "  # type: ignore[union-attr]
            f"pass one that the model answers differently"
        )
    return Study(folder.model, layers_of(folder.model), torch.tensor(clean), torch.tensor(corrupted), (token, other))


def _parts(parts: Attribution, effects: dict[str, float]) -> list[StoryHead]:
    heads = []
    for name, adds in parts.heads.items():
        weights = parts.weights[name]
        looks = tuple((int(t), float(weights[t])) for t in weights.argsort()[::-1][:3])
        heads.append(StoryHead(name, adds, looks, None, effects.get(name)))
    return sorted(heads, key=lambda part: -abs(part.adds if part.brings is None else part.brings))


def _silenced(
    model: nn.Module, ids: Tensor, heads: Sequence[StoryHead], token: int, progress: Progress
) -> list[StoryHead]:
    """With the change of the answer's log-probability without each of these heads, in nats."""

    def chance() -> float:
        return float(logits(model, ids, last=True)[0, -1].double().log_softmax(-1)[token])

    plain, measured = chance(), []
    for number, part in enumerate(heads, 1):
        with ablate(model, [part.head]):
            measured.append(replace(part, without=chance() - plain))
        progress("silencing heads", number, len(heads))
    return measured


def _paths(study: Study, effects: dict[str, float], progress: Progress) -> list[StoryPath]:
    """The clear paths between heads that carry something, the strongest first."""
    clear = (name for name in effects if abs(effects[name]) >= Story.CLEAR)
    carriers = sorted(clear, key=lambda name: -abs(effects[name]))
    jobs = [(receiver, at) for receiver in carriers[: Story.MOST] for at in "qkv"]
    paths: dict[tuple[str, str, str], StoryPath] = {}
    for number, (head, at) in enumerate(jobs, 1):
        site, (h,) = study.names("out")[head]
        receiver = next(name for name, place in study.names(at).items() if place[0] == site and h in place[1])
        if not any(key[1:] == (receiver, at) for key in paths):
            for sender, effect in study.paths(receiver, at, None).items():
                if abs(effect) >= Story.CLEAR:
                    paths[sender, receiver, at] = StoryPath(sender, receiver, head, at, effect)
        progress("following paths", number, len(jobs))
    return sorted(paths.values(), key=lambda path: -abs(path.effect))
