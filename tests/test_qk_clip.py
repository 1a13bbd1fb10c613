"""The example of QK-clip: the clip brings the largest score of each head to the bound, and touches no other head."""

import sys
from pathlib import Path

import pytest
import torch

import headwise as hw

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import qk_clip


def test_a_clipped_head_has_the_bound_as_its_largest_score() -> None:
    torch.manual_seed(0)
    model = hw.GPT(hw.GPTConfig(vocab_size=qk_clip.VOCAB, context=53, n_layers=2, n_heads=3, d_model=24, init_std=0.7))
    ids = torch.randint(qk_clip.VOCAB, (2, 47))

    def peaks() -> dict[str, float]:
        with hw.watch(model, only=["score_max"]) as seen:
            model(ids).sum().backward()
        return {name: head.score_peak for name, head in seen.items()}

    with hw.watch(model, only=["score_max"]) as seen:
        model(ids)
    before = {name: head.score_peak for name, head in seen.items()}
    first = sorted(peak for name, peak in before.items() if name.startswith("L0"))  # later layers read what it changes
    bound = (first[0] + first[1]) / 2
    qk_clip.clip(model, seen, bound)
    after = peaks()
    for head in range(3):
        name = f"L0.H{head}"
        assert after[name] == pytest.approx(min(bound, before[name]), rel=1e-5)
    assert all(weights.grad is not None for weights in model.parameters())
