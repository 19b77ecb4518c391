"""Lines of keys in TOML texts of every form."""

from __future__ import annotations

from busllm.topology.toml_lines import KeyLines

TEXT = '''# a comment with [brackets] and key = 1
first = 1
long = """
second = 2   # not a key
"""
list = [
  "a]",      # with ] in it
  "b",
]
after = { inner = 1 }

[table."quoted key"]
deep.er = 1
[[array]]
x = 1
[[array]]
x = 2
'''


def test_each_key_is_found_at_its_line() -> None:
    lines = KeyLines(TEXT)
    assert lines.find(("first",)) == 2
    assert lines.find(("long",)) == 3
    assert lines.find(("list",)) == 6
    assert lines.find(("after", "inner")) == 10
    assert lines.find(("table", "quoted key", "deep", "er")) == 13
    assert lines.find(("array", 0, "x")) == 15
    assert lines.find(("array", 1, "x")) == 17


def test_a_text_inside_a_value_is_no_key() -> None:
    assert KeyLines(TEXT).find(("second",)) is None


def test_a_missing_key_is_found_at_the_table_around_it() -> None:
    assert KeyLines(TEXT).find(("array", 1, "missing")) == 16
