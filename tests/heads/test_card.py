"""Head cards: held to their schema, small, the same in another process; and the names of heads in other tools."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from cases import refuses
from invoking import Invoke
from jsonschema import Draft202012Validator
from planted import induction_model
from processes import command, together

import headwise as hw
from headwise.view.survey import card_json, card_markdown

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "card.schema.json").read_text(encoding="utf-8"))
V = 131


def gpt2(n_layers: int = 2, n_heads: int = 3) -> Any:
    torch.manual_seed(5)
    sizes = {"n_embd": n_heads * 11, "n_layer": n_layers, "n_head": n_heads, "n_positions": 97}
    config = tf.GPT2Config(vocab_size=V, bos_token_id=1, eos_token_id=2, **sizes)
    return tf.GPT2LMHeadModel(config).eval()


def documents(n: int = 4, tokens: int = 23) -> list[list[int]]:
    ids: list[list[int]] = torch.randint(3, V, (n, tokens), generator=torch.Generator().manual_seed(3)).tolist()
    return ids


@pytest.mark.slow
def test_a_card_keeps_to_its_schema_and_stays_small() -> None:
    Draft202012Validator.check_schema(SCHEMA)
    survey = hw.survey(gpt2(), documents())
    card = json.loads(card_json(survey))
    assert card == json.loads(json.dumps(survey.card()))
    assert Draft202012Validator(SCHEMA).is_valid(card)
    head, profile = card["heads"]["L1.H2"], survey["L1.H2"]
    assert head["statistics"]["entropy"][0] == pytest.approx(profile.entropy.mean, rel=1e-3)
    assert head["ablation"][0] == pytest.approx(profile.ablation.mean, rel=1e-3, abs=1e-9)  # type: ignore[union-attr]
    assert card["even"]["L1"]["entropy"] == pytest.approx(profile.uniform["entropy"], rel=1e-3)
    assert card["text"] == {"sources": [], "documents": 4, "tokens": 92, "longest": 23}
    farthest = max(n for n, count in enumerate(profile.distances) if count)
    assert head["reach"]["half"] <= head["reach"]["nine_tenths"] <= 2**farthest - 1
    del card["heads"]["L1.H2"]["names"]
    assert [error.message for error in Draft202012Validator(SCHEMA).iter_errors(card)] == [
        "'names' is a required property"
    ]
    survey = hw.survey(gpt2(12, 12), documents(3, 13), ablate="none")
    assert len(survey) == 144 and len(card_json(survey).encode()) < 160_000  # with effects, below 200,000


@pytest.mark.slow
def test_another_process_writes_the_same_bytes(tmp_path: Path, invoke: Invoke) -> None:
    gpt2().save_pretrained(tmp_path / "model")
    ids = tmp_path / "ids.txt"
    ids.write_text("\n".join(" ".join(map(str, document)) for document in documents()), encoding="utf-8")
    words = ["heads", str(tmp_path / "model"), "--ids", str(ids), "--card"]
    (ended,) = together(tmp_path / "ended", 1, command, *words, tmp_path / "first.json")
    assert ended.code == 0, ended.err
    assert invoke(*words, tmp_path / "second.json").code == invoke(*words, tmp_path / "third.md").code == 0
    cards = [(tmp_path / name).read_text(encoding="utf-8") for name in ("first.json", "second.json", "third.md")]
    assert cards[0] == cards[1] and str(tmp_path) not in cards[0]
    assert Draft202012Validator(SCHEMA).is_valid(json.loads(cards[0]))
    assert json.loads(cards[0])["weights_sha256"] in cards[2]


def test_a_card_is_a_file_or_a_section(invoke: Invoke, tmp_path: Path) -> None:
    gpt2().save_pretrained(tmp_path / "model")
    outcome = invoke("heads", str(tmp_path / "model"), "--text", "a", "--card", str(tmp_path / "card.txt"))
    assert outcome.code == 2 and "card.txt is no name of a card" in outcome.err
    random = torch.Generator().manual_seed(3)
    half = torch.randint(3, 11, (9, 7), generator=random)
    survey = hw.survey(induction_model(), torch.cat([half, half], 1).tolist(), ablate="none")
    roles = [(role, profile.name) for profile in survey.profiles for role in profile.roles]
    lines = [line.split(" | ")[:2] for line in card_markdown(survey).splitlines() if line.startswith("| ")]
    assert roles and {(role.strip("| "), head) for role, head in lines[2:]} == set(roles)


def test_heads_have_their_names_in_other_tools() -> None:
    """nnsight's is a path that leads to the module, and a slice that holds what the head gives."""
    model, ids = gpt2(), torch.tensor(documents(1))
    with hw.watch(model) as seen, torch.no_grad():
        model(ids)
    survey = hw.survey(model, documents(), ablate="none", controls=False)
    for table in (seen, survey):
        assert table.alias("L1.H2", "transformer_lens") == "blocks.1.attn.hook_z[..., 2, :]"
        assert table.alias("L1.H2", "headvis") == "L1H2"
        name = table.alias("L1.H2", "nnsight")
        assert name == "transformer.h[1].attn.c_proj.input[..., 22:33]"
        module = eval(name.partition(".input")[0], {"transformer": model.transformer})
        assert module is model.transformer.h[1].attn.c_proj
    refuses(lambda: seen.alias("L1.H2", "baukit"), "'baukit' are not known; one of transformer_lens, nnsight, headvis")
    refuses(lambda: survey.alias("L1.H5", "headvis"), r"no head 'L1\.H5'")


def test_a_stack_has_names_where_the_tool_has_it() -> None:
    torch.manual_seed(5)
    config = tf.T5Config(vocab_size=V, d_model=30, d_kv=7, d_ff=37, num_layers=1, num_heads=3, decoder_start_token_id=0)
    with hw.watch(tf.T5ForConditionalGeneration(config).eval(), documents(1)[0]) as seen:
        pass
    assert seen.alias("cross.L0.H2", "transformer_lens") == "decoder.0.cross_attn.hook_z[..., 2, :]"
    assert seen.alias("cross.L0.H2", "nnsight") == "decoder.block[0].layer[1].EncDecAttention.o.input[..., 14:21]"
    refuses(lambda: seen.alias("cross.L0.H2", "headvis"), r"headvis has no name for cross\.L0\.H2")
