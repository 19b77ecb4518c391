"""Reads from wheels of flashinfer-python which arguments the calls that busllm makes may have.

    python -m tests.engine.flashinfer.read_signatures flashinfer_python-*.whl > tests/engine/flashinfer/signatures.json

The package is large and needs CUDA, so tests compare with this file; where it is installed they compare with itself.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import zipfile

CLASSES = {
    "BatchDecodeWithPagedKVCacheWrapper": "flashinfer/decode.py",
    "BatchPrefillWithPagedKVCacheWrapper": "flashinfer/prefill.py",
}
METHODS = ("__init__", "plan", "run")


def parameters(function: ast.FunctionDef) -> dict[str, bool]:
    """Names that may be given by keyword, and whether they must be given."""
    ordered = [argument.arg for argument in function.args.args if argument.arg != "self"]
    num_required = len(ordered) - len(function.args.defaults)
    found = {name: index < num_required for index, name in enumerate(ordered)}
    for argument, default in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True):
        found[argument.arg] = default is None
    return found


def methods_of(source: str, class_name: str) -> dict[str, dict[str, bool]]:
    """The last definition of each method: the ones before it are overloads."""
    (node,) = (n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == class_name)
    functions = {f.name: f for f in node.body if isinstance(f, ast.FunctionDef)}
    found = {name: parameters(functions[name]) for name in METHODS}
    if functions["plan"].args.kwarg is not None:  # it hands everything on to this one
        found["plan"] = parameters(functions["_plan_impl"])
    return found


def main(wheels: list[str]) -> None:
    versions = {}
    for wheel in wheels:
        version = re.findall(r"flashinfer_python-([^-]+)-", wheel)[0]
        with zipfile.ZipFile(wheel) as files:
            versions[version] = {name: methods_of(files.read(path).decode(), name) for name, path in CLASSES.items()}
    print(json.dumps(versions, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
