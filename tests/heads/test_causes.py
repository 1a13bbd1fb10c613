"""Direct attribution and patching: against plain ablation, naive patching, and a circuit that was built by hand."""

import io
import math
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from cases import refuses, refuses_table
from families import TABLES, untrained
from planted import induction_model
from small_models import shaken
from torch import Tensor, nn

import headwise as hw
from headwise.backends.torch_ import attend
from headwise.corpus.tokens import Tokens
from headwise.heads import patch as patching
from headwise.heads.ablate import ablation
from headwise.heads.attribute import attribute
from headwise.heads.patch import Compared, Reading, Study, patch, path_effects
from headwise.models.ask import answer_logits, logits
from headwise.models.hook import attach
from headwise.models.open import remember
from headwise.models.sites import Site, sites_of
from headwise.records import Call

pytestmark = pytest.mark.usefixtures("no_gradients")

V, T = 131, 23
FAMILIES: dict[str, Any] = {
    **{name: partial(untrained, name, "causes") for name in TABLES["causes"]},
    "ours": lambda: gpt(n_kv_heads=2, qk_norm=True),
    "ours, plain": lambda: gpt(norm="layer", position="learned", activation="gelu", gated=False, bias=True),
}


def gpt(**fields: Any) -> hw.GPT:
    return hw.GPT(hw.GPTConfig(vocab_size=V, context=31, n_layers=3, n_heads=6, d_model=36, **fields))


def build(name: str) -> Any:
    torch.manual_seed(5)
    return shaken(FAMILIES[name](), size=0.1)


def ids(seed: int = 3) -> Tensor:
    return torch.randint(3, V, (T,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "a mask made of values"])
def test_the_parts_sum_to_the_logit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """float32 activations: a sum of some 40 of them is good to 1e-5 of the largest."""
    monkeypatch.setattr("headwise.heads.attribute.ROWS", 97)  # of the tokens that tell the factor of the logits
    model, position = build(name), 18
    parts = attribute(model, ids(), (7, 11), position)
    expected = logits(model, ids()[None])[0, position]
    assert parts.total == pytest.approx(float(expected[7] - expected[11]), abs=1e-4 + (name.startswith("norms") * 0.01))
    assert parts.total == pytest.approx(parts.logit, abs=1e-5)
    for head, share in parts.heads.items():
        assert parts.tokens[head].shape == (position + 1,)
        assert parts.tokens[head].sum() == pytest.approx(share, abs=1e-6)
    assert any(abs(share) > 1e-3 for share in parts.heads.values())


def test_a_head_of_the_last_layer_adds_what_is_lost_without_it() -> None:
    """Without a feed-forward after it and without a last norm, the direct effect is the whole effect."""
    torch.manual_seed(5)
    model = gpt(final_norm=False)
    model.blocks[-1].feed_forward.down.weight.data.zero_()  # type: ignore[union-attr]
    parts = attribute(model, ids(), 7)
    for h in range(6):
        with hw.ablate(model, [f"L2.H{h}"]), torch.no_grad():
            lost = logits(model, ids()[None])[0, -1, 7]
        assert parts.heads[f"L2.H{h}"] == pytest.approx(parts.logit - float(lost), abs=1e-6)


def test_a_norm_after_w_o_is_found() -> None:
    # There all that a layer adds is smaller than what bfloat16 may be off: what fits best counts, not what fits.
    model = build("norms after W_O, capped logits").double()
    model.model.embed_tokens.weight.data *= 100
    model.lm_head.weight = nn.Parameter(model.lm_head.weight / 100)
    exact = attribute(model, ids(), (7, 11)).heads
    shares = attribute(model.to(torch.bfloat16), ids(), (7, 11)).heads
    assert shares == pytest.approx(exact, abs=6 * 2**-7 * max(map(abs, exact.values())))
    # One feature of the residual stream outweighs all others, as in Gemma 3: each number counts by its own size.
    model = build("norms after W_O, capped logits").double()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.clone())
    model.model.embed_tokens.weight.data[:, 0] += 3000
    model.model.norm.weight.data = torch.tensor([-1.0] + 35 * [3000.0]).double()
    exact = attribute(model, ids(), (7, 11)).heads
    shares = attribute(model.to(torch.bfloat16), ids(), (7, 11)).heads
    assert shares == pytest.approx(exact, abs=0.05 * max(map(abs, exact.values())))


def test_what_adds_up_otherwise_or_encodes_is_refused() -> None:
    model = build("llama")
    attention = model.model.layers[1].self_attn
    plain = attention.forward
    attention.forward = lambda *args, **more: (0.5 * plain(*args, **more)[0], None)
    refuses(lambda: attribute(model, ids(), 7), "how the attention of L1 enters the residual stream")
    sizes = {"hidden_size": 36, "embedding_size": 31, "num_hidden_layers": 2, "num_attention_heads": 3}
    narrow = tf.RoFormerForCausalLM(tf.RoFormerConfig(vocab_size=V, is_decoder=True, **sizes)).eval()
    refuses(lambda: attribute(narrow, ids(), 7), r"\[36\] numbers a token, and its output matrix reads 31")
    config = tf.BertConfig(vocab_size=V, hidden_size=21, num_hidden_layers=1, num_attention_heads=3)
    model = tf.BertModel(config).eval()
    remember(model, Path("bert"), Tokens.characters("abc", boundary=False), "bert")
    refuses(lambda: hw.why(model, "abc"), "BertModel answers a text with no token")


class TorchModel(nn.Module):  # the attention of torch's own layers calls no module of W_O
    def __init__(self, norm_first: bool) -> None:
        super().__init__()
        layers = (nn.TransformerEncoderLayer(36, 3, 41, batch_first=True, norm_first=norm_first) for _ in range(2))
        self.embed, self.layers, self.head = nn.Embedding(V, 36), nn.ModuleList(layers), nn.Linear(36, V)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, src_mask=torch.full((len(ids[0]),) * 2, -math.inf).triu(1))
        return torch.as_tensor(self.head(x))


def test_torchs_own_attention_is_attributed_and_a_stream_that_is_normed_refused() -> None:
    torch.manual_seed(5)
    model = shaken(TorchModel(norm_first=True), size=0.1)
    for parameter in model.layers[1].linear2.parameters():
        parameter.zero_()  # then the direct effect of a head of this layer is the whole effect
    parts, row = attribute(model, ids(), (7, 11)), model(ids()[None])[0, -1]
    with hw.ablate(model, ["L1.H2"]):
        lost = row - model(ids()[None])[0, -1]
    assert parts.total == pytest.approx(float(row[7] - row[11]), abs=1e-4)
    assert parts.heads["L1.H2"] == pytest.approx(float(lost[7] - lost[11]), abs=1e-5)
    assert all(part.adds is not None for part in hw.why(model, ids(3), ids(4), 7, 11).heads)
    model = shaken(TorchModel(norm_first=False), size=0.1)
    refuses(lambda: attribute(model, ids(), 7), "how the attention of L0 enters the residual stream")


def test_bad_requests_of_attribution() -> None:
    def attributed(text: Tensor | None = None, **change: Any) -> None:
        attribute(gpt(), ids() if text is None else text, **{"target": 7, **change})

    refuses_table("attribution", globals() | {"attributed": attributed})


def naive(model: nn.Module, clean: Tensor, corrupted: Tensor, at: str, name: str, rows: list[int]) -> float:
    """One head, one run, nothing shared; the head's part is changed before the attention is computed anew."""
    site = next(site for site in sites_of(model) if name.startswith(site.name + "."))
    number = int(name.rpartition(".")[2].strip("HKV"))
    kept: list[Call] = []
    with attach([site], lambda site, call: kept.append(call)):
        good = logits(model, clean[None])[0, -1]
    bad = logits(model, corrupted[None])[0, -1]
    a, b = int(good.argmax()), int(bad.argmax())

    def change(site: Site, call: Call) -> Tensor:
        parts = {x: getattr(call, x).clone() for x in ("q", "k", "v", "out")}
        if at == "weights":
            moved = attend(kept[0].q, kept[0].k, call.v, kept[0].options)
            parts["out"][0, number, rows] = moved[0, number, rows]
            return parts["out"]
        parts[at][0, number, rows] = getattr(kept[0], at)[0, number, rows]
        return parts["out"] if at == "out" else attend(parts["q"], parts["k"], parts["v"], call.options)

    with attach([site], change):
        patched = logits(model, corrupted[None])[0, -1]
    return float((patched[a] - patched[b] - bad[a] + bad[b]) / (good[a] - good[b] - bad[a] + bad[b]))


@pytest.mark.parametrize("at", ["q", "k", "v", "out", "weights"])
@pytest.mark.parametrize("name", ["llama", "ours", "a layer that does not run", "a mask made of values"])
def test_patching_equals_a_run_for_each_head(name: str, at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(name)
    clean, corrupted = ids(3), ids(4)
    for positions, at_once in ((None, 99), ([3, 17, 22], 5)):  # variants in a batch
        monkeypatch.setattr(patching, "LARGEST", at_once * T * 36)
        found = patch(model, clean, corrupted, at, positions=positions)
        assert len(found.effects) == (6 if at in "kv" else 18)
        for head in list(found.effects)[:: 2 if at in "kv" else 5]:
            expected = naive(model, clean, corrupted, at, head, positions or list(range(T)))
            assert found.effects[head].mean == pytest.approx(expected, abs=2e-4), head


def test_blocks_that_give_lists_or_read_what_others_left_are_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenAI's GPT, whose blocks give lists; Gemma 4, whose last layers read keys of layers below."""
    torch.manual_seed(5)
    sizes = {"vocab_size": V, "hidden_size": 36, "num_hidden_layers": 4, "num_attention_heads": 3}
    shared = {"num_kv_shared_layers": 2, "layer_types": 2 * ["sliding_attention", "full_attention"]}
    narrow = {"num_key_value_heads": 1, "head_dim": 6, "global_head_dim": 6, "intermediate_size": 37}
    per_layer = {"vocab_size_per_layer_input": V, "hidden_size_per_layer_input": 5}
    config = tf.Gemma4TextConfig(**sizes, **shared, **narrow, **per_layer)
    lists = tf.OpenAIGPTLMHeadModel(tf.OpenAIGPTConfig(vocab_size=V, n_embd=36, n_layer=3, n_head=3, n_positions=31))
    for model in (lists, tf.Gemma4ForCausalLM(config)):
        found = patch(shaken(model, size=0.1), ids(3), ids(4), target=(7, 11)).effects
        with monkeypatch.context() as whole:
            whole.setattr(patching, "block_path", lambda path: "")  # every variant runs from the first layer
            expected = patch(model, ids(3), ids(4), target=(7, 11)).effects
        assert {name: x.mean for name, x in found.items()} == pytest.approx(
            {name: x.mean for name, x in expected.items()}, abs=2e-4
        )


def test_effects_over_pairs_are_shares_of_the_means() -> None:
    model = build("ours")
    clean, corrupted = (torch.stack([ids(seed) for seed in seeds]) for seeds in ((3, 5, 7), (4, 6, 8)))
    target = torch.tensor([[7, 11], [13, 2], [5, 3]])
    single = [patch(model, *pair, target=target[n]) for n, pair in enumerate(zip(clean, corrupted, strict=True))]
    found = patch(model, clean, corrupted, target=target, positions="each")
    size = [one.clean.mean - one.corrupted.mean for one in single]
    for name, effect in found.effects.items():
        shares = [one.effects[name].mean for one in single]
        brought = sum(share * of for share, of in zip(shares, size, strict=True))
        assert effect.n == 3 and effect.mean == pytest.approx(brought / sum(size), abs=1e-4)
        assert found.by_pair[name] == pytest.approx(shares, abs=1e-4)
    assert found.by_position["L0.H1"].shape == (T,)
    of_paths = path_effects(model, clean, corrupted, "L2.H1", target=target)
    each = [
        path_effects(model, *pair, "L2.H1", target=target[n])
        for n, pair in enumerate(zip(clean, corrupted, strict=True))
    ]
    brought = sum(one["L0.H2"].mean * of for one, of in zip(each, size, strict=True))
    assert of_paths["L0.H2"].mean == pytest.approx(brought / sum(size), abs=1e-4)
    refuses(
        lambda: patch(model, clean[:1], corrupted[:1], target=(7, 7)),
        "^pair 0, counted from 0: token 7 is the answer and what it is compared with",
    )
    target[1] = 9
    refuses(lambda: patch(model, clean, corrupted, target=target), "^pair 1, counted from 0: token 9 is the answer and")
    corrupted[2] = clean[2]
    refuses(lambda: patch(model, clean, corrupted), "^pair 2, counted from 0: token .* is the answer and")


@pytest.mark.parametrize("name", ["llama", "ours"])
def test_answers_of_half_precision_are_multiplied_in_float32(name: str) -> None:
    model, heads = build(name).bfloat16(), []
    head = model.lm_head
    hook = head.register_forward_pre_hook(lambda module, args: heads.append(args[0][:, -1].float()))
    row = answer_logits(model, ids()[None])
    hook.remove()
    torch.testing.assert_close(row, heads[0] @ head.weight.float().T)
    found = patch(model, ids(3), ids(4), target=(7, 11))
    # A bfloat16 has 8 digits, so that most of 18 effects would be the same few numbers.
    assert len({effect.mean for effect in found.effects.values()}) > 15


LINEAR = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
GATED: dict[str, dict[str, Any]] = {
    "qwen3_next": LINEAR | {"num_experts": 0, "layer_types": ["full_attention", "linear_attention", "full_attention"]},
    "afmoe": {"num_dense_layers": 3, "sliding_window": 7},
}


@contextmanager
def written(module: nn.Module, part: slice, rows: Tensor) -> Iterator[None]:
    """These columns of what a module gives are those of `rows`."""

    def change(module: nn.Module, args: Any, gave: Tensor) -> Tensor:
        gave = gave.clone()
        gave[..., part] = rows[..., part]
        return gave

    hook = module.register_forward_hook(change)
    yield
    hook.remove()


@pytest.mark.parametrize("name", GATED)
def test_gated_heads_are_patched_where_queries_keys_and_values_are_made(name: str) -> None:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3, "head_dim": 14}
    config = tf.AutoConfig.for_model(
        name, vocab_size=V, hidden_size=36, intermediate_size=43, moe_intermediate_size=11, **sizes, **GATED[name]
    )
    with torch.random.fork_rng(devices=[]):
        model = shaken(tf.AutoModelForCausalLM.from_config(config), size=0.1)
    number = max(n for n in range(3) if hasattr(model.model.layers[n], "self_attn"))
    clean, corrupted, last = ids(3), ids(4), model.model.layers[number].self_attn
    parts = {f"{x}_proj": getattr(last, f"{x}_proj") for x in "qkv"}
    kept: dict[str, list[Tensor]] = {key: [] for key in parts}
    hooks = []
    for key, module in parts.items():
        hooks.append(module.register_forward_hook(lambda m, args, out, gave=kept[key]: gave.append(out)))
    ends = [logits(model, text[None])[0, -1] for text in (clean, corrupted)]
    for hook in hooks:
        hook.remove()
    good, bad = (float(row[7] - row[11]) for row in ends)

    def share() -> float:
        row = logits(model, corrupted[None])[0, -1]
        return (float(row[7] - row[11]) - bad) / (good - bad)

    for at in "qkv":
        found = patch(model, clean, corrupted, at, target=(7, 11)).effects
        n_heads = 4 if at == "q" else 2
        wide = parts[f"{at}_proj"].weight.shape[0] // n_heads  # Qwen3-Next has the gate of a head behind its query
        for h in range(n_heads):
            with written(parts[f"{at}_proj"], slice(h * wide, h * wide + 14), kept[f"{at}_proj"][0]):
                expected = share()
            head = f"L{number}.{'H' if at == 'q' else 'KV'}{h}"
            assert found[head].mean == pytest.approx(expected, abs=2e-4), (at, head)


def test_every_verb_passes_by_a_layer_that_does_not_run() -> None:
    model, clean, corrupted = build("a layer that does not run"), ids(3), ids(4)
    ran = [f"L{n}.H{h}" for n in (0, 2, 3) for h in range(6)]
    assert list(ablation(model, [clean[None]])) == ran
    assert {head.head for head in hw.why(model, clean, corrupted).heads} <= {*ran}
    found = path_effects(model, clean, corrupted, "L3.H2")
    assert list(found) == ran[:12] and any(abs(each.mean) > 1e-4 for each in found.values())


def test_paths_come_from_layers_below_alone() -> None:
    model = build("ours")
    texts = [Reading(model, ids(seed)) for seed in (3, 4)]
    study = Study(*texts, Compared((7,), (11,)))
    found = study.paths([("q", "L1.H0"), ("k", "L2.KV1"), ("v", "L0.KV0")])
    senders = {at: {sender[:2] for (place, _), sender in found if place == at} for at in "qkv"}
    assert senders == {"q": {"L0"}, "k": {"L0", "L1"}, "v": set()}
    for sender, effect in path_effects(model, ids(3), ids(4), "L1.H0", target=(7, 11)).items():
        assert found[("q", "L1.H0"), sender] == pytest.approx(effect.mean, abs=1e-5)


def test_all_heads_and_positions() -> None:
    # The last token is the same in both texts, so all that differs there came through heads.
    model, clean, corrupted = build("ours"), ids(3), ids(4)
    corrupted[-1] = clean[-1]
    found = patch(model, clean, corrupted, together=True)
    assert found.effects["together"].mean == pytest.approx(1, abs=1e-4)
    clean, corrupted = torch.stack([ids(3), ids(5)]), torch.stack([ids(4), ids(6)])
    found = patch(model, clean, corrupted, heads=["L1.H2"], positions="each", target=(7, 11))
    assert found.effects["L1.H2"].n == 2 and found.by_position["L1.H2"].shape == (T,)
    one, same = (patch(model, clean, corrupted, heads=["L1.H2"], positions=[t], target=(7, 11)) for t in (5, 5 - T))
    assert found.by_position["L1.H2"][5] == pytest.approx(one.effects["L1.H2"].mean, abs=1e-6)
    assert one.effects == same.effects and one.effects["L1.H2"].mean != 0


def test_bad_requests_of_patching() -> None:
    torch.manual_seed(5)
    texts = {"clean": ids(3), "corrupted": ids(4)}
    refuses_table("patching", globals() | {"patched": lambda **change: patch(gpt(), **texts | change)})


def test_the_induction_circuit_comes_out_all_and_only() -> None:
    model = induction_model()
    clean = torch.tensor([7, 2, 9, 4, 1, 8, 2])  # 2 was followed by 9
    corrupted = torch.tensor([7, 3, 9, 4, 1, 8, 2])
    target = (9, 4)
    assert int(logits(model, clean[None])[0, -1].argmax()) == 9
    out = patch(model, clean, corrupted, target=target).effects
    assert {name for name, effect in out.items() if effect.mean > 0.5} == {"L0.H1", "L1.H0"}
    assert all(abs(effect.mean) < 0.1 for name, effect in out.items() if name not in ("L0.H1", "L1.H0"))
    keys = patch(model, clean, corrupted, "k", target=target).effects
    assert [name for name, effect in keys.items() if effect.mean > 0.5] == ["L1.KV0"]
    for at, end in (("q", "L1.H0"), ("k", "L1.KV0"), ("v", "L1.KV0")):
        through = path_effects(model, clean, corrupted, end, at, target=target)
        assert [name for name, effect in through.items() if abs(effect.mean) > 0.1] == ["L0.H1"] * (at == "k")
    assert path_effects(model, clean, corrupted, "L1.KV0", "k", target=target)["L0.H1"].mean > 0.9
    parts = attribute(model, clean, 9)
    assert parts.strongest(1) == ["L1.H0"] and int(parts.tokens["L1.H0"].argmax()) == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "ours"])
def test_threads_study_one_model_while_it_runs(name: str) -> None:
    """Layers that one thread skips compute in the others."""
    model, clean, corrupted = build(name), ids(3), ids(4)
    plain = logits(model, corrupted[None])
    jobs: list[Any] = [partial(patch, model, ids(n), ids(n + 10), target=(7, 11), heads=["L2.H1"]) for n in range(3)]
    jobs.append(partial(path_effects, model, clean, corrupted, "L2.H1", target=(7, 11)))
    expected = [str(job()) for job in jobs]

    def work(n: int) -> bool:
        with torch.no_grad():
            found = [str(jobs[n]()) for _ in range(3)]
            return found == 3 * [expected[n]] and torch.equal(logits(model, corrupted[None]), plain)

    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(work, range(4)))
    finally:
        sys.setswitchinterval(switch)


def test_a_study_leaves_the_model_alone() -> None:
    # Somebody has replaced the forward of a block, and hooked it: a study, which replays it, takes what comes of both.
    model = build("llama")
    block = model.model.layers[0]
    plain = block.forward
    block.forward = own = lambda *args, **more: 2 * plain(*args, **more)
    block.register_forward_hook(lambda module, args, output: 3 * output)
    effect = naive(model, ids(3), ids(4), "out", "L1.H2", list(range(T)))
    found = patch(model, ids(3), ids(4), heads=["L1.H2"]).effects["L1.H2"].mean
    assert found == pytest.approx(effect, abs=2e-4)
    assert vars(block)["forward"] is own and "forward" not in vars(model.model.layers[1])
    with torch.inference_mode():
        assert patch(model, ids(3), ids(4), heads=["L1.H2"]).effects["L1.H2"].mean == pytest.approx(found, abs=1e-6)


def test_targets() -> None:
    # (2,) for all pairs, or (N,2); what is neither is refused, also where it could be stretched.
    model, clean, bad = build("llama"), torch.stack([ids(3), ids(4)]), torch.stack([ids(5), ids(6)])
    both = patch(model, clean, bad, heads=["L1.H2"], target=[[7, 11], [13, 17]])
    second = patch(model, clean[1], bad[1], heads=["L1.H2"], target=[13, 17])
    assert both.ends[1] == pytest.approx(second.ends[0], abs=1e-5)
    for target in ([[7], 13], [[7, 11]], [7], [[7, 11, 13]], 7, "he"):
        call = partial(patch, model, clean, bad, heads=["L1.H2"], target=target)
        refuses(call, r"pass two token ids, or \(2, 2\)")


def test_metrics_of_ones_own_and_prompts_of_unlike_lengths() -> None:
    """Two sets of tokens are their mean logits; a function is given the logits of one answer."""
    model = build("llama").double()
    clean, bad = [ids(3), ids(4)[:-4]], [ids(5), ids(6)[:-4]]

    def own(logits: Tensor) -> Tensor:
        assert logits.shape == (V,) and logits.dtype == torch.float64
        return (logits[7] + logits[13]) / 2 - logits[11]

    of_sets = patch(model, clean, bad, heads=["L1.H2", "L2.H4"], target=({7, 13}, {11}))
    of_tensors = patch(model, clean, bad, heads=["L1.H2"], target=(torch.tensor([7, 13]), range(11, 12)))
    assert of_tensors.effects["L1.H2"].mean == pytest.approx(of_sets.effects["L1.H2"].mean, abs=1e-5)
    of_function = patch(model, clean, bad, heads=["L1.H2", "L2.H4"], target=own)
    assert of_sets.by_pair["L1.H2"] == pytest.approx(of_function.by_pair["L1.H2"], abs=1e-6)
    for n in range(2):  # each pair alone, as a list of one and as ids
        one = patch(model, [clean[n]], [bad[n].tolist()], heads=["L1.H2"], target=own)
        assert one.effects["L1.H2"].mean == pytest.approx(of_sets.by_pair["L1.H2"][n], abs=1e-6)
        row = logits(model, clean[n][None])[0, -1].double()
        assert one.clean.mean == pytest.approx(float(own(row)), abs=1e-5)
    size = of_sets.ends[:, 0] - of_sets.ends[:, 1]
    shares = of_sets.by_pair["L1.H2"]
    frame = of_sets.to_frame().set_index("head")
    assert frame.loc["L1.H2", "share_of_means"] == pytest.approx(shares @ size / size.sum(), abs=1e-9)
    assert frame.loc["L1.H2", "mean_of_shares"] == pytest.approx(shares.mean(), abs=1e-9)


def test_key_heads_of_several_layers_are_patched_together() -> None:
    """Where two layers are changed the upper one reads what the lower one has made of its change."""
    model, clean, bad = build("llama"), ids(3), ids(4)
    found = patch(model, clean, bad, "k", heads=["L0.KV1", "L2.KV0"], together=True, target=(7, 11)).effects["together"]
    parts = [(model.model.layers[n].self_attn.k_proj, slice(g * 6, g * 6 + 6)) for n, g in ((0, 1), (2, 0))]
    kept: dict[int, Tensor] = {}
    hooks = [m.register_forward_hook(lambda m, args, out, n=n: kept.update({n: out})) for n, (m, _) in enumerate(parts)]
    good = logits(model, clean[None])[0, -1]
    for hook in hooks:
        hook.remove()
    plain = logits(model, bad[None])[0, -1]
    with written(*parts[0], kept[0]), written(*parts[1], kept[1]):
        changed = logits(model, bad[None])[0, -1]
    difference = [float(row[7] - row[11]) for row in (good, plain, changed)]
    expected = (difference[2] - difference[1]) / (difference[0] - difference[1])
    assert found.mean == pytest.approx(expected, abs=2e-4)


def test_effects_as_figures_and_tables() -> None:
    model, clean, bad = build("ours"), ids(3), ids(4)
    found = patch(model, clean, bad, target=(7, 11), positions="each")
    parts = attribute(model, clean, (7, 11))
    assert math.fsum(parts.to_frame().adds) == pytest.approx(parts.total, abs=1e-9)
    for result in (found, parts):
        grid = result.figure().axes[0].images[0].get_array()
        values = result.effects["L2.H1"].mean if result is found else parts.heads["L2.H1"]
        assert grid.shape == (3, 6) and grid[2, 1] == values
        bars = result.figure(5).axes[0]
        assert [label.get_text() for label in bars.get_yticklabels()] == result.strongest(5)
        file = io.BytesIO()
        result.figure().savefig(file, format="pdf")
        assert file.getvalue().startswith(b"%PDF")
