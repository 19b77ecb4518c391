"""Plug-ins, found by entry point."""

from __future__ import annotations

from pathlib import Path

import pytest

from busllm.errors import MissingPackage
from busllm.registry import load_plugin, plugin_names


@pytest.fixture
def installed_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package with two plug-ins, of which one lacks a package."""
    information = tmp_path / "busllm_pigeon-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: busllm-pigeon\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(
        "[busllm.bus]\npigeon = busllm_pigeon:make_bus\nlame = busllm_lame_pigeon:make_bus\n"
    )
    (tmp_path / "busllm_pigeon.py").write_text("def make_bus(options):\n    return options\n")
    (tmp_path / "busllm_lame_pigeon.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("installed_plugin")
def test_an_installed_plugin_is_found_by_group_and_name() -> None:
    assert {"pigeon", "lame"} <= set(plugin_names("busllm.bus"))
    assert load_plugin("busllm.bus", "pigeon")(7) == 7


@pytest.mark.usefixtures("installed_plugin")
def test_a_missing_plugin_names_the_group_and_what_is_installed() -> None:
    with pytest.raises(MissingPackage) as missing:
        load_plugin("busllm.bus", "pidgeon", built_in=("memory",))
    for part in ("'pidgeon'", "busllm.bus", "Did you mean 'pigeon'", "Built in: memory", "lame, pigeon"):
        assert part in missing.value.message


@pytest.mark.usefixtures("installed_plugin")
def test_a_plugin_that_lacks_a_package_names_both() -> None:
    with pytest.raises(MissingPackage, match=r"'busllm-pigeon'.*a_package_that_is_not_there"):
        load_plugin("busllm.bus", "lame")


def test_a_plugin_of_another_group_is_not_found(installed_plugin: None) -> None:
    with pytest.raises(MissingPackage):
        load_plugin("busllm.stage", "pigeon")
