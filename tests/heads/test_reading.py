"""A watched model never changes, a wrong reading never passes, and other threads are left alone."""

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from cases import refuses
from families import IDS, ROTARY, V, build, inputs_of, model_of, shake
from helpers import watch_call
from small_models import past
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import headwise as hw
from headwise.heads.watch import Seen
from headwise.models import reading
from headwise.models.reading import Asked
from headwise.view.pictures import patches

WRONG = {
    "scale": lambda options: options._replace(scale=0.9 * options.scale),
    "mask": lambda options: options._replace(mask=None),
    "softcap": lambda options: options._replace(softcap=2.0),
    "sink": lambda options: options._replace(sink=torch.zeros(6)),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_reading_is_refused_with_both_numbers(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = model_of("llama"), inputs_of("llama")
    read = reading.options_of
    monkeypatch.setattr(reading, "options_of", lambda asked: WRONG[what](read(asked)))
    number = r"-?[\d.e-]+"
    said = rf"^LlamaAttention: in document \d, head \d, query \d+ its attention gives {number}, and what "
    said += rf"headwise reads of its mask, scale and biases gives {number}; watching it would give wrong numbers$"
    with pytest.raises(hw.HeadwiseError, match=said), torch.no_grad(), hw.watch(model):
        model(**inputs)


@torch.no_grad()
def test_a_document_that_turned_to_nan_does_not_make_the_others_unread() -> None:
    model, ids = model_of("llama"), inputs_of("llama")["input_ids"]
    embedded = model.get_input_embeddings()(ids)
    alone = watch_call(model, inputs_embeds=embedded[:1])
    embedded[1] = torch.nan
    seen = watch_call(model, inputs_embeds=embedded)
    rows = ids.shape[1]
    assert seen["L1.H2"].rows.entropy[:rows] == pytest.approx(alone["L1.H2"].rows.entropy, abs=1e-5)


@pytest.mark.parametrize("way", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_each_number_format_is_read_by_its_own_digits(dtype: torch.dtype, way: str) -> None:
    """The eager softmax of transformers is one of float32, in a float64 model too."""
    model, inputs = build("llama").to(dtype), inputs_of("llama")
    model.set_attn_implementation(way)
    seen = watch_call(model, **inputs)
    assert len(seen) == 12
    with torch.autocast("cpu", dtype=torch.bfloat16):  # its digits are those of what is multiplied
        assert len(watch_call(model.float(), **inputs)) == 12


def test_what_is_not_read_is_refused() -> None:
    """An attention of the user's own that reads a keyword which we do not; and half of the heads."""
    model, inputs = build("llama"), inputs_of("llama")

    def scaled(module: Any, q: Any, k: Any, v: Any, mask: Any, temper: float | None = None, **keywords: Any) -> Any:
        return sdpa_attention_forward(module, q * (temper or 1), k, v, mask, **keywords)

    before = dict(AttentionInterface._global_mapping)
    try:
        AttentionInterface._global_mapping["sdpa"] = scaled
        refuses(lambda: watch_call(model, **inputs, temper=0.5), "watching it would give wrong numbers")
    finally:
        AttentionInterface._global_mapping.clear()
        AttentionInterface._global_mapping.update(before)
    model = build("llama")
    for name in "qkv":  # as if another process had the other half of the heads
        matrix = model.model.layers[1].self_attn.get_submodule(f"{name}_proj").weight
        matrix.data = matrix.data[: len(matrix) // 2]
    refuses(lambda: watch_call(model, **inputs), "^L1: .* it has 6 heads, and its attention gives 3: ")


SEES = {"hidden_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 23}
SEES |= {"image_size": 28, "patch_size": 14}


def merged() -> tuple[Any, dict[str, Tensor]]:
    """A T5Gemma-2, whose decoder looks at its own tokens and at those of the encoder in one row of keys."""
    text = {**ROTARY, "sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}
    encoder = {"text_config": text, "vision_config": SEES}
    config = tf.T5Gemma2Config(encoder=encoder | {"mm_tokens_per_image": 4}, decoder=text, image_token_index=130)
    ids = inputs_of("llama")["input_ids"]
    inputs = {"input_ids": ids[:, :13], "decoder_input_ids": ids[:, 13:24]}
    return shake(tf.T5Gemma2ForConditionalGeneration(config).eval()), inputs


@pytest.mark.parametrize("use_cache", [False, True])
def test_keys_that_are_no_positions_of_one_text_have_no_distances(use_cache: bool) -> None:
    (model, inputs), head = merged(), "decoder.L1.H0"
    seen = watch_call(model, **inputs, use_cache=use_cache, maps=True)
    for name in ("distance", "spread", "self", "previous", "next", "same_token", "after_same"):
        with pytest.raises(hw.MissingError, match=f"there is no statistic {name!r} of this head"):
            getattr(seen[head], name)
    rows = seen[head].documents[-1]
    first = float(seen[head].map[-1, :, 0].mean())
    assert first > 0.01 and float(seen[head].rows.first[-rows:].mean()) == pytest.approx(first, abs=1e-6)
    site = head.rpartition(".")[0]
    assert [line for line in seen.notes if line.startswith(f"{site}: ")] == [
        f"{site}: its keys are pooled, or joined with others, and not the positions of one text: there are no distances"
    ]


def test_padding_on_the_right_is_left_out_of_later_parts_too() -> None:
    """The text model inside is given maps made of the padding, which the model around was given."""
    text = {**ROTARY, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7}
    config = tf.Gemma3Config(text_config=text, vision_config=SEES)
    model, ids = shake(tf.Gemma3ForConditionalGeneration(config).eval()), inputs_of("llama")["input_ids"][:1, :17]
    mask = (torch.arange(17) < 14).long()[None]
    whole = watch_call(model, ids, attention_mask=mask)
    with torch.no_grad(), hw.watch(model) as by_part:
        held = past(model(ids[:, :11], attention_mask=mask[:, :11]))
        model(ids[:, 11:], attention_mask=mask, **held)
    for name in whole:
        assert sum(by_part[name].documents) == sum(whole[name].documents) == 14
        assert by_part[name].entropy == pytest.approx(whole[name].entropy, abs=1e-4)


@cache
def llava() -> Any:
    """A vision-language model, whose images have 4 x 4 patches."""
    text = {**{key: ROTARY[key] for key in ROTARY if key not in IDS}, "model_type": "llama"}
    vision = {"hidden_size": 30, "num_hidden_layers": 2, "num_attention_heads": 5, "intermediate_size": 37}
    vision |= {"image_size": 20, "patch_size": 5, "model_type": "clip_vision_model"}
    config = tf.LlavaConfig(text_config=text, vision_config=vision, image_token_index=7, image_seq_length=16)
    return shake(tf.LlavaForConditionalGeneration(config).eval())


@pytest.fixture(scope="module")
def looked() -> tuple[Tensor, Seen]:
    """What `llava` does with two images and texts around them, the second one padded."""
    ids = torch.randint(8, 17, (2, 29), generator=torch.Generator().manual_seed(0))
    ids[:, 6:22] = 7
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    pixels = torch.randn(2, 3, 20, 20, generator=torch.Generator().manual_seed(0))
    model = llava()
    seen = watch_call(model, input_ids=ids, attention_mask=mask, pixel_values=pixels, maps=[-3, -1, 29])
    return pixels, seen


def test_words_alone_are_patched_in_a_model_that_sees() -> None:
    """The blocks of its vision tower do not run, and are not asked for."""
    model = llava()
    clean, corrupt = torch.tensor([[8, 9, 11, 13, 12]]), torch.tensor([[8, 9, 10, 13, 12]])
    names = ["language_model.L0.H1", "language_model.L1.H0"]
    found = hw.patch(model, clean, corrupt, target=(3, 5), heads=names, together=True)
    assert found.effects["together"].mean != 0
    found = hw.patch(model, clean, corrupt, target=(3, 5), heads=names, at="q")
    assert all(effect.mean != 0 for effect in found.effects.values())
    assert {n.partition(".")[0] for n in hw.patch(model, clean, corrupt, target=(3, 5)).effects} == {"language_model"}


def test_padding_is_that_of_the_right_sequence(looked: tuple[Tensor, Seen]) -> None:
    """Pixels are not cut by the padding of a text, nor are they its tokens; places of an image are no copies."""
    tower, words = looked[1]["vision_tower.L0.H0"], looked[1]["language_model.L1.H3"]
    assert len(tower.rows.entropy) == 2 * 17 and "same_token" not in tower.rows
    assert len(words.rows.entropy) == 29 + 24
    assert {"same_token", "after_same", "image"} <= set(words.rows)
    assert words.rows.same_token[6:22].max() == 0 and words.rows["image"][:6].max() == 0
    assert words.rows["image"][22:29].min() > 0


def test_where_a_head_looks_is_drawn_over_the_image(looked: tuple[Tensor, Seen], tmp_path: Path) -> None:
    """The places of the image are told apart from the text, and each patch lies where it was cut."""
    from matplotlib.image import imread  # takes half a second

    pixels, seen = looked
    tower, words = seen["vision_tower.L0.H0"], seen["language_model.L1.H3"]
    assert words.map.shape == (2, 2, 29) and np.array_equal(words.image_map, words.map[-1, :, 6:22])
    assert words.image_map.sum(1) == pytest.approx(words.rows["image"][[-3, -1]], abs=1e-6)
    weights = patches(words, None)
    assert weights.shape == (4, 4) and weights[1, 2] == pytest.approx(words.map[-1, :, 6 + 6].mean())
    assert patches(tower, None) == pytest.approx(tower.map[-1].mean(0)[1:].reshape(4, 4))
    assert np.array_equal(patches(words, (2, 8)), weights.reshape(2, 8))
    flat = np.arange(35.0).reshape(7, 5) + 1
    for image in (pixels[1], flat, np.random.default_rng(0).random((36, 48, 4))):
        hw.overlay(tmp_path / "out.png", image, words)
    assert flat.min() == 1  # the caller's image is left alone
    drawn = imread(tmp_path / "out.png")[30:, :, :3]  # below the line of text, 12.5 times as large
    assert drawn.shape == (450, 600, 3)
    light = drawn[1:-1, 1:-1].mean(-1)[:448, :596].reshape(4, 112, 4, 149).mean((1, 3))
    assert np.corrcoef(light.ravel(), weights.ravel())[0, 1] > 0.95
    for image, head, grid, said in (
        (pixels[0], words, (5, 4), "sees 16 places of the image, not 5 x 4; pass grid="),
        (pixels[0], words, (0, 4), "sees 16 places of the image, not 0 x 4; pass grid="),
        (tmp_path / "no.png", words, None, r"is no array of numbers; matplotlib\.image\.imread reads a file"),
        (np.zeros(7), words, None, r"an image is \(rows, columns, 3\) or \(3, rows, columns\), and this one is \(7,\)"),
    ):
        with pytest.raises(hw.HeadwiseError, match=said):
            hw.overlay(tmp_path / "d.png", image, head, grid)
    assert not (tmp_path / "d.png").exists()


@pytest.mark.slow
def test_eight_threads_watch_and_ablate_one_model() -> None:
    """Each thread counts its own calls; what one silences the others do not miss."""
    model = model_of("llama")
    ours = nn.ModuleDict({"a": hw.MultiHeadAttention(30, 3, mask=hw.Causal())}).eval()
    x = torch.randn(2, 7, 30, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        plain, own = model(**inputs_of("llama")).logits, ours["a"](x)
        with hw.ablate(model, ["L0.H1"]):
            silenced = model(**inputs_of("llama")).logits
    start = threading.Barrier(8)

    def work(n: int) -> None:
        start.wait()
        for _ in range(2):
            with torch.no_grad(), hw.watch(model) as seen, hw.watch(ours) as seen_own:
                for _ in range(n % 3 + 1):
                    if n % 2:
                        assert torch.equal(model(**inputs_of("llama")).logits, plain)
                    else:
                        with hw.ablate(model, ["L0.H1"]), hw.ablate(ours, ["L0.H1"]):
                            assert torch.equal(model(**inputs_of("llama")).logits, silenced)
                            assert not torch.equal(ours["a"](x), own)
                    assert torch.equal(ours["a"](x), own)
            assert len(seen["L1.H0"].rows.entropy) == 58 * (n % 3 + 1)
            assert len(seen_own["L0.H0"].rows.entropy) == 14 * (n % 3 + 1) * (1 if n % 2 else 2)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert not ours["a"].watchers


def test_blocks_end_in_any_order_and_copies_are_nobodys_business() -> None:
    for model, run in (
        (build("gpt2"), lambda model: model(**inputs_of("gpt2"))),
        (build("llama"), lambda model: model(**inputs_of("llama"))),
        (hw.MultiHeadAttention(30, 3), lambda model: model(torch.randn(1, 7, 30))),
    ):
        with torch.no_grad(), hw.watch(model) as seen:
            run(model)
            rows = len(seen["L0.H0"].rows.entropy)
            twin = copy.deepcopy(model)
            run(twin)
            again = pickle.loads(pickle.dumps(twin))  # what listens could not be pickled, and is not copied along
            pickle.dumps(model)
            run(again)
        assert len(seen["L0.H0"].rows.entropy) == rows
        run(pickle.loads(pickle.dumps(twin)))
    model, inputs = model_of("gpt2"), inputs_of("gpt2")
    with torch.no_grad():
        plain = model(**inputs).logits
        first, second = hw.ablate(model, ["L0.H1"]), hw.watch(model)
        first.__enter__()
        seen = second.__enter__()
        silenced = model(**inputs).logits
        first.__exit__(None, None, None)
        assert torch.equal(model(**inputs).logits, plain) and not torch.equal(silenced, plain)
        second.__exit__(None, None, None)
        model(**inputs)
    assert len(seen["L0.H0"].rows.entropy) == 2 * 58


def eager_attention_forward(module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float, dropout: float = 0) -> Any:
    """Has the arguments that every such function has, and gives (B,T,H,E); a mask hides nothing here."""
    return (hw.attend(q, k, v, scale=scaling) * (1 + dropout)).transpose(1, 2), None


def asked(**changes: Any) -> Asked:
    """A call of 2 documents, 3 heads and 7 queries, that gave what its scale of 0.5 asks for."""
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(2, 3, 7, 5, generator=generator) for _ in range(3))
    out = hw.attend(q, k, v, scale=0.5)
    call = Asked(nn.Module().eval(), q, k, v, None, {"scaling": 0.5}, "eager", eager_attention_forward, out)
    return call._replace(**changes)


def test_a_call_under_dropout_is_checked_by_what_its_function_gives_without() -> None:
    dropped = {"scaling": 0.5, "dropout": 0.1}
    wrong = 2 * asked().out
    reading.read_call(asked())
    with torch.autocast("cpu", dtype=torch.bfloat16):  # which takes values that are narrower than the keys
        assert reading.read_call(asked(v=asked().v.bfloat16())).v.dtype == torch.float32
    of_sdpa = asked(keywords=dropped, implementation="sdpa", mask=torch.ones(2, 1, 7, 7).bool(), out=wrong)
    for call in (of_sdpa, asked(keywords=dropped, module=nn.Module().train(), out=wrong)):
        reading.read_call(call)
        with pytest.raises(hw.HeadwiseError, match="watching it would give wrong numbers"):
            reading.read_call(call._replace(function=lambda *inputs, **keywords: (wrong.transpose(1, 2), None)))


def test_a_reading_looks_at_the_ends_and_between() -> None:
    # And some between: a model that is read wrong is so from some query on, or up to it.
    for rows in (slice(0, 1), slice(6, 7), slice(1, 4), slice(3, 6)):
        wrong = asked().out.clone()
        wrong[1, 2, rows] += 1
        with pytest.raises(hw.HeadwiseError, match="in document 1, head 2, query"):
            reading.read_call(asked(out=wrong))


def test_a_call_that_cannot_be_read_is_refused() -> None:
    # Learned queries: (1,H,T,D) for keys of two documents.
    call = asked()
    out = hw.attend(call.q[:1].expand(2, -1, -1, -1), call.k, call.v, scale=0.5)
    assert reading.read_call(call._replace(q=call.q[:1], out=out)).q.shape == (2, 3, 7, 5)
    with pytest.raises(hw.HeadwiseError, match="gives its attention queries of 3 axes; 4 are needed"):
        reading.read_call(asked(q=asked().q[0]))


@pytest.mark.parametrize(
    ("dtype", "way", "digits", "loose"),
    [
        (torch.float32, "sdpa", 2**-23, 4),
        (torch.bfloat16, "sdpa", 2**-7, 1),
        (torch.float64, "sdpa", 2**-52, 4),
        (torch.float64, "eager", 2**-23, 4),
    ],
)
def test_a_reading_may_err_by_rounding_and_no_more(dtype: torch.dtype, way: str, digits: float, loose: int) -> None:
    """Of the largest value, 8 units of the last place and as many as the largest score has; four times in full sums."""
    q, k, v = (x.to(dtype) for x in asked()[1:4])
    steps = hw.trace(q, k, v, scale=0.5)
    bound = digits * (8 + float(steps.scores.abs().max())) * loose * float(v.abs().max())
    keywords = {"scaling": 0.5, "is_causal": False}
    call = asked(q=q, k=k, v=v, implementation=way, keywords=keywords, out=hw.attend(q, k, v, scale=0.5))
    call.out[1, 2, 6, 4] += 0.8 * bound
    reading.read_call(call)
    call.out[1, 2, 6, 4] += 0.4 * bound
    refuses(lambda: reading.read_call(call), "in document 1, head 2, query 6")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_numbers_in_the_lower_half_of_a_format_forbid(dtype: torch.dtype) -> None:
    """Models add up such masks with biases, so that it need not be the most negative number itself."""
    low = torch.finfo(dtype).min
    allowed, bias = reading.masks_of(torch.tensor([[low, 0.75 * low, 0.25 * low, -3.0, 0.0]], dtype=dtype))
    assert allowed.array.flatten().tolist() == [False, False, True, True, True]
    assert bias.array.flatten()[[0, 1, 3, 4]].tolist() == [0.0, 0.0, -3.0, 0.0]


class LayersOfAText(nn.Module):
    """Runs the layers of a text model, and never that model."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 7}
        self.text = tf.BertModel(tf.BertConfig(vocab_size=V, **sizes))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        states = self.text.embeddings(input_ids)
        forbidden = ~attention_mask.bool()[:, None, None]
        for layer in self.text.encoder.layer:
            states = layer(states, forbidden * torch.finfo(states.dtype).min)
        return states


class PlacesBesideAText(nn.Module):
    """The places of an image look at a text."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.cross = nn.Embedding(V, 24), hw.MultiHeadAttention(24, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, pixel_values: Tensor) -> Tensor:
        mask = hw.Allowed(attention_mask.bool()[:, None, None])
        return self.cross(pixel_values, self.embedding(input_ids), mask=mask)


def test_padding_is_that_of_the_sequence_which_a_layer_reads() -> None:
    ids, places = torch.arange(14).reshape(2, 7), torch.randn(2, 11, 24)
    padding = torch.ones_like(ids)
    padding[1, :3] = 0
    text, beside = LayersOfAText().eval(), PlacesBesideAText().eval()
    with torch.no_grad(), hw.watch(text) as inside, hw.watch(beside, maps=True) as across:
        text(ids, padding)
        beside(ids, padding, places)
    head, other = inside["L0.H1"], across["L0.H1"]
    assert len(head.rows["entropy"]) == 7 + 4 and len(other.rows["first"]) == 2 * 11
    assert np.allclose(other.rows["first"][11:], other.map[1, :, 3], atol=1e-5)
