"""Models larger than memory: a layer has its weights while it runs, and lets them go.

The model's layers lie on the meta device, as shapes without numbers; a layer that runs borrows its weights from the
safetensors files, which are mapped into memory. A `sweep` takes many documents through the first layer, then through
the second, and so on, so that the weights are read once however long the text is. Each of these is a turn. In a turn
the whole model is called for each batch, and all layers but one are left out: its own masks and positions, and the
hooks of whoever watches, are what they always are. On a device other than the processor a layer's weights go there
while it runs; the states of documents between two layers wait in the memory of the machine, the larger one.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import json
import shutil
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.corpus.documents import BATCH
from headwise.errors import HeadwiseError
from headwise.files import write_whole
from headwise.gpt.checkpoint import Place, tensors_in, write_shard
from headwise.layer.projections import shapes_alone
from headwise.memory import CPU, free_memory, free_on, seconds_of
from headwise.models.weights import AttentionWeights, attentions, blocks, cast, family_of, write_layer
from headwise.table import amount

Ids = TypeVar("Ids", bound=Sequence[int])
PROBE = 256  # tokens on which the speed of matrix products is tried: a round number, and a fraction of a second
COPIES = 8  # an estimate: so many numbers lie in memory for a token and each feature of the widest matrix (`_active`)


def is_finite(weights: Tensor) -> bool:
    """Is there no NaN and no inf?

    A finite sum tells it in a tenth of the time. Where the sum is not, it may have overflowed: then each is looked at.
    """
    wide = torch.float32 if weights.dtype == torch.float16 else None  # float16 ends at 65,504, which a sum soon passes
    return bool(weights.detach().sum(dtype=wide).isfinite() or weights.isfinite().all())


class Slot(NamedTuple):
    """A place in a layer for weights, which come and go."""

    module: nn.Module
    leaf: str  # the attribute of the module
    name: str  # of the weights in the model
    hollow: nn.Parameter  # on the meta device: what stands there while the layer has no weights

    def put(self, weights: nn.Parameter) -> None:
        setattr(self.module, self.leaf, weights)


class Stream:
    """Runs a model layer by layer; it takes the place of the layers' own `forward`.

    model   of a family that has a record, with one stack of layers
    stored  the weights by the names of the model: in files (`Place`), or as tensors
    seed    draw those of the layers anew each time, as untrained ones
    device  on which a layer runs, and on which what lies outside of the layers stays
    """

    def __init__(
        self,
        model: nn.Module,
        stored: Mapping[str, Place | Tensor],
        seed: int | None = None,
        device: torch.device = CPU,
    ) -> None:
        self.model, self.stored, self.seed, self.device = model, dict(stored), seed, device
        self.blocks = blocks(model)
        if not self.blocks:
            raise HeadwiseError(f"the config of {type(model).__name__} describes a model without layers")
        self.scratch: Path | None = None  # where a child's weights wait; None for a temporary folder
        self.layer: int | None = None  # number of the only one that runs now; len(blocks): none does; None: all do
        self.number = 0  # of the batch that runs now
        self.states: dict[int, Tensor] = {}  # number of a batch -> what the latest layer made of it, (B,T,C)
        # Weights that were looked through for NaN and inf: those in memory were, when they were read.
        self.finite = {name for name, place in self.stored.items() if isinstance(place, Tensor)}
        self._users = Counter[int]()  # of each layer the blocks of `loaded` that are open
        self._slots: list[list[Slot]] = [[] for _ in self.blocks]
        inside = {module: n for n, block in enumerate(self.blocks) for module in block.modules()}  # number of its layer
        outside = {}  # weights on the meta device -> those read for them
        for path, module in model.named_modules(remove_duplicate=False):
            for leaf, weights in [*module.named_parameters(recurse=False)]:  # a list, for the loop replaces them
                name = f"{path}.{leaf}" if path else leaf
                if module in inside:
                    slot = Slot(module, leaf, name, nn.Parameter(weights.to("meta"), requires_grad=False))
                    slot.put(slot.hollow)
                    self._slots[inside[module]].append(slot)
                else:
                    if weights not in outside:  # a tied matrix, which stands in two places, is read once
                        outside[weights] = self._weights(name, weights)
                    setattr(module, leaf, outside[weights])
        for module in model.modules():
            for leaf, buffer in module.named_buffers(recurse=False):
                setattr(module, leaf, buffer.to(device))
        for n, block in enumerate(self.blocks):
            block.forward = self._in_turn(n, block.forward)
        # As `model.headwise_stream = self`, where torch's types allow tensors and modules alone.
        object.__setattr__(model, "headwise_stream", self)

    def borrow(self, name: str) -> Tensor:
        """The weights of this name as they are stored."""
        place = self.stored[name]
        return place.borrow() if isinstance(place, Place) else place

    # The weights of this name, looked through once, in the format of `like`.
    def _weights(self, name: str, like: Tensor) -> nn.Parameter:
        tensor = self.borrow(name).to(self.device)
        if tensor.shape != like.shape:
            raise HeadwiseError(f"{name} is {tuple(tensor.shape)} in its file, and {tuple(like.shape)} by config.json")
        if name not in self.finite and not is_finite(tensor):
            raise HeadwiseError(f"the model has NaN or inf in {name}; it is not usable")
        self.finite.add(name)
        return nn.Parameter(tensor.to(like.dtype), requires_grad=False)

    @property
    def state_size(self) -> int:
        """Bytes that a token takes between two layers."""
        width: int = getattr(self.model.config, family_of(self.model).width)
        return width * next(self.model.parameters()).itemsize

    @contextmanager
    def loaded(self, layer: int) -> Iterator[None]:
        """The layer has its weights inside this block; of blocks within one another the outer one borrows them."""
        if not self._users[layer]:
            for slot in self._slots[layer]:
                if self.seed is None:
                    slot.put(self._weights(slot.name, slot.hollow))
                else:
                    slot.put(nn.Parameter(torch.empty_like(slot.hollow, device="cpu"), requires_grad=False))
            if self.seed is not None:
                whole: Any = self.model
                # A seed for each layer, so that each time it gets the same weights; torch's own state is put back.
                with torch.random.fork_rng(devices=[]):
                    torch.default_generator.manual_seed(self.seed + layer)
                    for module in self.blocks[layer].modules():
                        whole._init_weights(module)  # transformers' way to draw first weights
                self.blocks[layer].to(self.device)  # drawn on the processor, so that every device has the same ones
        self._users[layer] += 1
        try:
            yield
        finally:
            self._users[layer] -= 1
            if not self._users[layer]:
                for slot in self._slots[layer]:
                    slot.put(slot.hollow)

    @contextmanager
    def only(self, layer: int | None) -> Iterator[None]:
        """No other layer runs inside this block; the number behind the last layer: none does, None: all do."""
        before, self.layer = self.layer, layer
        try:
            yield
        finally:
            self.layer = before

    @contextmanager
    def alone(self) -> Iterator[None]:
        """The first layer stands for the whole model inside this block, and a sweep outside keeps its states."""
        before, self.states = self.states, {}
        try:
            with self.loaded(0), self.only(0):
                yield
        finally:
            self.states = before

    def numbered(self, batches: Iterable[Tensor]) -> Iterator[tuple[int, Tensor]]:
        """The number of the first document of each batch, and its ids, while the batch is the one that runs."""
        start = 0
        for number, ids in enumerate(batches):
            self.number = number
            yield start, ids
            start += len(ids)

    def with_layers(self, layers: Iterable[AttentionWeights], config: Any) -> nn.Module:
        """A child of the model with these attention weights and this config, streamed too; not of one with a `seed`.

        The attention of a layer goes to a file as soon as it is made; all else is read from the parent's files. The new
        ones lie in `scratch`, or in the system's folder for temporary files, and go when the child goes.
        """
        like = next(self.model.parameters())
        child = Stream(hollow(type(self.model), config, like.dtype).eval(), self.stored, device=self.device)
        child.finite |= self.finite
        folder = Path(tempfile.mkdtemp(prefix="headwise-", dir=self.scratch))
        weakref.finalize(child, shutil.rmtree, folder, ignore_errors=True)  # called when `child` is collected
        for layer, weights in zip(range(len(self.blocks)), layers, strict=True):
            inside = set(attentions(child.model)[layer].modules())
            slots = [slot for slot in child._slots[layer] if slot.module in inside]
            # What was there before stands in for what is not changed; `write_layer` writes over the rest.
            fresh = {slot.name: torch.empty_like(slot.hollow, device="cpu") for slot in slots}
            for slot in slots:
                before = self.borrow(slot.name)
                if before.shape == slot.hollow.shape:
                    fresh[slot.name].copy_(before)
                slot.put(nn.Parameter(fresh[slot.name], requires_grad=False))
            write_layer(child.model, layer, weights)
            path = folder / f"layer-{layer}.safetensors"
            write_shard(path, fresh)
            child.stored |= tensors_in(path)
            child.finite -= fresh.keys()  # new numbers, to be looked through when they are read
            for slot in slots:
                slot.put(slot.hollow)
        return child.model

    def write(self, folder: Path) -> None:
        """The weights as shards of a layer each, with their index; tensor by tensor, from file to file."""
        places = {slot.name: n for n, slots in enumerate(self._slots, 1) for slot in slots}  # 0: outside of the layers
        shards: dict[int, dict[str, Tensor]] = {}
        for name, weights in self.model.named_parameters():  # one that stands in two places is written once
            shards.setdefault(places.get(name, 0), {})[name] = weights
        index = {}
        # i numbers the files without a gap: there may be no shard 0.
        for i, n in enumerate(sorted(shards), 1):
            file = f"model-{i:05}-of-{len(shards):05}.safetensors"
            tensors = {name: self._weights(name, like).detach().cpu() for name, like in shards[n].items()}
            write_shard(folder / file, tensors)
            index.update(dict.fromkeys(shards[n], file))
        document = {"metadata": {"total_size": self.size}, "weight_map": index}
        write_whole(folder / "model.safetensors.index.json", json.dumps(document, indent=2) + "\n")

    @property
    def size(self) -> int:
        """Bytes of all weights."""
        return sum(weights.nbytes for weights in self.model.parameters())

    @property
    def at_once(self) -> int:
        """Tokens that may run together: what they fill in a layer takes a quarter of the free memory at most.

        No more than BATCH, as with a model in memory. A quarter is a round choice; `portions` takes another one.
        """
        return max(1, min(BATCH, free_on(self.device).size // 4 // self._active))

    @property
    def _active(self) -> int:
        """Bytes that a token fills while a layer runs, about: some copies of its widest state."""
        # The longer side of a matrix is the wider of what it reads and what it gives.
        matrices = [slot.hollow for slots in self._slots for slot in slots if slot.hollow.ndim == 2]
        return COPIES * max(max(matrix.shape) for matrix in matrices) * next(self.model.parameters()).itemsize

    def forecast(self, tokens: int, longest: int, reads: int = 1) -> str:
        """What so many tokens take, in a line; HeadwiseError where the longest document does not fit into memory.

        longest  tokens of the longest document
        reads    how many times the weights are read, for the line
        """
        free = free_on(self.device)
        layer = max(sum(slot.hollow.nbytes for slot in slots) for slots in self._slots)  # bytes of the largest
        # What lies beside the running layer: states of the text on the processor, on a device the layer's own weights.
        beside = min(tokens * self.state_size, free.size // 4) if self.device == CPU else layer
        # A quarter is the most that `portions` lets states take. Beside them a batch fills the layer: `at_once` tokens,
        # or one document, which is not cut.
        needed = beside + max(longest, min(tokens, self.at_once)) * self._active
        if needed > free.size:
            fits = max(1, int(longest * free.size / needed) // 2)  # half of it: `needed` is an estimate
            raise HeadwiseError(
                f"a document of {longest:,} tokens takes {amount(needed)}, and {amount(free.size)} are free "
                f"({free.limit}); tokens={fits:,} would fit"
            )
        # In the format in which layers run, which may be another one than that of the files.
        matrix = next(self._weights(slot.name, slot.hollow) for slot in self._slots[0] if slot.hollow.ndim == 2)
        x = torch.ones(PROBE, matrix.shape[1], dtype=matrix.dtype, device=self.device)

        def product() -> float:
            return F.linear(x, matrix)[0, 0].item()  # the number is there when the device is done

        product()  # in the first call the pages of the matrix come from the disk
        # FLOPs: each number of a matrix is multiplied and added once for each row, here and for each token below.
        speed = 2 * PROBE * matrix.numel() / seconds_of(product)
        products = 2 * tokens * sum(slot.hollow.numel() for slots in self._slots for slot in slots)
        return (
            f"layer by layer: {amount(self.size)} of weights, {amount(layer)} a layer; {amount(free.size)} of "
            f"memory are free, and {tokens:,} tokens take {amount(needed)}. Matrix products: "
            f"{products / 1000000000000.0:,.1f} TFLOP, {products / speed / 60:,.1f} min at "
            f"{speed / 1000000000.0:,.0f} GFLOP/s; to it comes the reading, {reads} "
            f"{'time' if reads == 1 else 'times'}"
        )

    @property
    def attention_size(self) -> int:
        """Bytes of the weights that a change of heads writes anew."""
        return sum(weights.nbytes for module in attentions(self.model) for weights in module.parameters())

    def _in_turn(self, layer: int, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """The `forward` of a layer, which runs only where it is the layer's turn.

        In turn n, layer n runs; layer n - 1 gives what it made a turn ago, which is what layer n reads; each other one
        hands its input on. In a turn after the last layer none runs, and what the last one made goes to the final norm.
        """
        first = next(iter(inspect.signature(forward).parameters))  # the name of what the layer reads: hidden_states

        @functools.wraps(forward)  # whoever asks for its signature gets that of the layer
        def run(*args: Any, **keywords: Any) -> Tensor:
            if self.layer is None:  # a plain forward pass: every layer comes and goes
                with self.loaded(layer):
                    return forward(*args, **keywords)
            hidden: Tensor = args[0] if args else keywords.pop(first)
            if layer == self.layer:
                out = forward(hidden, *args[1:], **keywords)
                self.states[self.number] = out.detach().cpu()
                return out
            # The one before the layer of this turn: `states` holds what it gave in its own turn.
            if layer == self.layer - 1:
                return self.states[self.number].to(self.device)
            return hidden  # another one's turn

        return run


def hollow(kind: Any, config: Any, dtype: torch.dtype) -> Any:
    """A model whose weights lie on the meta device; of what no file holds, RoPE's frequencies, it has the numbers.

    kind  a class of models of transformers, or one of its AutoModel classes
    """
    with shapes_alone():
        # AutoModel has from_config, a class of transformers _from_config; other classes take the config themselves.
        build = getattr(kind, "from_config", None) or getattr(kind, "_from_config", None)
        model: Any = cast(kind(config), dtype) if build is None else build(config, dtype=dtype)
    for module in model.modules():
        lacking = [leaf for leaf, buffer in module.named_buffers(recurse=False) if buffer.is_meta]
        for leaf in lacking:  # not `to_empty`: it makes new weights, too, and a tied matrix would be tied no more
            setattr(module, leaf, torch.empty_like(getattr(module, leaf), device="cpu"))
        if lacking:
            model._init_weights(module)  # writes the numbers of buffers, too; what lies on the meta device stays there
    return model


def stream_of(model: nn.Module) -> Stream | None:
    """What streams the model; None for one in memory."""
    return getattr(model, "headwise_stream", None)


def turns(model: nn.Module) -> int:
    """How many turns a `sweep` has."""
    stream = stream_of(model)
    return 1 if stream is None else len(stream.blocks)


def portions(model: nn.Module, documents: Sequence[Ids]) -> Iterator[tuple[int, Sequence[Ids]]]:
    """Documents in parts whose states fit into a quarter of the free memory, each with the number of its first.

    A document is not cut: one that is longer makes a part alone. Of a model in memory all are one part.
    """
    stream = stream_of(model)
    if stream is None:
        yield 0, documents
        return
    most = free_memory().size // 4 // stream.state_size  # tokens of a part
    start = tokens = 0
    part: list[Ids] = []
    for document in documents:
        if part and tokens + len(document) > most:
            yield start, part
            start, tokens, part = start + len(part), 0, []
        part.append(document)
        tokens += len(document)
    yield start, part


def sweep(model: nn.Module, batches: Sequence[Tensor]) -> Iterator[Iterator[tuple[int, Tensor]]]:
    """Turns in which the model's body is to run on the batches: all layers at once, or of a streamed model one each.

    A turn gives for each batch the number of its first document, and its ids (B,T). The layer of a turn has its weights
    until the next turn begins.
    """
    stream = stream_of(model)
    if stream is None:
        starts = itertools.accumulate(map(len, batches), initial=0)  # one more than batches: the last is the end
        yield zip(starts, batches, strict=False)
        return
    for layer in range(len(stream.blocks)):
        with stream.loaded(layer), stream.only(layer):
            yield stream.numbered(batches)


def loaded(model: nn.Module, layer: int) -> AbstractContextManager[None]:
    """A block in which the layer has its weights, as those of a model in memory always do."""
    stream = stream_of(model)
    return nullcontext() if stream is None else stream.loaded(layer)
