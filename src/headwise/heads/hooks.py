"""Hand every call of every attention of a model, with what is known about its documents, to a listener."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from torch import Tensor, nn

from headwise.heads.documents import Document, Marker, document_of, readers_of
from headwise.models.sites import Site, attach, sites_of
from headwise.records import Call

Listener = Callable[[Site, Call, Sequence[Document]], Tensor | None]


@contextmanager
def listening(model: nn.Module, listener: Listener, marker: Marker | None = None) -> Iterator[None]:
    """Hand every call of every attention of a model to `listener`, with what is known about its documents.

    What the listener returns replaces the heads' output (B,H,T,E).
    """
    sites = sites_of(model)
    readers = readers_of(model)

    def handle(site: Site) -> Callable[[Call], Tensor | None]:
        reader = readers.get(site.module)

        def watcher(call: Call) -> Tensor | None:
            cross = call.cross or site.cross
            documents = [document_of(call, b, cross, reader, marker) for b in range(call.q.shape[0])]
            return listener(site, call, documents)

        return watcher

    with ExitStack() as stack:
        for reader in set(readers.values()):
            stack.callback(reader.model.register_forward_pre_hook(reader.read, with_kwargs=True).remove)
            stack.callback(reader.model.register_forward_hook(reader.remember, with_kwargs=True).remove)
        stack.enter_context(attach({site: handle(site) for site in sites}, model))
        yield
