"""Running a model: what it answers, its body alone, what its layers give; and which classes can be asked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from headwise.errors import HeadwiseError
from headwise.gpt.forms import hf_config
from headwise.gpt.gpt import GPT
from headwise.models.weights import blocks, family_of

NEXT, MASKED = ("ForCausalLM", "LMHeadModel"), ("ForMaskedLM",)  # how transformers ends the names of its classes


def check_class(model: nn.Module) -> None:
    """Raise HeadwiseError for a model whose answers are neither predictions of tokens nor hidden states."""
    name = type(model).__name__
    if not (isinstance(model, GPT) or name.endswith((*NEXT, *MASKED, "Model"))):
        raise HeadwiseError(
            f"{name} answers with something other than tokens, and what sharing or pruning costs is measured on "
            f"those; save the model without that head, or with its language-model head"
        )


def predicts(model: nn.Module) -> Literal["next", "masked"] | None:
    """Which tokens the model gives a distribution of: the next one, the masked ones; None for hidden states alone."""
    name = type(model).__name__
    if isinstance(model, GPT) or name.endswith(NEXT):
        return "next"
    return "masked" if name.endswith(MASKED) else None


def answers(model: nn.Module, ids: Tensor) -> Tensor:
    """Logits of ids (B,T), over the last axis; of a model that gives none, its last hidden states (B,T,C)."""
    found: Any = _run(model, ids)
    if isinstance(found, Tensor):
        return found
    result: Tensor = found.logits if predicts(model) else found.last_hidden_state
    return result


def run_body(model: nn.Module, ids: Tensor) -> None:
    """Run the layers on ids (B,T) for what hooks see there; the logits, by far the largest tensor, are left out."""
    if isinstance(model, GPT):
        model(ids, last_only=True)
    else:
        _run(getattr(model, "base_model", model), ids)


def _run(model: nn.Module, ids: Tensor) -> object:
    if isinstance(model, GPT):
        return model(ids)
    return model(input_ids=ids, **({} if family_of(model) == "bert" else {"use_cache": False}))


def decoder(model: nn.Module, prompt: Tensor) -> Callable[[Tensor], object]:
    """A function that gives the model one more token (1,1) after it has read the prompt (1,T), with its own cache."""
    if isinstance(model, GPT):
        caches = model.new_caches()
        model(prompt, caches, last_only=True)
        return lambda token: model(token, caches, last_only=True)
    cache = model(input_ids=prompt, use_cache=True).past_key_values
    return lambda token: model(input_ids=token, past_key_values=cache, use_cache=True)


def config_fields(model: nn.Module) -> dict[str, Any]:
    """The fields of the model's config.json."""
    config: Any = model.config
    fields: dict[str, Any] = hf_config(config, None) if isinstance(model, GPT) else config.to_dict()
    return fields


@contextmanager
def hooked(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """The hooks are there within this block and gone after it."""
    held = list(handles)
    try:
        yield
    finally:
        for handle in held:
            handle.remove()


@contextmanager
def hidden_states(model: nn.Module) -> Iterator[list[Tensor]]:
    """Inside this block the list gets the output (B,T,C) of each layer that runs."""
    found: list[Tensor] = []

    def keep(module: nn.Module, inputs: Any, output: Any) -> None:
        found.append(output[0] if isinstance(output, tuple) else output)

    with hooked(block.register_forward_hook(keep) for block in blocks(model)):
        yield found
