"""A text that the model begins and a form of it continues is the text of the model, whoever looks on."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

import headwise as hw
from headwise.gpt.generate import Texts
from headwise.models.generate import Rows, prompt_ids

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]
SHAPE = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "initializer_range": 0.3}
SHAPE |= {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 71}
SHAPE |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
GEMMA = Path(__file__).parents[2] / "build/models/gemma-3-270m"


def made(kind: str, **options: Any) -> Any:
    torch.manual_seed(1)
    return getattr(tf, f"{kind}ForCausalLM")(getattr(tf, f"{kind}Config")(**SHAPE | options)).eval()


def half(kind: str, **options: Any) -> Any:
    return made(kind, **options).bfloat16()


def gemma(**options: Any) -> Any:
    torch.manual_seed(1)
    return tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**SHAPE | {"sliding_window": 7} | options)).eval().bfloat16()


def stock(model: Any, prompt: list[int], n_tokens: int) -> list[int]:
    text = model.generate(torch.tensor([prompt]), max_new_tokens=n_tokens, do_sample=False, pad_token_id=0)
    return text[0, len(prompt) :].tolist()


@pytest.mark.parametrize("make", [gemma, lambda: half("Llama"), lambda: half("Qwen2")])
def test_in_bfloat16_every_bit_of_a_step_is_that_of_the_model(make: Any) -> None:
    model = make()
    plain = list(model.modules())
    rows = Rows(model)
    for ids in (torch.tensor([PROMPT]), torch.tensor([[7]]), torch.tensor([[7], [8]])):
        expected = model(ids).logits
        with rows:
            assert torch.equal(model(ids).logits, expected)
    assert list(model.modules()) == plain and not any("forward" in vars(module) for module in plain)
    assert list(hw.generate(model, PROMPT, 31, temperature=0)) == stock(model, PROMPT, 31)


def test_a_row_is_multiplied_with_the_weight_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row goes to the weight as it was laid out, several do not, and a weight that changes is read anew."""
    linear = torch.nn.Linear(48, 80).bfloat16().requires_grad_(False)
    model, shapes = torch.nn.Sequential(linear), list[tuple[int, ...]]()
    product = torch.ops.mkldnn._linear_pointwise

    def noted(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        shapes.append(tuple(x.shape))
        return product(x, *rest)

    with monkeypatch.context() as bits:
        bits.setattr("headwise.models.generate.torch.equal", lambda a, b: True)  # as on a processor that gives the same
        rows = Rows(model)
    one, two = (torch.ones(n, 48).bfloat16() for n in (1, 2))
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", noted)
    with rows:
        before = model(one)
        model(two), model(one.float().bfloat16()[None])
        assert shapes == [(1, 48), (1, 1, 48)]
        linear.weight.mul_(2)
        linear.bias.zero_()
        assert torch.allclose(model(one), torch.nn.functional.linear(one, linear.weight)) and len(shapes) == 2
    assert not torch.equal(model(one), before)


def test_other_bits_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwise.models.generate.torch.equal", lambda a, b: False)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8).bfloat16())
    with Rows(model):
        assert "forward" not in vars(model[0])


@pytest.mark.parametrize("options", [{}, {"sliding_window": 7}], ids=str)
def test_the_form_goes_on_from_what_the_model_has_read(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values are handed over; those that a window has dropped are read again."""
    model, calls, call = made("Mistral" if options else "Llama", **options), list[int](), Texts.__call__

    def noted(self: Texts, ids: Any, last: int = 1) -> torch.Tensor:
        calls.append(len(ids[0]))
        return call(self, ids, last)

    monkeypatch.setattr(Texts, "__call__", noted)
    text = list(hw.generate(model, PROMPT, 23, temperature=0))
    assert text == stock(model, PROMPT, 23)
    assert calls[1:] == [len(PROMPT) + 1 if options else 1, *[1] * 21]  # the first call tries the form on a few tokens


@pytest.mark.parametrize("watched", [1, 11])
def test_who_begins_to_watch_sees_the_model_and_the_text_stays(watched: int) -> None:
    """In the step in which the form would be made, and later, when it has read."""
    for model in (made("Llama"), gemma()):
        expected, text = list(hw.generate(model, PROMPT, 31, temperature=0, cache=False)), []
        stream = hw.generate(model, PROMPT, 31, temperature=0)
        for n in range(31):
            if n != watched:
                text.append(next(stream))
                continue
            with hw.watch(model) as seen:
                text.append(next(stream))
            assert seen["L1.H2"].n_rows >= 1
        assert text == expected


@pytest.mark.slow
@pytest.mark.skipif(not GEMMA.is_dir(), reason="`make models` has not built Gemma 3 270M")
def test_gemma_writes_what_stock_transformers_writes() -> None:
    model = hw.open(GEMMA)
    model.generation_config.eos_token_id = None  # both write on
    prompt = prompt_ids(model, "The keys to the old cabinet in the corner")
    assert list(hw.generate(model, prompt, 9, temperature=0)) == stock(model, prompt, 9)
