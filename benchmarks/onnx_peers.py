"""The test cases of the ONNX operator Attention: how many headwise answers, and how many torch's own operator does.

The peer is `torch.onnx.ops.attention` (opset 23), called as it is: inputs and attributes go in by their names. A case
with an input or attribute that it does not have (`nonpad_kv_seqlen` of opset 24, the windows of opset 25) counts as
not expressible. Both sides are held to the tolerance of the project's tests, which allows float16 two units in the last
place and float32 sixteen. A last column counts by the rule of the `onnx` package's runner, 1e-3, which is one unit of
float16: no more than the error of the expected answers themselves, so there it is a matter of luck.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

TESTS = Path(__file__).resolve().parents[1] / "tests"  # where the operator is said in headwise's words
PATHS = ("plain", "array", "fused", "explicit")
PEER = "torch.onnx.ops.attention"
OUTPUTS = ("Y", "present_key", "present_value", "qk_matmul_output")


class NotExpressibleError(Exception):
    """The operator of opset 23 has no such input or attribute."""


def run(runs: int) -> dict[str, Any]:
    """Count the cases; they are the same numbers at every run, so one is enough."""
    sys.path.insert(0, str(TESTS))
    try:
        import onnx_adapter
    finally:
        sys.path.remove(str(TESTS))
    try:
        cases = onnx_adapter.cases()
    except ImportError:
        return {"table": "not run: the package onnx is absent"}
    sides: dict[str, Callable[[Any], Any]] = {
        f"headwise {path}": lambda case, path=path: onnx_adapter.run(case, path) for path in PATHS
    }
    sides[PEER] = _peer
    results = {side: _count(answer, cases, onnx_adapter.ULPS) for side, answer in sides.items()}
    for side, answer in sides.items():
        results[side]["passed_by_runner"] = _count(answer, cases, onnx_adapter.RUNNER)["passed"]
    return {"cases": len(cases), "results": results, "table": _table(len(cases), results)}


def _count(answer: Callable[[Any], Any], cases: list[Any], tolerances: dict[str, float]) -> dict[str, Any]:
    """How many cases pass; those that do not, and why."""
    failed, not_expressible = {}, {}
    for case in cases:
        try:
            case.check(answer(case), tolerances)
        except NotExpressibleError as error:
            not_expressible[case.name] = str(error)
        except (AssertionError, RuntimeError, ValueError) as error:  # a wrong answer, or a refusal
            failed[case.name] = " ".join(str(error).split())[:200]
    passed = len(cases) - len(failed) - len(not_expressible)
    return {"passed": passed, "failed": failed, "not_expressible": not_expressible}


def _peer(case: Any) -> dict[str, np.ndarray]:
    windows = {"left_window_size", "right_window_size"} & set(case.attributes)
    missing = sorted(windows | ({"nonpad_kv_seqlen"} & set(case.inputs)))
    if missing:
        raise NotExpressibleError(f"no {', '.join(missing)}")
    tensors = {name: _tensor(array) for name, array in case.inputs.items()}
    attributes = {name: bool(x) if name == "is_causal" else x for name, x in case.attributes.items()}
    made = dict(zip(OUTPUTS, torch.onnx.ops.attention(**tensors, **attributes), strict=True))
    return {name: _array(made[name], expected.dtype) for name, expected in case.outputs.items()}


def _tensor(array: np.ndarray) -> torch.Tensor:
    brain = array.dtype.name == "bfloat16"  # which torch does not read from NumPy
    return torch.tensor(array.astype(np.float32)).bfloat16() if brain else torch.tensor(array)


def _array(tensor: torch.Tensor, dtype: np.dtype[Any]) -> np.ndarray:
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy().astype(dtype, copy=False)


def _table(n_cases: int, results: dict[str, Any]) -> str:
    rows = [f"of {n_cases} cases                 passed  failed  not expressible  passed at the runner's 1e-3"]
    for side, row in results.items():
        rows.append(
            f"{side:27}  {row['passed']:6}  {len(row['failed']):6}  {len(row['not_expressible']):15}  "
            f"{row['passed_by_runner']:27}"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    print(json.dumps(run(1), indent=2))
