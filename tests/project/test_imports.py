"""What a process loads: a parent, a frontend and a tokenizer stay light."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "numba")


def loaded(statements: str) -> set[str]:
    """Names of the top-level modules that are loaded after the statements."""
    code = f"{statements}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "module",
    [
        "busllm",
        "busllm.client",
        "busllm.cli.main",
        "busllm.cli.up",
        "busllm.cli.stage",
        "busllm.cli.check",
        "busllm.topology.up",
        "busllm.stages.process",
        "busllm.stages.frontend.stage",
        "busllm.stages.tokenizer",
        "busllm.stages.detokenizer",
    ],
)
def test_a_light_module_loads_no_engine(module: str) -> None:
    assert loaded(f"import {module}").isdisjoint(HEAVY)


def test_the_parent_loads_no_tokenizer_either() -> None:
    assert "tokenizers" not in loaded("import busllm.cli.up, busllm.topology.up")


def test_help_and_a_misspelt_command_load_no_command() -> None:
    names = loaded("from busllm.cli.main import main\nmain(['--help'])\nmain(['upp'])")
    assert names.isdisjoint({*HEAVY, "nats", "anyio", "httpx", "rich"})
