"""Running a model: what it answers, its body alone, what its layers give; and which classes can be asked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from headwise.errors import HeadwiseError
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


def gives_logits(model: nn.Module) -> bool:
    """Does the model end in a distribution over tokens, so that a divergence can be taken?"""
    return isinstance(model, GPT) or type(model).__name__.endswith((*NEXT, *MASKED))


def answers(model: nn.Module, ids: Tensor) -> Tensor:
    """Logits of ids (B,T), over the last axis; of a model that gives none, its last hidden states (B,T,C)."""
    found: Any = _run(model, ids)
    if isinstance(found, Tensor):
        return found
    result: Tensor = found.logits if gives_logits(model) else found.last_hidden_state
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
