"""What imports what: the packages in their order, the backends apart, and heavy libraries behind one door each."""

import json
import subprocess
import sys

import pytest
from measure import imports_of, package_sources

ORDER = (
    "base", "backends", "layer", "corpus", "gpt", "courses", "models", "cost", "heads", "reshape", "checker", "learn",
    "view", "cli",
)  # fmt: skip
BASE = {
    "spec", "masks", "positions", "shapes", "errors", "families", "files", "intervals",
    "records", "table", "words",
}  # fmt: skip
APART = {"headwise.backends.loops", "headwise.backends.numpy_", "headwise.backends.torch_"}
ONE_DOOR = ("transformers", "safetensors", "tokenizers")


def package_of(module: str) -> str | None:
    """The package a module of the package lies in; None for the package itself, and for what is in no package."""
    parts = module.split(".")
    if len(parts) == 1:
        return None
    return "base" if parts[1] in BASE else parts[1] if parts[1] in ORDER[1:] else None


def violations(sources: dict[str, str], packages: set[str]) -> list[str]:
    """What breaks the rule, one line each. `sources` maps module names to texts, `packages` are the __init__ files."""
    found: list[str] = []
    doors: dict[str, set[str]] = {name: set() for name in ONE_DOOR}
    for module, source in sources.items():
        if module in ("headwise", "headwise.__main__"):  # the face and the command stand outside the packages
            continue
        package = package_of(module)
        if package is None:
            found.append(f"{module} is in no package")
            continue
        for target in set(imports_of(module, source, module in packages, set(sources))):
            top = target.split(".")[0]
            for door in doors:
                if f"{target}.".startswith(f"{door}."):
                    doors[door].add(module)
            if package == "view" and top == "torch":
                found.append(f"{module} imports torch")
            if top == "headwise":
                found += _inside(module, package, target)
    found += [
        f"{name} is imported in {len(at)} modules: {', '.join(sorted(at))}" for name, at in doors.items() if len(at) > 1
    ]
    return sorted(found)


def _inside(module: str, package: str, target: str) -> list[str]:
    """What is wrong with one import from the package itself."""
    target_package = package_of(target)
    if target_package is None:
        return [f"{module} imports {target}, which is in no package"]
    if target_package == "cli" and package != "cli":
        return [f"{module} imports the command line, {target}"]
    if ORDER.index(target_package) > ORDER.index(package):
        return [f"{module} imports {target}, which stands below {package}"]
    if module in APART and target in APART - {module}:
        return [f"{module} imports {target}: backends never import one another"]
    return []


def test_names_and_rooms() -> None:
    sources, packages = package_sources()
    assert {"headwise.spec", "headwise.backends.loops", "headwise.backends"} <= set(sources)
    assert violations(sources, packages) == []


def loaded_after(code: str) -> set[str]:
    """The libraries that a fresh interpreter holds after some code."""
    tail = "\nimport json, sys\nprint(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code + tail], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


HEAVY = {"torch", "transformers", "tokenizers", "onnx", "matplotlib"}


@pytest.mark.slow
def test_what_loads_early() -> None:
    assert not loaded_after("import headwise") & HEAVY
    code = """
import numpy as np
import headwise as hw
lists = [[[[1.0, 2.0], [3.0, 4.0]]]]
mask = hw.Causal() & hw.Lengths([2]) & hw.Alibi() & hw.Bias([[0.5, 1.0]])
hw.attend(lists, lists, lists, mask=mask, sink=[1.0], gate=[0.5], softcap=2.0)
hw.trace(np.array(lists), np.array(lists), np.array(lists), mask=mask, sink=[1.0], gate=[0.5], softcap=2.0)
hw.AttentionSpec(d_model=6, n_heads=3, mask=mask).n_parameters
"""
    assert not loaded_after(code) & HEAVY
    shown = "import headwise as hw\nq = [[[1.0], [2.0]]]\nassert '<table>' in hw.trace(q, q, q)._repr_html_()"
    assert not loaded_after(shown) & {*HEAVY, "numpy"}
    sizes = "n_embd=768, n_layer=12, n_head=12, vocab_size=50257, n_positions=1024"
    priced = f"import headwise as hw\nassert hw.price(dict(model_type='gpt2', {sizes})).way == 'config'"
    assert not loaded_after(priced) & HEAVY
    loaded = loaded_after("import torch, headwise as hw\nx = torch.ones(1, 1, 2, 3)\nhw.attend(x, x, x)")
    assert "torch" in loaded
    assert "transformers" not in loaded
