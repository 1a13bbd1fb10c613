"""A watched model never changes, a wrong reading never passes, and other threads are left alone."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from families import IDS, ROTARY, V, answer, build, inputs_of, model_of, shake
from matplotlib.image import imread, imsave
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import headwise as hw
from headwise.heads.seen import Seen
from headwise.models import reading
from headwise.models.sites import sites_of
from headwise.view.overlay import patches


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "gpt_oss", "t5", "whisper", "vit"])
def test_the_answer_is_that_of_the_model_to_the_bit(name: str) -> None:
    model = model_of(name)
    for padding in ("none", "left"):
        inputs = inputs_of(name, padding)
        with torch.no_grad():
            plain = answer(model(**inputs))
            with hw.watch(model):
                assert torch.equal(answer(model(**inputs)), plain)


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
    with (
        torch.no_grad(),
        hw.watch(model),
        pytest.raises(
            hw.HeadwiseError,
            match=rf"^LlamaAttention: in document \d, head \d, query \d+ its attention gives {number}, and what "
            rf"headwise reads of its mask, scale and biases gives {number}; watching it would give wrong numbers$",
        ),
    ):
        model(**inputs)


def test_what_is_not_read_is_refused() -> None:
    """An attention of the user's own, and a keyword that the function reads and we do not."""
    model, inputs = build("llama"), inputs_of("llama")

    def scaled(module: Any, q: Any, k: Any, v: Any, mask: Any, temper: float | None = None, **keywords: Any) -> Any:
        return sdpa_attention_forward(module, q, k, v, mask, **keywords)

    before = dict(AttentionInterface._global_mapping)
    try:
        AttentionInterface._global_mapping["sdpa"] = scaled
        with torch.no_grad(), hw.watch(model), pytest.raises(hw.HeadwiseError, match="LlamaAttention passes temper= "):
            model(**inputs, temper=0.5)
        AttentionInterface.register("mine", scaled)
        model.config._attn_implementation_internal = "mine"  # one config for all its parts
        with (
            torch.no_grad(),
            hw.watch(model),
            pytest.raises(hw.HeadwiseError, match=r"by 'mine', .*set_attn_implementation\('sdpa'\)"),
        ):
            model(input_ids=inputs["input_ids"])
    finally:
        AttentionInterface._global_mapping.clear()
        AttentionInterface._global_mapping.update(before)


def gated() -> Any:
    """Qwen3-Next: linear layers beside softmax ones, whose heads are gated before W_O."""
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
    config = tf.Qwen3NextConfig(
        **{**ROTARY, "num_hidden_layers": 4, "intermediate_size": 32, "hidden_size": 32},
        **sizes,
        linear_value_head_dim=8,
        num_experts=0,
        layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    )
    return shake(tf.Qwen3NextForCausalLM(config).eval())


def test_what_a_head_gives_is_read_where_it_enters_w_o() -> None:
    model, inputs = gated(), inputs_of("llama")
    projection = model.model.layers[2].self_attn.o_proj
    joined: list[Tensor] = []
    handle = projection.register_forward_pre_hook(lambda module, args: joined.append(args[0]))
    with torch.no_grad():
        model(**inputs)
        handle.remove()
        with hw.watch(model) as seen:
            model(**inputs)
    assert seen.notes == ["L0 to L1, L3: gated delta net, no map"] and {head[:2] for head in seen} == {"L2"}
    blocks = projection.weight.reshape(32, 6, 10)
    norms = torch.einsum("bthe,che->bthc", joined[0].unflatten(-1, (6, 10)), blocks).norm(dim=-1)
    for h in range(6):
        torch.testing.assert_close(torch.tensor(seen[f"L2.H{h}"].norm), norms[..., h].mean().item() * torch.ones(()))
        mean = joined[0].unflatten(-1, (6, 10))[:, :, h].mean((0, 1))
        torch.testing.assert_close(torch.from_numpy(seen[f"L2.H{h}"].mean_out), mean)
    with torch.no_grad(), hw.ablate(model, ["L2.H1"], how="mean", means=seen):
        handle = projection.register_forward_pre_hook(lambda module, args: joined.append(args[0]))
        model(**inputs)
        handle.remove()
    torch.testing.assert_close(joined[1][0, 3, 10:20], torch.from_numpy(seen["L2.H1"].mean_out))
    assert torch.equal(joined[1][..., :10], joined[0][..., :10])


def test_norms_that_mix_heads_are_said() -> None:
    model = shake(tf.BitNetForCausalLM(tf.BitNetConfig(**{**ROTARY, "hidden_size": 60})).eval())
    with torch.no_grad(), hw.watch(model) as seen:
        model(**inputs_of("llama"))
    assert seen.notes[0] == "L0: BitNetRMSNorm norms several heads at once before W_O: what one gives hangs on all"


class _Two(nn.Module):
    """Two attentions in each layer, under one name."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"attn": nn.ModuleList(build("gpt2").transformer.h[n].attn for n in range(2))})
            for _ in range(2)
        )


def test_every_attention_has_a_name_of_its_own() -> None:
    class Model(tf.PreTrainedModel):
        config_class = tf.GPT2Config

        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.config = build("gpt2").config
            self.body = _Two()

    names = [site.name for site in sites_of(Model())]
    assert names == ["attn0.L0", "attn1.L0", "attn0.L1", "attn1.L1"]


@pytest.fixture(scope="module")
def looked() -> tuple[Tensor, Seen]:
    """A vision-language model on two images of 4 x 4 patches and texts around them, the second one padded."""
    text = {**{key: ROTARY[key] for key in ROTARY if key not in IDS}, "model_type": "llama"}
    vision = {"hidden_size": 30, "num_hidden_layers": 2, "num_attention_heads": 5, "intermediate_size": 37}
    config = tf.LlavaConfig(
        text_config=text,
        vision_config={**vision, "image_size": 20, "patch_size": 5, "model_type": "clip_vision_model"},
        image_token_index=7,
        image_seq_length=16,
    )
    model = shake(tf.LlavaForConditionalGeneration(config).eval())
    ids = torch.randint(8, 17, (2, 29), generator=torch.Generator().manual_seed(0))
    ids[:, 6:22] = 7
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    pixels = torch.randn(2, 3, 20, 20, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), hw.watch(model, maps=[-3, -1, 29]) as seen:
        model(input_ids=ids, attention_mask=mask, pixel_values=pixels)
    return pixels, seen


def test_padding_is_that_of_the_right_sequence(looked: tuple[Tensor, Seen]) -> None:
    """Pixels are not cut by the padding of a text, nor are they its tokens; places of an image are no copies."""
    tower, words = looked[1]["vision_tower.L0.H0"], looked[1]["language_model.L1.H3"]
    assert len(tower.rows.entropy) == 2 * 17 and "same_token" not in tower.rows
    assert len(words.rows.entropy) == 29 + 24
    assert {"same_token", "induction", "image"} <= set(words.rows)
    assert words.rows.same_token[6:22].max() == 0 and words.rows["image"][:6].max() == 0
    assert words.rows["image"][22:29].min() > 0


def test_where_a_head_looks_is_drawn_over_the_image(looked: tuple[Tensor, Seen], tmp_path: Path) -> None:
    """The places of the image are told apart from the text, and each patch lies where it was cut."""
    pixels, seen = looked
    tower, words = seen["vision_tower.L0.H0"], seen["language_model.L1.H3"]
    assert words.map.shape == (2, 29) and np.array_equal(words.image_map, words.map[:, 6:22])
    assert words.image_map.sum(1) == pytest.approx(words.rows["image"][[-3, -1]], abs=1e-6)
    weights = patches(words, None)
    assert weights.shape == (4, 4) and weights[1, 2] == pytest.approx(words.map[:, 6 + 6].mean())
    assert patches(tower, None) == pytest.approx(tower.map.mean(0)[1:].reshape(4, 4))
    assert np.array_equal(patches(words, (2, 8)), weights.reshape(2, 8))
    imsave(tmp_path / "in.png", np.random.default_rng(0).random((36, 48, 3)))
    flat = np.arange(35.0).reshape(7, 5) + 1
    for image in (pixels[1], flat, tmp_path / "in.png"):
        hw.overlay(tmp_path / "out.png", image, words)
    assert flat.min() == 1  # the caller's image is left alone
    drawn = imread(tmp_path / "out.png")[30:, :, :3]  # below the line of text, 12.5 times as large
    assert drawn.shape == (450, 600, 3)
    light = drawn[1:-1, 1:-1].mean(-1)[:448, :596].reshape(4, 112, 4, 149).mean((1, 3))
    assert np.corrcoef(light.ravel(), weights.ravel())[0, 1] > 0.95
    (tmp_path / "no.png").write_bytes(b"no image")
    for image, head, grid, said in (
        (pixels[0], words, (5, 4), "sees 16 places of the image, fewer than 5 x 4; pass grid="),
        (tmp_path / "no.png", words, None, "no.png cannot be read as an image"),
        (np.zeros(7), words, None, r"an image is \(rows, columns, 3\) or \(3, rows, columns\), and this one is \(7,\)"),
    ):
        with pytest.raises(hw.HeadwiseError, match=said):
            hw.overlay(tmp_path / "d.png", image, head, grid)
    assert not (tmp_path / "d.png").exists()


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


def test_a_copy_made_inside_a_block_is_nobodys_business() -> None:
    for model, run in (
        (build("gpt2"), lambda model: model(**inputs_of("gpt2"))),
        (hw.MultiHeadAttention(30, 3), lambda model: model(torch.randn(1, 7, 30))),
    ):
        with torch.no_grad(), hw.watch(model) as seen:
            run(model)
            rows = len(seen["L0.H0"].rows.entropy)
            run(copy.deepcopy(model))
        assert len(seen["L0.H0"].rows.entropy) == rows


def test_blocks_may_end_in_any_order() -> None:
    model, inputs = model_of("gpt2"), inputs_of("gpt2")
    with torch.no_grad():
        plain = model(**inputs).logits
        first, second = hw.ablate(model, ["L0.H1"]), hw.watch(model)
        first.__enter__()
        seen = second.__enter__()
        first.__exit__(None, None, None)
        assert torch.equal(model(**inputs).logits, plain) and len(seen) == 6
        second.__exit__(None, None, None)
        model(**inputs)
    assert len(seen["L0.H0"].rows.entropy) == 58


def test_what_kinds_of_models_predict() -> None:
    """By what they do: a BERT of the class for causal models reads both sides unless its config says so."""
    from headwise.models.ask import context_of, predicts

    sizes = {
        "vocab_size": V,
        "hidden_size": 30,
        "num_hidden_layers": 1,
        "num_attention_heads": 3,
        "intermediate_size": 7,
    }
    table = [
        (tf.BertLMHeadModel(tf.BertConfig(**sizes)), "masked"),
        (tf.BertLMHeadModel(tf.BertConfig(**sizes, is_decoder=True)), "next"),
        (tf.MambaForCausalLM(tf.MambaConfig(vocab_size=V, hidden_size=30, num_hidden_layers=1)), "next"),
        (tf.LlamaForSequenceClassification(tf.LlamaConfig(**ROTARY)), None),
    ]
    for model, expected in table:
        with hw.watch(table[0][0]) as seen:
            assert predicts(model) == expected, type(model).__name__
        assert len(seen) == 0  # the trial is not watched
    assert context_of(tf.RobertaModel(tf.RobertaConfig(**sizes, max_position_embeddings=41, pad_token_id=1))) == 39
    assert context_of(tf.BertModel(tf.BertConfig(**sizes, max_position_embeddings=41))) == 41
    assert context_of(tf.XLNetModel(tf.XLNetConfig(vocab_size=V, d_model=32, n_layer=1, n_head=4, d_inner=7))) is None


def test_a_fixed_offset_is_judged_on_the_rows_that_have_it() -> None:
    """A head that always looks 5 back is positional, though the first rows of a short text have no such key."""
    from headwise.heads.measure import Measured
    from headwise.heads.tally import REACH, _shares

    argmax = (torch.arange(11) - 5).clamp(min=0)[None]
    nothing = torch.zeros(1, 1)
    shares = _shares(Measured({}, torch.arange(11), argmax, nothing, nothing, nothing, nothing), 0, 11)
    assert shares[0, REACH + 5] == 1.0
    assert shares[0, REACH + 6 :].max() == 0  # too few rows reach further back


def test_patching_keys_is_refused_where_heads_are_gated() -> None:
    model = gated()
    one, other = torch.randint(3, 17, (2, 11), generator=torch.Generator().manual_seed(0))
    found = hw.patch(model, one, other, target=(3, 4))
    assert set(found.effects) == {f"L2.H{h}" for h in range(6)}
    with pytest.raises(
        hw.HeadwiseError, match=r"^at='k': L2 gates or norms what its heads give before W_O, .*at='out'$"
    ):
        hw.patch(model, one, other, at="k", target=(3, 4))
