"""A self-contained HTML page: one style sheet, light and dark, figures inside; pure string building."""

from __future__ import annotations

import io
import json
from base64 import b64encode
from collections.abc import Sequence
from html import escape
from typing import Any

STYLE = """
:root{color-scheme:light dark;--ink:#1d1d1f;--soft:#5c5c66;--line:#d9d9de;--back:#ffffff;--card:#f6f6f8}
@media (prefers-color-scheme:dark){:root{--ink:#ececf0;--soft:#a2a2ad;--line:#3a3a42;--back:#17171a;--card:#212126}}
body{margin:0;background:var(--back);color:var(--ink);font:15px/1.55 system-ui,sans-serif}
main{max-width:980px;margin:0 auto;padding:28px 20px 60px}
h1{font-size:26px;margin:0 0 4px}h2{font-size:19px;margin:38px 0 8px;border-top:1px solid var(--line);padding-top:18px}
p{margin:8px 0;max-width:75ch}.soft,figcaption{color:var(--soft)}
.facts{display:flex;flex-wrap:wrap;gap:10px;margin:18px 0}
.fact{background:var(--card);border-radius:8px;padding:10px 14px;min-width:120px}
.fact b{display:block;font-size:21px;font-variant-numeric:tabular-nums}.fact span{color:var(--soft);font-size:13px}
.scroll{overflow-x:auto}
table.data{border-collapse:collapse;margin:10px 0;font-size:14px;font-variant-numeric:tabular-nums}
table.data th,table.data td{padding:3px 12px;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
table.data th:first-child,table.data td:first-child{text-align:left;padding-left:0}
table.data th{color:var(--soft);font-weight:600}
figure{margin:14px 0 22px}figure img{max-width:100%;background:#fff;border-radius:6px;padding:8px;box-sizing:border-box}
figcaption{font-size:14px;max-width:75ch;margin-top:6px}
pre.plain{background:var(--card);padding:12px;border-radius:8px;overflow-x:auto;font-size:12.5px;line-height:1.45}
details summary{cursor:pointer;color:var(--soft)}
"""


def page(title: str, body: str) -> str:
    """A whole HTML document.

    Args:
        title: Its title, plain text.
        body: Its content, HTML.

    Returns:
        The document; it refers to nothing outside itself.
    """
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    head = f"<head>{head}<style>{STYLE}</style></head>"
    return f'<!doctype html><html lang="en">{head}<body><main>{body}</main></body></html>\n'


def facts(pairs: Sequence[tuple[str, str]]) -> str:
    """Headline numbers: (name, value) pairs as tiles."""
    tiles = (f'<div class="fact"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for name, value in pairs)
    return f'<div class="facts">{"".join(tiles)}</div>'


def paragraph(text: str, *, soft: bool = False) -> str:
    """A paragraph of plain text."""
    return f"<p{' class=soft' if soft else ''}>{escape(text)}</p>"


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
) -> str:
    """A table of texts, numbers right-aligned: column names, then rows, each with its name first."""
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = [f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in row)}</tr>" for row in rows]
    rows_html = f"<thead><tr>{top}</tr></thead><tbody>{''.join(lines)}</tbody>"
    return f'<div class="scroll"><table class="data">{rows_html}</table></div>'


def figure(png: bytes, title: str, says: str) -> str:
    """A figure, embedded, with what it says under it."""
    source = "data:image/png;base64," + b64encode(png).decode()
    return f'<figure><img alt="{escape(title)}" src="{source}"><figcaption>{escape(says)}</figcaption></figure>'


def png_of(ax: Any) -> bytes:
    """The figure of some axes as PNG bytes without a date; the figure is closed."""
    import matplotlib.pyplot as plt

    buffer = io.BytesIO()
    ax.figure.savefig(buffer, format="png", dpi=130, bbox_inches="tight", metadata={"Software": None})
    plt.close(ax.figure)
    return buffer.getvalue()


def embedded(name: str, data: Any) -> str:
    """Data for a page's own script: JSON in an element of this id, safe inside HTML."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return f'<script type="application/json" id="{escape(name)}">{text.replace("<", chr(92) + "u003c")}</script>'


def folded(title: str, text: str) -> str:
    """Preformatted text that opens on a click."""
    return f'<details><summary>{escape(title)}</summary><pre class="plain">{escape(text)}</pre></details>'
