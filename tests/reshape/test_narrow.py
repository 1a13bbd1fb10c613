"""Windows by layer: who gets one, what the loss says with the windows in place, and the folder that stock reads."""

import copy
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from cases import every, refuses, refuses_table
from processes import verified_here
from reshape_models import ROTARY, V, build
from small_models import past
from torch import nn

import headwise as hw
from headwise import HeadwiseError
from headwise.models.ask import logits, next_token_losses
from headwise.models.open import open_folder
from headwise.models.weights import cannot_narrow, family_of, windows_of, with_windows
from headwise.reshape.narrow import seeing

sys.path.append(str(Path(__file__).parents[1] / "heads"))
import planted

IDS = torch.randint(V, (3, 17), generator=torch.Generator().manual_seed(1))
BUILD: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**ROTARY, initializer_range=0.3)),
    "mistral": lambda: tf.MistralForCausalLM(tf.MistralConfig(**ROTARY, initializer_range=0.3, sliding_window=None)),
}
FAMILIES = (*BUILD, "rope, GQA", "qk-norm", "no RoPE", "qwen2", "qwen3")


@every("name", FAMILIES)
def test_a_child_with_windows_is_the_model_seen_through_them(name: str) -> None:
    model = BUILD[name]().eval() if name in ("llama", "mistral") else build(name, dtype=torch.float32)
    before = copy.deepcopy(model.state_dict())
    child = with_windows(model, [5, None])
    assert windows_of(child) == [5, None] and windows_of(model) == [None, None]
    with torch.no_grad(), seeing(model, {"L0": hw.Window(4, 0)}):
        seen = logits(model, IDS)
    with torch.no_grad():
        whole, narrow = logits(model, IDS), logits(child, IDS)
    torch.testing.assert_close(narrow, seen, atol=1e-5, rtol=1e-4)
    assert (whole[:, :5] - narrow[:, :5]).abs().max() < 1e-4 < (whole[:, 5:] - narrow[:, 5:]).abs().max()
    assert all(torch.equal(before[key], tensor) for key, tensor in model.state_dict().items())
    again = with_windows(child, [5, 5])
    with torch.no_grad(), seeing(model, {"L0": hw.Window(4, 0), "L1": hw.Window(4, 0)}):
        torch.testing.assert_close(logits(again, IDS), logits(model, IDS), atol=1e-5, rtol=1e-4)


def gemma() -> Any:
    """Layers 0 and 2 have a window, and other angles of RoPE than layer 1."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    sizes = {**ROTARY, "num_hidden_layers": 3, "num_key_value_heads": 1, "max_position_embeddings": 41}
    config = tf.Gemma3TextConfig(**sizes, initializer_range=0.3, sliding_window=16, layer_types=kinds)
    return tf.Gemma3ForCausalLM(config).eval()


def test_a_gemma_3_gets_shorter_windows_where_it_has_some(tmp_path: Path) -> None:
    """A layer without a window keeps its angles of RoPE, and so must stay what it is."""
    torch.manual_seed(0)
    model, ids = gemma(), torch.randint(V, (7, 37))
    shorter = hw.narrow(model, text=ids, tolerance=9.0, window=5)
    assert windows_of(shorter.model) == [5, None, 5] and windows_of(model) == [16, None, 16]
    with torch.no_grad(), seeing(model, {name: hw.Window(4, 0) for name in ("L0", "L2")}):
        torch.testing.assert_close(logits(shorter.model, ids), logits(model, ids), atol=1e-5, rtol=1e-4)
    refuses(lambda: hw.narrow(model, text=ids, window=16), r"window=16 is no smaller than today's, of 16 tokens")
    refuses(lambda: hw.narrow(model, text=ids, cache=0.1, window=2), "windows of 2 tokens leave 0.62 of the cache")


def test_a_llama_is_a_qwen2_whose_biases_are_zero() -> None:
    scaled = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 2.0, "low_freq_factor": 1.0}
    scaled |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 9}
    config = tf.LlamaConfig(**ROTARY, rope_parameters=scaled, attention_bias=True)
    llama = tf.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in llama.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.0 if "o_proj" in name else 0.5)
        child = with_windows(llama, [17, None])  # a window as long as the text: the same function
        assert isinstance(child, tf.Qwen2ForCausalLM)
        torch.testing.assert_close(child(IDS).logits, llama(IDS).logits, atol=1e-6, rtol=1e-5)
        llama.model.layers[1].self_attn.o_proj.bias[3] = 0.1
    assert "o_proj.bias" in str(cannot_narrow(llama))


@every("name", ["gpt2", "bert", "gemma"])
def test_a_family_without_windows_is_refused_by_name(name: str) -> None:
    kinds: dict[str, Any] = {"gemma": lambda: tf.GemmaForCausalLM(tf.GemmaConfig(**ROTARY))}
    model = kinds[name]() if name in kinds else build(name, dtype=torch.float32)
    with pytest.raises(HeadwiseError, match=family_of(model).name if name != "bert" else "BertModel|Bert"):
        hw.narrow(model, tolerance=1.0, text=IDS)


@pytest.fixture(scope="module")
def model() -> hw.GPT:
    """Layer 1 looks up what follows earlier copies; layers 0 and 2 look one token back."""
    return planted.retrieval_model({"L1.KV0", "L1.KV2"})


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    """Documents that repeat themselves far away: a layer that looks up is needed."""
    half = torch.randint(37, (7, 65), generator=torch.Generator().manual_seed(2))
    return torch.cat([half, half], 1)


@pytest.mark.slow
def test_layers_that_look_things_up_keep_all(model: hw.GPT, ids: torch.Tensor) -> None:
    child = hw.narrow(model, tolerance=0.001, text=ids)
    assert windows_of(child.model) == [16, None, 16]
    assert any(note.startswith("L1 keeps all: L1.KV0 finds needles") for note in child.notes)
    assert child.damage.cache_bytes.before == 3 * 3 * (131 + 131) * 4
    rows = (16 + 131 + 16) / (3 * 131)
    assert child.damage.cache_bytes.after == pytest.approx(child.damage.cache_bytes.before * rows)
    assert child.details["share"] == pytest.approx(rows)
    assert "at 131 tokens, 2.4 x as many texts in 24 GiB, loss +0.000 nats, decode x" in child.won
    assert child.won.startswith("cache 9.211 -> 3.82 KiB a token")
    loss = child.damage.loss
    assert loss is not None
    held_out = ids[6:]  # every second of the last tenth
    with torch.no_grad():
        exact = [float(next_token_losses(each, held_out).mean()) for each in (model, child.model)]
    assert [loss.before, loss.after] == pytest.approx(exact, abs=1e-5)


@pytest.mark.slow
def test_what_cannot_be_had_says_what_can(model: hw.GPT, ids: torch.Tensor) -> None:
    def narrow(model: hw.GPT = model, **options: Any) -> None:
        hw.narrow(model, text=ids, **options)

    refuses_table("narrow", globals() | {"narrow": narrow, "model": model})
    child = hw.narrow(with_windows(model, [16, None, None]), cache=0.6, text=ids)
    assert windows_of(child.model) == [16, None, 16]


@pytest.fixture(scope="module")
def resting() -> hw.GPT:
    """A model whose layer 0 rests on the first token: without it, it looks at the latest and says nonsense."""
    torch.manual_seed(3)
    shape = {"n_layers": 2, "n_heads": 2, "d_model": 20, "head_dim": 10, "d_ff": 23}
    model = hw.GPT(hw.GPTConfig(vocab_size=37, context=65, init_std=0.3, position="learned", **shape))  # type: ignore[arg-type]
    with torch.no_grad():
        assert model.position_embedding is not None
        model.position_embedding.weight.mul_(0.05)
        model.position_embedding.weight[0] = 2.0
        for h in range(2):
            head = model.blocks[0].attention.heads[h]  # type: ignore[union-attr, index]
            head.wk.add_(0.5)
            head.wq.mul_(0.1).add_(0.3)
    return model.eval()


def test_the_cost_of_the_first_token_is_told_and_healed(resting: hw.GPT) -> None:
    ids = torch.randint(37, (30, 65), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():  # its own samples: what it says is right
        for t in range(1, 65):
            ids[:, t] = torch.multinomial(resting(ids[:, :t])[:, -1].softmax(-1), 1)[:, 0]
    child = hw.narrow(resting, cache=0.8, window=16, text=ids)
    first: Any = child.details["first_token"]
    with torch.no_grad():
        train = ids[:27]
        base = float(next_token_losses(resting, train).mean())
        for name, cost in first.items():
            for key, mask in (("dropped", hw.Window(15, 0)), ("kept", hw.Streaming(1, 16))):
                with seeing(resting, {name: mask}):
                    assert cost[key] == pytest.approx(float(next_token_losses(resting, train).mean()) - base, abs=1e-4)
    assert any("with its first token" in note for note in child.notes)
    healed = hw.narrow(resting, cache=0.6, window=16, text=ids, heal=6, batch=4)
    assert healed.healed is not None and healed.healed.kl <= healed.damage.kl + 1e-6  # type: ignore[operator]
    assert sum("learns without its first token" in note for note in healed.notes) == 2


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """A Llama of transformers in a folder, and what `headwise narrow` has made of it."""
    folder = tmp_path_factory.mktemp("narrow")
    torch.manual_seed(0)
    config = {**ROTARY, "max_position_embeddings": 67, "num_key_value_heads": 3}
    tf.LlamaForCausalLM(tf.LlamaConfig(**config, initializer_range=0.3)).save_pretrained(folder / "llama")
    stream = torch.randint(V, (67 * 30,), generator=torch.Generator().manual_seed(4))
    with verified_here():
        hw.narrow(folder / "llama", cache=0.7, window=19, text=stream, out=folder / "narrow")
    yield folder / "llama", folder / "narrow"


@pytest.mark.slow
def test_stock_transformers_reads_the_folder_beyond_the_window(folders: tuple[Path, Path]) -> None:
    llama, narrow = folders
    config = json.loads((narrow / "config.json").read_text())
    assert config["model_type"] == "qwen2" and config["sliding_window"] == 19
    assert sorted(config["layer_types"]) == ["full_attention", "sliding_attention"]
    record = json.loads((narrow / "headwise.json").read_text())
    assert record["verified"].startswith("stock transformers, in a fresh process")
    stock = tf.AutoModelForCausalLM.from_pretrained(narrow).eval()
    parent: Any = open_folder(llama).model
    layer = windows_of(stock).index(19)
    ids = torch.randint(V, (2, 61), generator=torch.Generator().manual_seed(6))
    with torch.no_grad(), seeing(parent, {f"L{layer}": hw.Window(18, 0)}):
        seen = logits(parent, ids)
    with torch.no_grad():
        torch.testing.assert_close(stock(ids).logits, seen, atol=1e-5, rtol=1e-4)
        first = stock(ids[:, :47], use_cache=True)  # a step at a time, with a cache that forgets
        rest = [first.logits]
        held = past(first)
        for t in range(47, 61):
            answer = stock(ids[:, t : t + 1], **held, use_cache=True)
            rest.append(answer.logits)
        torch.testing.assert_close(torch.cat(rest, 1), seen, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_children_of_a_narrow_model_know_their_ancestors_and_keep_its_windows(folders: tuple[Path, Path]) -> None:
    _, narrow = folders
    stream = torch.randint(V, (67 * 30,), generator=torch.Generator().manual_seed(4))
    shared = hw.share(narrow, 1, text=stream)
    assert windows_of(shared.model) == windows_of(hw.open(narrow))
    assert [ancestor.folder for ancestor in shared.ancestors] == [str(narrow), str(narrow / "../llama")]
    assert windows_of(hw.prune(narrow, ["L0.H1"], text=stream).model) == windows_of(hw.open(narrow))
    child = hw.narrow(narrow, tolerance=5.0, text=stream)
    assert windows_of(child.model) == [19, 19] and len(child.ancestors) == 2
    model: nn.Module = hw.open(narrow)
    tokens = list(hw.generate(model, [1, 2, 3], 40, temperature=0))
    assert tokens == list(hw.generate(model, [1, 2, 3], 40, temperature=0, cache=False))
    with hw.watch(model) as seen, torch.no_grad():
        model(torch.tensor([[1, 2, 3, *tokens]]))
    assert len(seen["L0.H0"].rows.entropy) == 43
