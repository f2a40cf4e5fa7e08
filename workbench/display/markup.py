"""HTML escaping and the styles of strips and cards, for light and dark notebook themes.

Colours are translucent fills behind the notebook's own text colour, so that they work on either background. What
carries meaning is styled inline: JupyterLab takes style sheets out of a notebook that its reader has not run yet, and
leaves inline styles in. Struck-out text is ``<del>`` and line ends are real characters, for places that remove both.
"""

from __future__ import annotations

from html import escape

INVISIBLE = {"\t": "→\t", "\n": "↵\n", "\r": "␍"}

FILLS = {
    "prompt": "opacity:0.62",
    "plain": "background-color:rgba(128,128,128,0.2)",
    "accepted": "background-color:rgba(0,158,115,0.32)",
    "bonus": "background-color:rgba(86,180,233,0.3);border-bottom:2px solid #56B4E9",
    "forced": "background-color:rgba(204,121,167,0.3);border-bottom:2px dotted #CC79A7",
    "rejected": "background-color:rgba(213,94,0,0.22);text-decoration:line-through;opacity:0.8",
    "dropped": "background-color:rgba(0,158,115,0.14);text-decoration:line-through;opacity:0.8",
}

STYLE = """<style>
.wb{color:var(--jp-content-font-color1,inherit);font-family:var(--jp-content-font-family,system-ui,sans-serif);
 font-size:13px;line-height:1.5;max-width:100%}
.wb .wb-key{font-size:12px}
.wb .wb-note{opacity:.7;font-size:12px;margin-top:4px}
.wb pre.wb-text{white-space:pre-wrap;overflow-wrap:anywhere;margin:4px 0;padding:0;
 background:none;color:inherit;border:0;font-family:var(--jp-code-font-family,ui-monospace,monospace);font-size:13px}
.wb .t{border-radius:3px;padding:1px 0;box-shadow:inset -1px 0 0 rgba(128,128,128,.35)}
.wb .rejected{text-decoration-color:#D55E00}
.wb .dropped{text-decoration-color:#009E73}
.wb .s{position:relative}
.wb .s::before{content:"·";position:absolute;left:0;width:100%;text-align:center;opacity:.45}
.wb .w{opacity:.55}
.wb-card{display:inline-block;border:1px solid rgba(128,128,128,.4);border-radius:6px;padding:8px 12px;margin:4px 0}
.wb-card .wb-title{margin-bottom:4px}
.wb-card table.wb-rows{border-collapse:collapse;margin:0;font-size:13px;border:0;color:inherit}
.wb-card table.wb-rows tbody tr{background:none}
.wb-card table.wb-rows td{padding:1px 16px 1px 0;vertical-align:top;border:0;background:none;color:inherit}
.wb-card table.wb-rows td:first-child{opacity:.7;white-space:nowrap}
.wb-card table.wb-rows td:last-child{font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
</style>"""


def visible(text: str, *, breaks: bool = True) -> str:
    """Escape text and make its white space and control characters visible.

    Args:
        text: Any text.
        breaks: Keep line ends as line ends after their sign; False leaves the sign alone. Default True.

    Returns:
        HTML: spaces under a middle dot, "↵" before a line end, "→" before a tab, control characters by number.
    """
    out = []
    for sign in text:
        if sign == " ":
            out.append('<span class="s"> </span>')
        elif sign in INVISIBLE:
            shown = INVISIBLE[sign] if breaks else INVISIBLE[sign][0]
            out.append(f'<span class="w">{shown[0]}</span>{shown[1:]}')
        elif not sign.isprintable():
            out.append(f'<span class="w">\\u{ord(sign):04x}</span>')
        else:
            out.append(escape(sign))
    return "".join(out)


def attribute(text: str) -> str:
    """Escape text for a quoted attribute, line ends included."""
    return escape(text, quote=True).replace("\n", "&#10;")
