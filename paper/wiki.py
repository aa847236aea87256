"""Plain text of enwik8's first articles, for models that were trained on prose: a few rules remove the markup.

    python -m paper wiki wiki.txt

Not a wiki parser: some markup remains. What matters is that everybody gets the same file.
"""

import hashlib
import html
import re
from collections.abc import Iterator
from pathlib import Path

from tokendepth.data.fetch import PUBLISHED, fetch
from tokendepth.runs.files import write_bytes

ARTICLE = re.compile(r'<text xml:space="preserve">(.*?)</text>', re.DOTALL)
PREFIX, ENOUGH = 70_000_000, 36_000_000
"""Bytes of enwik8 to read, and bytes of text to keep."""
SHORTEST = 400
"""Characters; a shorter article is a stub."""
RULES = (
    (r"<!--.*?-->", "", re.DOTALL),
    (r"\{\|.*?\|\}", "", re.DOTALL),  # tables
    *[(r"\{\{[^{}]*\}\}", "", 0)] * 3,  # templates, also nested
    (r"<(math|ref|gallery|table)[^>]*>.*?</\1>", "", re.DOTALL | re.IGNORECASE),
    (r"<[^>]*>", "", 0),
    (r"\[\[(?:Image|File|Category|[a-z-]{2,12}):[^\[\]]*(?:\[\[[^\]]*\]\][^\[\]]*)*\]\]", "", 0),
    (r"\[\[(?:[^|\]]*\|)?([^\]]*)\]\]", r"\1", 0),  # links: keep the shown text
    (r"\[https?://\S+ ?([^\]]*)\]", r"\1", 0),
    (r"'{2,}", "", 0),
    (r"^=+\s*(.*?)\s*=+\s*$", r"\1", re.MULTILINE),
    (r"^[*#:;]+\s*", "", re.MULTILINE),
    (r"[ \t]+", " ", 0),
    (r"\n{3,}", "\n\n", 0),
)


def plain(markup: str) -> str:
    text = html.unescape(html.unescape(markup))
    for pattern, by, flags in RULES:
        text = re.sub(pattern, by, text, flags=flags)
    return text.strip()


def articles(dump: str) -> Iterator[str]:
    """The plain text of the articles, without redirects and stubs."""
    for found in ARTICLE.finditer(dump):
        if not found[1].lower().startswith("#redirect") and len(text := plain(found[1])) >= SHORTEST:
            yield text


def wiki_text(dump: str, enough: int = ENOUGH) -> str:
    """Articles, separated by empty lines, until there are `enough` bytes."""
    kept, size = [], 0
    for text in articles(dump):
        kept.append(text)
        size += len(text.encode())
        if size > enough:
            break
    return "\n\n".join(kept) + "\n"


def write(path: Path) -> str:
    """Write the file and return its SHA-256."""
    pieces = fetch(PUBLISHED["enwik8"]).pieces()
    dump = bytearray()
    while len(dump) < PREFIX:
        dump += next(pieces)
    content = wiki_text(dump[:PREFIX].decode(errors="ignore")).encode()
    write_bytes(path, content)
    return hashlib.sha256(content).hexdigest()
