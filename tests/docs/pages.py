"""Reading the documentation as data: headings, tables, links, code.

Owns: the little Markdown that the pages use.
Does not know: what the pages say.
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^(#+) (.+)$", re.MULTILINE)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_CELL_BORDER = re.compile(r"(?<!\\)\|")

Table = list[dict[str, str]]


class Block(msgspec.Struct, frozen=True):
    """A fenced block of code.

    Attributes:
        page: its file.
        line: where it begins.
        language: the word behind the fence.
        code: what is in it.
    """

    page: Path
    line: int
    language: str
    code: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def all_pages() -> list[Path]:
    """Every page for readers."""
    return sorted([*DOCS.rglob("*.md"), *(ROOT / name for name in ("README.md", "CHANGELOG.md"))])


def read(name: str) -> str:
    """The text of a page below `docs/`."""
    return (DOCS / name).read_text(encoding="utf-8")


def without_code(text: str) -> str:
    """The text with its fenced blocks left out."""
    return _FENCE.sub("", text)


def blocks(page: Path, language: str | None = None) -> list[Block]:
    """The fenced blocks of a page, of one language or of any."""
    text = page.read_text(encoding="utf-8")
    found = [Block(page, text.count("\n", 0, match.start()) + 1, match[1], match[2]) for match in _FENCE.finditer(text)]
    return [block for block in found if language in (None, block.language)]


def headings(text: str) -> list[str]:
    """All headings, as they are written."""
    return [match[2] for match in _HEADING.finditer(without_code(text))]


def anchors(text: str) -> set[str]:
    """The anchors by which headings are linked to."""
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings(text)}


def links(text: str) -> list[str]:
    """The targets of all links."""
    return _LINK.findall(without_code(text))


def sections(text: str) -> dict[str, str]:
    """The text under each heading, up to the next one of any level."""
    text = without_code(text)
    found = list(_HEADING.finditer(text))
    ends = [match.start() for match in found[1:]] + [len(text)]
    return {match[2]: text[match.end() : end] for match, end in zip(found, ends, strict=True)}


def tables(text: str) -> list[Table]:
    """The tables of a text; each row by column name."""
    made: list[Table] = []
    lines = without_code(text).splitlines()
    for number, line in enumerate(lines):
        if re.fullmatch(r"\|(?:\s*:?-+:?\s*\|)+", line):
            columns = _cells(lines[number - 1])
            made.append([])
            for row in lines[number + 1 :]:
                if not row.startswith("|"):
                    break
                made[-1].append(dict(zip(columns, _cells(row), strict=True)))
    return made


def table(text: str) -> Table:
    """The only table of a text."""
    (only,) = tables(text)
    return only


def code(cell: str) -> str:
    """A cell that is one piece of code, without its backticks; an en dash stands for nothing."""
    return "" if cell == "–" else cell.strip("`")


def _cells(row: str) -> list[str]:
    return [cell.strip().replace(r"\|", "|") for cell in _CELL_BORDER.split(row.strip())[1:-1]]
