"""The topology file: every mistake is refused, with its key, its line and the nearest right word."""

from __future__ import annotations

from pathlib import Path

import pytest

from busllm.errors import ConfigError
from busllm.topology.config import Topology
from busllm.topology.read import load_topology, parse_topology

LOCAL = Path(__file__).parents[2] / "local.toml"


def mistake(text: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        parse_topology(text, "some.toml")
    assert caught.value.file == "some.toml"
    return caught.value


def test_an_empty_file_is_the_built_in_topology() -> None:
    assert parse_topology("") == load_topology(None) == Topology()


def test_local_toml_spells_out_the_built_in_topology() -> None:
    assert load_topology(LOCAL) == Topology()


def test_local_toml_names_every_key() -> None:
    text = LOCAL.read_text()
    for struct in (Topology(), Topology().bus, Topology().model, Topology().frontend, Topology().scheduler):
        for key in struct.__struct_fields__:
            if key != "options":
                assert f"{key} = " in text or f"[{key}]" in text, key


def test_values_of_every_form_are_read() -> None:
    topology = parse_topology(
        """
        cluster = "west-1"
        bus = { kind = "nats", url = "nats://a:4222,tls://b:4222" }
        frontend.count = 2
        frontend.listen = [
            "127.0.0.1:1", # the first
            "[::1]:2",
        ]
        frontend.header_wait_s = 3
        scheduler.kv_memory = 0.5
        scheduler.step_tokens = 640
        """
    )
    assert topology.frontend.listen == ("127.0.0.1:1", "[::1]:2")
    assert topology.frontend.header_wait_s == 3.0
    assert (topology.scheduler.kv_memory, topology.scheduler.step_tokens) == (0.5, 640)
    assert topology.bus.url == "nats://a:4222,tls://b:4222"


@pytest.mark.parametrize(
    ("text", "key", "line", "suggestion"),
    [
        ("page_sise = 16", "page_sise", 1, "scheduler.page_tokens"),
        ("\n[scheduler]\n\npage_sise = 16", "scheduler.page_sise", 4, "scheduler.page_tokens"),
        ("[shceduler]", "shceduler", 1, "scheduler"),
        ("[frontend]\nCount = 2", "frontend.Count", 2, "frontend.count"),
        ("[model]\nkv_tokens = 9", "model.kv_tokens", 2, "scheduler.kv_tokens"),
        ("[scheduler]\nlistn = 'x'", "scheduler.listn", 2, "frontend.listen"),
        ("[frontend]\ntls = { certificate_file = 'c', key = 'k' }", "frontend.tls.key", 2, "frontend.tls.key_file"),
        ("[[process]]\nstage = ['frontend']", "process[0].stage", 2, "process[0].stages"),
        ("[model]\ndtype = 'bf16'", "model.dtype", 2, "bfloat16"),
        ("[trace]\nlevel = 'request'", "trace.level", 2, "requests"),
        ("[scheduler]\nstep_tokens = 'Auto'", "scheduler.step_tokens", 2, "auto"),
        ("[bus]\nkind = 'nat'", "bus.kind", 2, "nats"),
        ("[scheduler]\nattention = 'flash-infer'", "scheduler.attention", 2, "flashinfer"),
        ("[[process]]\nstages = ['frontent']", "process[0].stages", 2, "frontend"),
    ],
)
def test_a_misspelt_word_is_refused_with_the_nearest_right_one(text: str, key: str, line: int, suggestion: str) -> None:
    error = mistake(text)
    assert (error.key, error.line, error.suggestion) == (key, line, suggestion)
    assert f"some.toml:{line}: {key}: " in str(error)
    assert f"Did you mean {suggestion!r}?" in str(error)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("frontend.listen = 8000", "frontend.listen"),
        ("frontend.count = '2'", "frontend.count"),
        ("frontend.count = 2.0", "frontend.count"),
        ("frontend.count = true", "frontend.count"),
        ("frontend.count = 0", "frontend.count"),
        ("frontend.max_body_bytes = 1e9", "frontend.max_body_bytes"),
        ("frontend.header_wait_s = nan", "frontend.header_wait_s"),
        ("frontend.drain_timeout_s = inf", "frontend.drain_timeout_s"),
        ("frontend.resume_deadline_s = -1", "frontend.resume_deadline_s"),
        ("frontend.header_wait_s = true", "frontend.header_wait_s"),
        ("frontend.listen = ['127.0.0.1:1', 3]", "frontend.listen[1]"),
        ("frontend.tls = { certificate_file = 'c' }", "frontend.tls.key_file"),
        ("scheduler.page_tokens = 0", "scheduler.page_tokens"),
        ("scheduler.page_tokens = -1", "scheduler.page_tokens"),
        ("scheduler.kv_memory = true", "scheduler.kv_memory"),
        ("scheduler.kv_memory = 1.5", "scheduler.kv_memory"),
        ("scheduler.kv_memory = 'much'", "scheduler.kv_memory"),
        ("scheduler.device = 'gpu'", "scheduler.device"),
        ("model.source = ''", "model.source"),
        ("model = 'smollm2-135m'", "model"),
        ("process = 3", "process"),
        ("cluster = 2026-01-01", "cluster"),
    ],
)
def test_a_value_of_the_wrong_type_or_range_is_refused(text: str, key: str) -> None:
    error = mistake(text)
    assert (error.key, error.line) == (key, 1)


@pytest.mark.parametrize(
    ("text", "key", "words"),
    [
        ("cluster = 'a b'", "cluster", "a b"),
        ("cluster = 'a.b'", "cluster", "a.b"),
        ("cluster = '>'", "cluster", ">"),
        ("frontend.listen = '8000'", "frontend.listen", "127.0.0.1:8000"),
        ("frontend.listen = '127.0.0.1:99999'", "frontend.listen", "65535"),
        ("frontend.listen = ['127.0.0.1:1']\nfrontend.count = 2", "frontend.listen", "1 addresses"),
        ("frontend.listen = ['0.0.0.0:80', '127.0.0.1:80']\nfrontend.count = 2", "frontend.listen", "port 80"),
        ("scheduler.collective_listen = 'x'", "scheduler.collective_listen", "look like"),
        ("scheduler.kv_tokens = 99\nscheduler.kv_memory = '1GiB'", "scheduler.kv_memory", "kv_tokens"),
        ("scheduler.page_tokens = 64\nscheduler.step_tokens = 16", "scheduler.step_tokens", "64"),
        ("scheduler.page_tokens = 64\nscheduler.kv_tokens = 16", "scheduler.kv_tokens", "64"),
        ("bus.url = 'localhost'", "bus.url", "nats://"),
        ("bus.kind = 'memory'\nbus.url = 'nats://a:1'", "bus.url", "memory"),
        ("bus.tls = { key_file = 'k' }", "bus.tls.key_file", "certificate_file"),
        ("bus.options = { a = 1 }", "bus.options", "plug-ins"),
        ("model.null = { step_time_s = 1 }", "model.null", '"null"'),
        ("[[process]]\nstages = ['frontend']", "process", "tokenizer:0"),
        ("[[process]]\nstages = []", "process[0].stages", "empty"),
        ("[[process]]\nstages = ['frontend:1']", "process[0].stages", "frontend.count is 1"),
        ("[[process]]\nstages = ['scheduler:0.1']", "process[0].stages", "tensor_parallel is 1"),
        ("[[process]]\nstages = ['frontend:0.1']", "process[0].stages", "only schedulers have ranks"),
        ("[[process]]\nstages = ['frontend', 'frontend', 'tokenizer', 'scheduler', 'detokenizer']",
         "process[0].stages", "twice"),
        ("[[process]]\nstages = ['frontend', 'tokenizer']\n[[process]]\nstages = ['scheduler', 'detokenizer',"
         " 'tokenizer:0']", "process[1].stages", "process[0] has already"),
        ("bus.kind = 'memory'\n[[process]]\nstages = ['frontend', 'tokenizer']\n[[process]]\n"
         "stages = ['scheduler', 'detokenizer']", "bus.kind", "one process"),
        ("[[process]]\nhost = 'a b'\nstages = ['frontend']", "process[0].host", "a b"),
        ("bus.url = 'nats://n:1'\n[[process]]\nhost = 'a'\nstages = ['frontend', 'tokenizer']\n[[process]]\n"
         "stages = ['scheduler', 'detokenizer']", "process[1].host", "every host would start"),
        ("[[process]]\nhost = 'a'\nstages = ['frontend', 'tokenizer']\n[[process]]\nhost = 'b'\n"
         "stages = ['scheduler', 'detokenizer']", "bus.url", "several hosts"),
    ],
)  # fmt: skip
def test_values_that_cannot_work_together_are_refused(text: str, key: str, words: str) -> None:
    error = mistake(text)
    assert error.key == key
    assert words in str(error)


def test_two_frontends_of_different_hosts_may_use_the_same_port() -> None:
    parse_topology(
        """
        bus.url = "nats://n:4222"
        frontend = { count = 2, listen = ["0.0.0.0:80", "0.0.0.0:80"] }
        [[process]]
        host = "a"
        stages = ["frontend:0", "tokenizer"]
        [[process]]
        host = "b"
        stages = ["frontend:1", "scheduler", "detokenizer"]
        """
    )


@pytest.mark.parametrize(
    ("text", "line"), [("a = ", 1), ("cluster = 'a'\ncluster = 'b'", 2), ("[bus]\n[model\n", 2), ("x", 1)]
)
def test_what_is_not_toml_is_refused_with_its_line(text: str, line: int) -> None:
    error = mistake(text)
    assert "not valid TOML" in str(error)
    assert error.line == line


def test_a_file_that_cannot_be_read_is_refused_and_never_replaced_by_defaults(tmp_path: Path) -> None:
    utf16 = tmp_path / "utf16.toml"
    utf16.write_bytes("cluster = 'a'".encode("utf-16"))
    for path, words in ((tmp_path / "none.toml", "no such file"), (tmp_path, "directory"), (utf16, "UTF-8")):
        with pytest.raises(ConfigError, match=words) as caught:
            load_topology(path)
        assert caught.value.file == str(path)


def test_a_secret_in_a_bus_url_is_not_repeated_in_the_error() -> None:
    assert "secret" not in str(mistake("bus.url = 'http://secret@host:4222'"))
