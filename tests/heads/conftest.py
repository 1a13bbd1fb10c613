"""What several tests of heads look at."""

import pytest
import torch

from headwise.corpus.documents import Text
from headwise.gpt.gpt import GPT, GPTConfig

LENGTHS = (23, 23, 11, 19, 2, 23, 17, 23, 23, 5, 7, 7, 7, 13, 3, 11, 11)


@pytest.fixture(scope="session")
def model() -> GPT:
    """A GPT of two layers of three heads that reads 29 tokens; tests must leave it as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return GPT(GPTConfig(vocab_size=29, context=23, n_layers=2, n_heads=3, d_model=30, init_std=0.2)).eval()


@pytest.fixture(scope="session")
def text() -> Text:
    """Documents for that model, of seventeen lengths."""
    generator = torch.Generator().manual_seed(1)
    documents = [torch.randint(29, (n,), generator=generator).tolist() for n in LENGTHS]
    return Text(documents, lambda ids: tuple(f"t{i}" for i in ids))
