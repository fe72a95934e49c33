"""Markdown as a reader of pull requests sees it."""

import re
from collections.abc import Iterator
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

LIVE = {"html_inline", "html_block", "link_open", "image", "fence"}


def leaves(tokens: list[Token]) -> Iterator[Token]:
    for token in tokens:
        yield from leaves(token.children) if token.children else (token,)


def rendered(markdown: str) -> list[Token]:
    """The document's tokens. Nothing in it is alive: no HTML, no link, no mention outside code."""
    tokens = MarkdownIt("commonmark", {"html": True}).enable("table").parse(markdown)
    assert {token.type for token in leaves(tokens)} & LIVE == set()
    for token in leaves(tokens):
        assert token.type != "text" or not re.search(r"@|#|www\.|://|GH-", token.content)
    return tokens


def code(tokens: list[Token]) -> list[str]:
    """The text of its code spans."""
    return [token.content for token in leaves(tokens) if token.type == "code_inline"]


ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md")])
