"""Cleaning of the demo corpus: pure functions from raw text to plain text.

Knows the markup of the sources (HTML, reStructuredText, hard-wrapped novels, Python source) and nothing of files,
splits or tokens. Every function is deterministic and returns NFC text with newline line ends.
"""

import re
import unicodedata
from html.parser import HTMLParser
from itertools import pairwise

_SPACES = re.compile("[\u00a0\u2000-\u200a\u202f\u205f\u3000]")
_INVISIBLE = re.compile("[\u00ad\u200b-\u200f\u2028\u2029\u2060\ufeff\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


def normalise(text: str) -> str:
    """Return text in NFC with newline line ends, plain spaces, no trailing blanks and at most two blank lines in a row.

    Args:
        text: any text.

    Returns:
        The text, with one newline at its end; the empty string if nothing but white space was given.
    """
    text = unicodedata.normalize("NFC", text.replace("\r\n", "\n").replace("\r", "\n"))
    text = _INVISIBLE.sub("", _SPACES.sub(" ", text))
    text = "\n".join(line.rstrip() for line in text.split("\n"))
    text = re.sub(r"\n{4,}", "\n\n\n", text).strip("\n")
    return text + "\n" if text.strip() else ""


def clean_speech(text: str) -> str:
    """Return a speech with one paragraph per line and one blank line between paragraphs.

    Args:
        text: a speech whose paragraphs are separated by newlines.
    """
    paragraphs = (re.sub(r"[ \t]+", " ", line).strip() for line in normalise(text).split("\n"))
    return normalise("\n\n".join(p for p in paragraphs if p))


def unwrap(lines: list[str]) -> str:
    """Join hard-wrapped prose into one line per paragraph.

    Args:
        lines: wrapped lines, paragraphs separated by blank lines. A paragraph with an indented line (verse, a letter's
            head or signature) keeps its line ends.

    Returns:
        Paragraphs separated by one blank line.
    """
    paragraphs: list[str] = []
    block: list[str] = []
    for line in [*lines, ""]:
        if line.strip():
            block.append(line.rstrip())
        elif block:
            verbatim = any(row.startswith("  ") for row in block)
            joined = "\n".join(block) if verbatim else re.sub(r" {2,}", " ", " ".join(row.strip() for row in block))
            paragraphs.append(joined)
            block = []
    return normalise("\n\n".join(paragraphs))


_CHAPTER = re.compile(r"\s*chapter\s+([ivxlc]+|\d+)\.?\s*$", re.IGNORECASE)
_VOLUME = re.compile(r"\s*(volume|vol\.)\s+([ivx]+|\d+)\.?\s*$", re.IGNORECASE)
_NOVEL_END = re.compile(r"\s*(the end|finis|a note on the text)\.?\s*$", re.IGNORECASE)


def novel_chapters(lines: list[str]) -> list[str]:
    """Split a novel into its chapters, without front matter, volume headings, the closing word and editors' notes.

    Args:
        lines: the novel, one string per printed line.

    Returns:
        One text per chapter, its heading first.
    """
    chapters: list[list[str]] = []
    for line in lines:
        if _CHAPTER.match(line):
            chapters.append([line.strip(), ""])
        elif chapters and _NOVEL_END.match(line):
            break
        elif chapters and not _VOLUME.match(line):
            chapters[-1].append(line)
    return [unwrap(chapter) for chapter in chapters]


_SKIPPED_TAGS = {"script", "style", "svg", "head", "form", "select"}
_SKIPPED_CLASSES = {"nosearch", "imgcontainer", "fancy_toc", "rightsidebar", "pikchr"}
_BLOCK_TAGS = set("p div blockquote center ul ol dl dt dd table hr body caption h1 h2 h3 h4 h5 h6".split())
_BUTTON = "\x00"  # marks the caption of a folded drawing, which is dropped with it


class _PlainText(HTMLParser):
    """Collect the text blocks of a documentation page; call `text()` after `feed`."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.blocks: list[tuple[str, str]] = []  # (kind, text)
        self.inline: list[str] = []
        self.prefix = ""
        self.kind = "p"
        self.skip_tag: str | None = None
        self.skip_depth = 0
        self.pre = False
        self.lists: list[int] = []  # -1 for <ul>, else the number of the last <ol> item

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self.skip_tag:
            self.skip_depth += tag == self.skip_tag
            return
        classes = set((dict(attrs).get("class") or "").split())
        if tag in _SKIPPED_TAGS or (tag in ("div", "p") and classes & _SKIPPED_CLASSES):
            self.flush()
            self.skip_tag, self.skip_depth = tag, 1
        elif tag == "button":
            self.inline.append(_BUTTON)
        elif tag == "pre":
            self.flush()
            self.pre = True
        elif tag == "br":
            self.inline.append("\n" if self.pre else "\r")
        elif tag == "li":
            self.flush()
            if self.lists and self.lists[-1] >= 0:
                self.lists[-1] += 1
            mark = f"{self.lists[-1]}." if self.lists and self.lists[-1] >= 0 else "-"
            self.kind, self.prefix = "li", "  " * max(len(self.lists) - 1, 0) + mark + " "
        elif tag == "tr":
            self.flush()
            self.kind = "tr"
        elif tag in ("td", "th"):
            if "".join(self.inline).strip():
                self.inline.append(" | ")
        elif tag in _BLOCK_TAGS:
            self.flush()
            if tag in ("ul", "ol"):
                self.lists.append(-1 if tag == "ul" else 0)
            if tag == "dd":
                self.kind, self.prefix = "dd", "  "

    def handle_endtag(self, tag: str) -> None:
        if self.skip_tag:
            self.skip_depth -= tag == self.skip_tag
            if self.skip_depth == 0:
                self.skip_tag = None
        elif tag == "pre":
            self.flush()
            self.pre = False
        elif tag in _BLOCK_TAGS or tag in ("tr", "li"):
            self.flush()
            if tag in ("ul", "ol") and self.lists:
                self.lists.pop()

    def handle_data(self, data: str) -> None:
        if not self.skip_tag:
            self.inline.append(data if self.pre else re.sub(r"\s+", " ", data))

    def flush(self) -> None:
        raw, self.inline = "".join(self.inline), []
        if _BUTTON in raw or not raw.strip():
            return
        if self.pre:
            rows = [row.rstrip().expandtabs(8) for row in raw.strip("\n").split("\n")]
            margin = min(len(row) - len(row.lstrip()) for row in rows if row)
            self.blocks.append(("pre", "\n".join("    " + row[margin:] if row else "" for row in rows)))
        else:
            rows = [re.sub(r"\s+", " ", row).strip() for row in raw.split("\r")]
            text = "\n".join(row for row in rows if row).strip("| ")
            if text:
                indent = "\n" + " " * len(self.prefix)
                self.blocks.append((self.kind, self.prefix + text.replace("\n", indent)))
        self.kind, self.prefix = "p", ""

    def text(self) -> str:
        self.flush()
        parts: list[str] = []
        last = ""
        for kind, block in self.blocks:
            tight = kind == last and kind in ("li", "tr")
            parts.append(("\n" if tight else "\n\n") + block)
            last = kind
        return "".join(parts)


_PAGE_BOILERPLATE = re.compile(
    r"^(This page last modified on .*|See also lists of.*|Session Module C Interface|"
    r"A complete list of SQLite releases in a single page .*)$",
    re.M,
)


def clean_html(html: str) -> tuple[str, str]:
    """Turn a page of the SQLite documentation into plain text.

    Navigation, scripts, tables of contents, drawings and the footer go; list items, table rows and code blocks
    (indented by four spaces) stay.

    Args:
        html: the page.

    Returns:
        Title and text; the text starts with the title.
    """
    found = re.search(r"<title>(.*?)</title>", html, re.S | re.I)
    parser = _PlainText()
    title = ""
    if found:
        parser.feed(f"<p>{found.group(1)}</p>")
        title = parser.text().strip()
        parser = _PlainText()
    parser.feed(html)
    parser.close()
    body = _PAGE_BOILERPLATE.sub("", parser.text()).strip("\n")
    if body.split("\n", 1)[0].strip() == title:
        body = body.split("\n", 1)[1] if "\n" in body else ""
    text = normalise(f"{title}\n\n{body}") if body.strip() else ""
    return title, re.sub(r"\n{3,}", "\n\n", text)


_RST_DROPPED = re.compile(r"(\s*)\.\. (index|sectionauthor|moduleauthor|codeauthor|highlight|testsetup|testcleanup)::")
_RST_COMMENT = re.compile(r"(\s*)\.\.(\s*$|\s+(?![_\[|])(?![\w:.+-]+::))")
_RST_META = re.compile(r"\s*:(orphan|nosearch|tocdepth):")


def clean_rst(text: str) -> str:
    """Drop comments, index entries and author marks from reStructuredText; keep all other markup.

    Args:
        text: a source page of the Python documentation.
    """
    kept: list[str] = []
    margin: int | None = None  # indentation of the dropped block being skipped
    for line in normalise(text).expandtabs(8).split("\n"):
        indent = len(line) - len(line.lstrip())
        if margin is not None:
            if not line.strip() or indent > margin:
                continue
            margin = None
        if _RST_DROPPED.match(line) or _RST_COMMENT.match(line):
            margin = indent
        elif not _RST_META.match(line):
            kept.append(line)
    return normalise("\n".join(kept))


def rst_title(text: str) -> str:
    """Return the first heading of reStructuredText without its roles and targets, or the empty string."""
    for title, line in pairwise(text.split("\n")):
        if re.fullmatch(r"([=\-*#~^\"+])\1{2,}", line) and title.strip() and not re.fullmatch(r"(\W)\1*", title):
            return re.sub(r":[\w:]+:`[~!]?([^`<]*?)(\s*<[^>]*>)?`", r"\1", title).replace("``", "").strip()
    return ""


_NOTICE = re.compile(r"copyright|licen[sc]e|all rights reserved|contributor agreement", re.I)
_OWN_LICENCE = re.compile(
    r"Permission to use, copy|Permission is hereby granted|Redistribution and use in source|"
    r"This software is provided 'as-is'|Licensed to the Apache"
)


def has_own_licence(source: str) -> bool:
    """Say whether a source file carries a licence text of its own, which a cleaned copy would have to repeat."""
    return _OWN_LICENCE.search(source) is not None


def clean_python(source: str) -> str:
    """Drop the interpreter line, the coding line and the leading comment block that states copyright or licence.

    Args:
        source: the text of a Python module.
    """
    lines = normalise(source).split("\n")
    while lines and re.match(r"#!|# *-\*-|#.*coding[:=]", lines[0]):
        lines.pop(0)
    body = "\n".join(lines).lstrip("\n").split("\n")
    end = next((i for i, line in enumerate(body) if line and not line.startswith("#")), len(body))
    if _NOTICE.search("\n".join(body[:end])):
        body = body[end:]
    return normalise("\n".join(body))
