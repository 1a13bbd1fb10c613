"""What several tests of heads look at."""

from __future__ import annotations

import pytest
import torch

from headwise.gpt.gpt import GPT, GPTConfig


@pytest.fixture(scope="session")
def model() -> GPT:
    """A GPT of two layers of three heads that reads 29 tokens; tests must leave it as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return GPT(GPTConfig(vocab_size=29, context=23, n_layers=2, n_heads=3, d_model=30, init_std=0.2))
