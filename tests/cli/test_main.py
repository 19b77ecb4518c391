"""The command line: exit statuses, suggestions, which cluster a command finds."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from busllm.cli.main import COMMANDS, main
from busllm.cli.stage import listen_fds, stage_of
from busllm.errors import ConfigError
from busllm.testing.tiny_model import write_tiny_model
from busllm.topology.config import Topology
from busllm.topology.placement import StageId
from busllm.topology.read import parse_topology
from busllm.topology.state import RunningCluster


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Runs a command; returns status, stdout and stderr."""
    try:
        status = main(words)
    except SystemExit as exit_:
        status = int(exit_.code or 0)
    out, err = capsys.readouterr()
    return status, out, err


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of state files, empty."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    directory = tmp_path / "busllm"
    directory.mkdir()
    return directory


@contextmanager
def running(directory: Path, cluster: RunningCluster) -> Iterator[None]:
    """A cluster whose `up` lives, as far as its files can tell."""
    (directory / f"{cluster.cluster}@here.json").write_bytes(msgspec.json.encode(cluster))
    lock = os.open(directory / f"{cluster.cluster}@here.lock", os.O_CREAT | os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(lock)


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "--help")
    assert status == 0
    assert all(f"  {command.name}" in out for command in COMMANDS)


@pytest.mark.parametrize("command", [command.name for command in COMMANDS])
def test_every_command_has_help(capsys: pytest.CaptureFixture[str], command: str) -> None:
    status, out, _ = run(capsys, command, "--help")
    assert status == 0
    assert f"usage: busllm {command}" in out


@pytest.mark.parametrize(
    ("words", "suggestion"),
    [(("upp",), "'up'"), (("check", "--topolgy", "x"), "'--topology'"), (("stage", "fronted"), "'frontend'")],
)
def test_a_misspelt_word_exits_2_with_a_suggestion(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], suggestion: str
) -> None:
    status, _, err = run(capsys, *words)
    assert status == 2
    assert f"Did you mean {suggestion}" in err


def test_a_flag_given_twice_or_shortened_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "check", "--topology", "a", "--topology", "b")[0] == 2
    assert run(capsys, "check", "--topo", "a")[0] == 2


def test_a_misspelt_environment_variable_is_warned_of(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, state: Path
) -> None:
    monkeypatch.setenv("BUSLLM_CASHE", "x")
    assert "BUSLLM_CACHE?" in run(capsys, "env")[2]


def test_check_shows_processes_and_the_size_of_the_kv_cache(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "t.toml"
    file.write_text(
        "model.source = 'null'\nfrontend.listen = '127.0.0.1:8765'\nscheduler.kv_tokens = 4096\nscheduler.count = 2"
    )
    status, out, _ = run(capsys, "check", "--topology", str(file))
    assert status == 0
    for words in ("frontend:0 tokenizer:0 detokenizer:0", "scheduler:1", "127.0.0.1:8765", "4,096 tokens"):
        assert words in out


def test_check_exits_2_and_names_file_line_key_and_the_nearest_right_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "t.toml"
    file.write_text("[scheduler]\npage_sise = 16\n")
    status, _, err = run(capsys, "check", "--topology", str(file))
    assert status == 2
    assert err == (
        f"busllm check: {file}:2: scheduler.page_sise: there is no such key. Did you mean 'scheduler.page_tokens'?\n"
    )


def test_check_prints_the_values_in_force_without_secrets(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "t.toml"
    file.write_text("model.source = 'null'\nbus.url = 'nats://secret@10.0.0.1:4222'")
    status, out, _ = run(capsys, "check", "--values", "--topology", str(file))
    assert status == 0
    assert "secret" not in out
    values = msgspec.json.decode(out, type=Topology)
    assert (values.bus.url, values.scheduler.max_running) == ("nats://10.0.0.1:4222", 128)


def test_ranks_that_the_models_heads_do_not_divide_among_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model = write_tiny_model(tmp_path / "model")  # 6 heads, 2 of them for keys and values
    file = tmp_path / "t.toml"
    file.write_text(f"model.source = '{model}'\nscheduler.tensor_parallel = 4")
    status, _, err = run(capsys, "check", "--topology", str(file))
    assert status == 2
    assert "scheduler.tensor_parallel: is 4, but the model has 6 heads and 2 KV heads; possible are 1, 2, 6." in err
    status, _, err = run(capsys, "stage", "scheduler:0.1", "--topology", str(file))
    assert status == 2


def test_up_on_a_host_without_processes_exits_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "t.toml"
    file.write_text("[[process]]\nhost = 'gpu-1'\nstages = ['frontend', 'tokenizer', 'scheduler', 'detokenizer']")
    status, _, err = run(capsys, "up", "--topology", str(file), "--host", "gpu-2")
    assert status == 2
    assert "Did you mean 'gpu-1'?" in err


def test_up_looks_for_the_files_that_the_topology_names(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "t.toml"
    file.write_text("frontend.api_keys_file = 'nowhere.txt'")
    status, _, err = run(capsys, "up", "--topology", str(file))
    assert status == 2
    assert "frontend.api_keys_file: 'nowhere.txt' cannot be read" in err


def test_a_stage_without_a_bus_server_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "stage", "frontend")
    assert status == 2
    assert "bus.url: is missing" in err


def test_env_sets_variables_for_the_shell(capsys: pytest.CaptureFixture[str], state: Path) -> None:
    with running(state, RunningCluster("local", "nats://tok$en@127.0.0.1:4222", pid=1)):
        status, out, _ = run(capsys, "env")
    assert status == 0
    shown = subprocess.run(["sh", "-c", f'{out}\nprintf %s "$NATS_URL"'], capture_output=True, text=True, check=True)
    assert shown.stdout == "nats://tok$en@127.0.0.1:4222"


def test_env_tells_credentials_and_tls_files_of_a_topology(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "t.toml"
    file.write_text("[bus]\nurl = 'nats://a:4222'\ncredentials = 'c.creds'\ntls = { ca_file = 'ca.pem' }")
    _, out, _ = run(capsys, "env", "--topology", str(file))
    assert out.splitlines() == [
        "export NATS_URL=nats://a:4222", "export NATS_CREDS=c.creds", "export NATS_CA=ca.pem"
    ]  # fmt: skip


def test_with_a_memory_bus_env_exits_2_and_says_why(capsys: pytest.CaptureFixture[str], state: Path) -> None:
    topology = state / "local@here.toml"
    topology.write_text("bus.kind = 'memory'")
    with running(state, RunningCluster("local", "memory", pid=1, topology=str(topology))):
        status, _, err = run(capsys, "env")
    assert status == 2
    assert "memory bus" in err


def test_client_commands_pass_over_what_a_killed_up_has_left(capsys: pytest.CaptureFixture[str], state: Path) -> None:
    with running(state, RunningCluster("local", "nats://a:1", pid=1)):
        pass
    status, _, err = run(capsys, "env")
    assert status == 2
    assert "no cluster runs on this host" in err


def test_of_several_clusters_one_must_be_named(capsys: pytest.CaptureFixture[str], state: Path) -> None:
    with running(state, RunningCluster("one", "nats://a:1")), running(state, RunningCluster("two", "nats://b:2")):
        assert run(capsys, "env")[0] == 2
        assert "nats://b:2" in run(capsys, "env", "--cluster", "two")[1]
        status, _, err = run(capsys, "env", "--cluster", "onne")
        assert (status, "Did you mean 'one'?" in err) == (2, True)


@pytest.mark.parametrize(
    ("word", "index", "rank", "stage"),
    [
        ("frontend", None, None, StageId("frontend", 0)),
        ("tokenizer:1", None, None, StageId("tokenizer", 1)),
        ("tokenizer", "1", None, StageId("tokenizer", 1)),
        ("scheduler:1.1", None, None, StageId("scheduler", 1, 1)),
        ("scheduler", "1", "1", StageId("scheduler", 1, 1)),
        ("scheduler:1", None, "1", StageId("scheduler", 1, 1)),
    ],
)
def test_a_stage_is_named_by_a_word_or_by_flags(word: str, index: str | None, rank: str | None, stage: StageId) -> None:
    topology = parse_topology("tokenizer.count = 2\nscheduler = { count = 2, tensor_parallel = 2 }")
    assert stage_of(word, index, rank, topology) == stage


@pytest.mark.parametrize(("word", "index"), [("tokenizer:9", None), ("tokenizer", "x"), ("router", None)])
def test_a_stage_that_is_not_there_is_refused(word: str, index: str | None) -> None:
    with pytest.raises(ConfigError):
        stage_of(word, index, None, Topology())


def test_inherited_sockets_are_read_from_the_environment() -> None:
    assert listen_fds({}) == {}
    assert listen_fds({"BUSLLM_LISTEN_FDS": '{"0": 4, "1": 4}'}) == {0: 4, 1: 4}
    with pytest.raises(ConfigError, match="BUSLLM_LISTEN_FDS"):
        listen_fds({"BUSLLM_LISTEN_FDS": "4"})


def test_the_program_is_installed_as_busllm() -> None:
    program = Path(sys.executable).with_name("busllm")
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("busllm ")
