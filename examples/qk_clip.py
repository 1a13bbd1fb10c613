"""Train a small GPT twice, with and without QK-clip, and print the largest score beside the loss.

    python examples/qk_clip.py                     # half a minute on a CPU
    python examples/qk_clip.py --steps 40 --bound 20

The task is to repeat random tokens. W_Q and W_K get a learning rate that is far too large, and no norm bounds what
they give, so that the scores of attention grow. QK-clip (Kimi K2, arXiv 2507.20534) bounds them head by head: after
a step, where the largest score S of a head is above the bound, its W_Q and its W_K are multiplied by sqrt(bound / S).
"""

import argparse

import torch
from torch import Tensor
from torch.nn import functional as F

import headwise as hw

VOCAB, HALF, BATCH = 61, 23, 16


def clip(model: hw.GPT, seen: hw.Seen, bound: float) -> None:
    """Shrink W_Q and W_K of each head whose largest score in the last call was above the bound."""
    with torch.no_grad():
        for layer, block in enumerate(model.blocks):
            for number, head in enumerate(block.attention.heads):
                peak = seen[f"L{layer}.H{number}"].score_peak
                if peak > bound:
                    head.wq.mul_((bound / peak) ** 0.5)
                    head.wk.mul_((bound / peak) ** 0.5)


def batch_of(random: torch.Generator) -> Tensor:
    """Random tokens, and the same again: (BATCH, 2 HALF)."""
    tokens = torch.randint(VOCAB, (BATCH, HALF), generator=random)
    return torch.cat([tokens, tokens], 1)


def train(steps: int, rate: float, bound: float | None) -> list[tuple[float, float]]:
    """Of each step the loss on the repetition, nats a token, and the largest score of all heads."""
    torch.manual_seed(0)
    random = torch.Generator().manual_seed(1)
    model = hw.GPT(hw.GPTConfig(vocab_size=VOCAB, context=2 * HALF, n_layers=2, n_heads=4, d_model=64))
    fast, slow = [], []
    for name, weights in model.named_parameters():
        (fast if "q_proj" in name or "k_proj" in name else slow).append(weights)
    groups = [{"params": slow, "lr": 3e-3}, {"params": fast, "lr": rate}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)
    history = []
    for _ in range(steps):
        ids = batch_of(random)
        with hw.watch(model, only=["score_max"]) as seen:
            logits = model(ids)
        loss = F.cross_entropy(logits[:, HALF:-1].flatten(0, 1), ids[:, HALF + 1 :].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if bound is not None:
            clip(model, seen, bound)
        history.append((float(loss.detach()), max(head.score_peak for head in seen.values())))
    return history


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="updates of the weights")
    parser.add_argument("--rate", type=float, default=0.1, help="learning rate of W_Q and W_K")
    parser.add_argument("--bound", type=float, default=30.0, help="largest score that a head may keep, nats")
    options = parser.parse_args()
    runs = [train(options.steps, options.rate, bound) for bound in (None, options.bound)]
    print(f"{'':>6}   {'no clip':^20}   {f'clip at {options.bound:g}':^20}")
    print(f"{'step':>6}   {'loss':>8} {'largest':>11}   {'loss':>8} {'largest':>11}")
    marks = sorted({*range(0, options.steps, max(1, options.steps // 8)), options.steps - 1})
    for step in marks:
        cells = [f"{loss:>8.3f} {peak:>11,.1f}" for loss, peak in (run[step] for run in runs)]
        print(f"{step:>6}   {'   '.join(cells)}")


if __name__ == "__main__":
    main()
