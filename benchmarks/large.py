"""Models larger than memory: `heads`, `share` and `why` on a random Llama whose weights are read layer by layer.

The model has the shape of 8 B parameters (or 1 B), bf16, in one shard a layer, written to a temporary folder.
Each way runs in a process of its own, which watches its resident memory, the pages of files apart (RssAnon). The limit
is the time of reading the files once (`why`: twice), from the disk, plus that of the plain products of all its tokens.
`why` patches every head by itself; paths between heads, a third read, are followed where a head carries a tenth.
What is being done is told on standard error, with the forecast that `headwise heads --stream` prints.

    python -m benchmarks.large [--shape 8b|1b|LAYERS] [--ways heads share why] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from headwise.gpt.checkpoint import tensors_in, write_shard

SHAPES: dict[str, dict[str, int]] = {
    "8b": {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336},
    "1b": {"num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 8192},
}
COMMON = {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256, "max_position_embeddings": 8192}
DOCUMENTS, TOKENS, KV_HEADS = 4, 512, 4
PROMPT = 16  # tokens of the two texts of `why`
READS = {"heads": 1, "share": 1, "why": 2}  # of all weights, that the limit counts


def passes(way: str, n_layers: int) -> tuple[int, int]:
    """Tokens through all layers, and those with logits.

    heads: the documents and 4 repeated texts of 128; share: 3 documents to calibrate on, and one held out, through
    parent and child; why: two texts, and a variant of one for each head, from the layer of the head on.
    """
    if way == "heads":
        return DOCUMENTS * TOKENS + 512, 0
    if way == "share":
        return (DOCUMENTS + 1) * TOKENS, 2 * TOKENS
    heads = COMMON["num_attention_heads"]
    return PROMPT * (2 + heads * (n_layers + 1) // 2), 2 + heads * n_layers


BAR_GIB, BAR_TIMES = 3.0, 1.3
HEADER = "way      seconds   CPU s   reading   products  times  times, CPU  peak GiB of its own"
LONGEST = 900  # seconds of one way
EVERY = 10.0  # seconds between two lines of progress
began = time.perf_counter()


def tell(line: str) -> None:
    print(f"{time.perf_counter() - began:6.0f} s  {line}", file=sys.stderr, flush=True)


def sides(shape: dict[str, int]) -> tuple[dict[str, tuple[int, ...]], tuple[int, int]]:
    """The weights of a layer, and of the embedding."""
    sizes = {**COMMON, **shape}
    C, F_ = sizes["hidden_size"], sizes["intermediate_size"]
    kv = C // sizes["num_attention_heads"] * sizes["num_key_value_heads"]
    layer: dict[str, tuple[int, ...]] = {f"self_attn.{x}_proj": (C, C) for x in "qo"}
    layer |= {f"self_attn.{x}_proj": (kv, C) for x in "kv"}
    layer |= {"mlp.gate_proj": (F_, C), "mlp.up_proj": (F_, C), "mlp.down_proj": (C, F_)}
    layer |= dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (C,))
    return layer, (sizes["vocab_size"], C)


def size_of(shape: dict[str, int]) -> int:
    """Bytes of the model."""
    layer, embedding = sides(shape)
    return 2 * (shape["num_hidden_layers"] * sum(map(math.prod, layer.values())) + 2 * math.prod(embedding))


def make_model(folder: Path, shape: dict[str, int]) -> None:
    """Write a random Llama layer by layer, so that no more than one is ever held."""
    layer, embedding = sides(shape)
    generator, where = torch.Generator().manual_seed(0), {}

    def write(number: int, tensors: dict[str, Any]) -> None:
        name = f"model-{number:05}.safetensors"
        drawn = {}
        for key, rows in tensors.items():
            weights = torch.empty(rows, dtype=torch.bfloat16)
            drawn[key] = weights.fill_(1) if len(rows) == 1 else weights.normal_(std=0.02, generator=generator)
        write_shard(folder / name, drawn)
        where.update(dict.fromkeys(drawn, name))

    for n in range(shape["num_hidden_layers"]):
        write(n, {f"model.layers.{n}.{key}.weight": rows for key, rows in layer.items()})
        tell(f"layer {n + 1} of {shape['num_hidden_layers']} is written")
    write(90_000, {"model.embed_tokens.weight": embedding, "model.norm.weight": embedding[1:]})
    write(90_001, {"lm_head.weight": embedding})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    config = {**COMMON, **shape, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))


def forget(folder: Path) -> None:
    """Let the system drop the pages of the files, so that they are read from the disk again."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def reading(folder: Path) -> float:
    """Seconds of reading all files once from the disk."""
    forget(folder)
    start = time.perf_counter()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while file.read(1 << 24):
                pass
    return time.perf_counter() - start


def products(folder: Path, tokens: int, answered: int, clock: Callable[[], float]) -> float:
    """Seconds of the matrix products of one layer on `tokens`, times the layers, and of the output on `answered`."""
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    layer = [p.borrow() for p in tensors_in(folder / "model-00000.safetensors").values() if len(p.shape) == 2]
    head = [p.borrow() for p in tensors_in(folder / "model-90001.safetensors").values()]
    return layers * _products(layer, tokens, clock) + (_products(head, answered, clock) if answered else 0.0)


def _products(matrices: list[torch.Tensor], tokens: int, clock: Callable[[], float]) -> float:
    total = 0.0
    for matrix in matrices:
        seconds = []
        for _ in range(3):
            x = torch.randn(TOKENS * DOCUMENTS, matrix.shape[1]).to(matrix.dtype)[:tokens]
            start = clock()
            F.linear(x, matrix)
            seconds.append(clock() - start)
        total += sorted(seconds)[1] * tokens / len(x)
    return total


@contextmanager
def watched_memory() -> Iterator[Callable[[], float]]:
    """A function that tells the most memory of its own (RssAnon), in GiB, that this process has had in the block."""
    peak, done = [0], threading.Event()

    def look() -> None:
        while not done.wait(0.02):
            rows = Path("/proc/self/status").read_text().splitlines()
            peak[0] = max(peak[0], next(int(row.split()[1]) for row in rows if row.startswith("RssAnon")))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield lambda: peak[0] / 2**20
    finally:
        done.set()
        thread.join()


def child(way: str, folder: Path) -> None:
    import headwise as hw
    from headwise.heads.why import forecast
    from headwise.models.stream import stream_of
    from headwise.reshape.job import Listener

    last = 0.0

    def progress(stage: str, done: int, total: int) -> None:
        nonlocal last
        if time.perf_counter() > last + EVERY:
            last = time.perf_counter()
            tell(f"{way}: {stage}, {done:,} of {total:,}")

    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(COMMON["vocab_size"], (DOCUMENTS, TOKENS), generator=generator)
    with watched_memory() as peak:
        start = time.perf_counter()
        model = hw.open(folder, stream=True)
        stream = stream_of(model)
        assert stream is not None
        if way == "heads":
            tell(stream.forecast(passes(way, len(stream.blocks))[0], TOKENS))
            survey = hw.survey(model, [row.tolist() for row in ids], progress=progress)
            result: dict[str, Any] = {"heads": len(survey)}
        elif way == "why":
            clean, corrupted = ids[0, :PROMPT].tolist(), ids[1, :PROMPT].tolist()
            tell(forecast(model, clean, corrupted))
            story = hw.why(model, clean, [*clean[:5], corrupted[5], *clean[6:]], progress=progress)
            first = [(part.head, round(part.brings or 0.0, 4)) for part in story.heads[:3]]
            result = {"heads": len(story.heads), "first": first, "keys": len(story.keys), "paths": len(story.paths)}
        else:
            shared = hw.share(model, KV_HEADS, text=ids, listener=Listener(lambda line: tell(f"{way}: {line}")))
            result = {"loss": [shared.damage.loss.before, shared.damage.loss.after], "kl": shared.damage.kl}
        result |= {"seconds": time.perf_counter() - start, "cpu": time.process_time(), "peak_gib": peak()}
    print(json.dumps(result))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8b", help="8b, 1b, or so many layers of 8b")
    parser.add_argument("--ways", nargs="+", choices=READS, default=[*READS], help="what is measured; default: all")
    parser.add_argument("--folder", type=Path, help="where the model is written, and kept")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.folder)
        return
    if options.shape not in SHAPES and not options.shape.isdecimal():
        parser.error(f"--shape {options.shape} is not known; one of {', '.join(SHAPES)}, or a number of layers")
    shape = SHAPES.get(options.shape) or {**SHAPES["8b"], "num_hidden_layers": int(options.shape)}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the model is removed then, too
    with nullcontext(options.folder) if options.folder else tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "config.json").exists():
            needed, free = int(1.2 * size_of(shape)), shutil.disk_usage(folder).free  # share writes a part anew
            if needed > free:
                parser.error(
                    f"{needed / 1e9:.1f} GB are written to {folder}, where {free / 1e9:.1f} are free; --folder"
                )
            make_model(folder, shape)
        tell("reading all weights once, from the disk")
        read = reading(folder)
        rows = [HEADER]
        for way in options.ways:
            tell(f"{way}: its plain products")
            tokens, answered = passes(way, json.loads((folder / "config.json").read_text())["num_hidden_layers"])
            limit, busy = (
                READS[way] * read + products(folder, tokens, answered, clock)
                for clock in (time.perf_counter, time.process_time)
            )
            forget(folder)
            command = [sys.executable, "-m", "benchmarks.large", "--child", way, "--folder", str(folder)]
            scratch = {**os.environ, "TMPDIR": str(folder)}  # what a killed share leaves goes with the model
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, timeout=LONGEST, env=scratch)
            if done.returncode:
                sys.exit(f"{way} failed with exit code {done.returncode}; what went wrong stands above")
            row = json.loads(done.stdout.splitlines()[-1])
            rows.append(
                f"{way:6} {row['seconds']:9.1f} {row['cpu']:7.1f} {READS[way] * read:9.1f} "
                f"{limit - READS[way] * read:10.1f} "
                f"{row['seconds'] / limit:6.2f} {row['cpu'] / busy:11.2f} {row['peak_gib']:20.2f}   {json.dumps(row)}"
            )
            tell(rows[-1])
        print("\n".join(rows))
        print(f"bars: {BAR_TIMES} times, {BAR_GIB} GiB")


if __name__ == "__main__":
    main()
