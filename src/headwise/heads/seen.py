"""What was seen of the heads while a model ran: means, and numbers row by row."""

from __future__ import annotations

import difflib
import html
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.heads.statistics import Measured
from headwise.models.sites import Site


class Rows:
    """The numbers of one head row by row, `rows.entropy` or `rows["entropy"]`, (n,) float32 each."""

    def __init__(self, values: dict[str, NDArray[np.float32]]) -> None:
        self._values = values

    def __getitem__(self, name: str) -> NDArray[np.float32]:
        name = "offset_1" if name == "previous" else name
        if name not in self._values:
            raise HeadwiseError(f"there is no statistic {name!r} of this head; there are {', '.join(self._values)}")
        return self._values[name]

    def __getattr__(self, name: str) -> NDArray[np.float32]:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self[name]
        except HeadwiseError as error:
            raise AttributeError(str(error)) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)


class SeenHead:
    """What one head did: `head.entropy` and so on are means over the rows, `head.rows` has them one by one."""

    def __init__(self, name: str, documents: Sequence[tuple[Measured, int]]) -> None:
        self.name = name
        self._documents = documents  # and the number of this head among those measured
        self.rows = Rows(
            {
                key: np.concatenate([found.rows[key][h].float().cpu().numpy() for found, h in documents])
                for key in documents[0][0].rows
                if all(key in found.rows for found, _ in documents)
            }
        )

    def __getattr__(self, name: str) -> float:
        if name.startswith("_"):
            raise AttributeError(name)
        values = getattr(self.rows, name)
        return float(np.mean(values, dtype=np.float64)) if len(values) else float("nan")

    @property
    def received(self) -> NDArray[np.float32]:
        """What each key received from all queries together, (S,); of the last call's last document."""
        return self._last(lambda found: found.received)

    @property
    def thumbnail(self) -> NDArray[np.float32]:
        """Exact means of the weights over blocks of queries x keys; of the last call's last document."""
        return self._last(lambda found: found.thumbnail)

    @property
    def mean_out(self) -> NDArray[np.float32]:
        """Mean of the head's output over all rows, (E,)."""
        counts = [len(found.places) for found, _ in self._documents]
        means = [found.mean_out[h].float().cpu().numpy() for found, h in self._documents]
        return np.average(means, axis=0, weights=counts if any(counts) else None).astype(np.float32)

    def _last(self, part: Callable[[Measured], Tensor]) -> NDArray[np.float32]:
        found, h = self._documents[-1]
        return part(found)[h].float().cpu().numpy()

    def __repr__(self) -> str:
        said = ", ".join(f"{name}={getattr(self, name):.4g}" for name in ("entropy", "confidence", "first"))
        return f"{self.name}({said}, rows={len(self.rows.entropy)})"


class Seen(Mapping[str, SeenHead]):
    """Every head that ran, by name: `seen["L3.H5"]`."""

    def __init__(self, sites: Sequence[str], heads: Sequence[str]) -> None:
        self._known, self._sites = list(heads), list(sites)
        self._found: dict[str, list[tuple[Measured, int]]] = {}
        self.top: dict[str, dict[int, list[tuple[int, float]]]] = {}  # head -> row -> (key, weight), largest first

    def add(self, site: Site, found: Measured, top: tuple[Tensor, Tensor] | None, rows: Sequence[int]) -> None:
        for h in range(found.received.shape[0]):
            self._found.setdefault(site.head(h), []).append((found, h))
            if top is not None:
                keys, weights = (part[h].tolist() for part in top)
                self.top[site.head(h)] = {
                    row: list(zip(keys[n], weights[n], strict=True)) for n, row in enumerate(rows)
                }

    def __getitem__(self, name: str) -> SeenHead:
        if name in self._found:
            return SeenHead(name, self._found[name])
        if name in self._known:
            raise HeadwiseError(
                f"{name} did not run inside the block; run the model, or the part of it that has {name}"
            )
        raise unknown_head(name, self._known)

    def __iter__(self) -> Iterator[str]:
        if not self._found:
            raise HeadwiseError("no head has run; run the model inside the `with` block")
        return iter([name for name in self._known if name in self._found])

    def __len__(self) -> int:
        return len(self._found)

    def __contains__(self, name: object) -> bool:
        return name in self._found

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401  # this is that method

    def __repr__(self) -> str:
        rows = max((len(documents[0][0].places) for documents in self._found.values()), default=0)
        return f"Seen({len(self)} of {len(self._known)} heads, the first document of {rows} rows)"

    def _repr_html_(self) -> str:
        """A table for notebooks: a head a line, each statistic's mean over the rows."""
        heads = [self[name] for name in self] if self._found else []
        names = list(dict.fromkeys(name for head in heads for name in head.rows))
        cells = "".join(f"<th>{html.escape(name)}</th>" for name in ["head", *names])
        lines = [f"<tr>{cells}</tr>"]
        for head in heads:
            numbers = "".join(f"<td>{getattr(head, n):.3f}</td>" if n in head.rows else "<td></td>" for n in names)
            lines.append(f"<tr><th>{html.escape(head.name)}</th>{numbers}</tr>")
        return f"<table>{''.join(lines)}</table>"


def unknown_head(name: object, known: Sequence[str]) -> HeadwiseError:
    """What to raise for a head that the model does not have."""
    near = difflib.get_close_matches(str(name), known, n=2)
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are {len(known)}, {known[0]} to {known[-1]}"
    return HeadwiseError(f"no head {name!r}; {hint}")
