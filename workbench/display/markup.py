"""HTML escaping and the one style sheet of strips and cards, for light and dark notebook themes.

Colours are translucent fills behind the notebook's own text colour, so that they work on either background; struck-out
text is ``<del>`` and line ends are real characters, so that meaning survives where style sheets are removed.
"""

from __future__ import annotations

from html import escape

INVISIBLE = {"\t": "→\t", "\n": "↵\n", "\r": "␍"}

STYLE = """<style>
.wb{color:var(--jp-content-font-color1,inherit);font-family:var(--jp-content-font-family,system-ui,sans-serif);
 font-size:13px;line-height:1.5;max-width:100%}
.wb .wb-key{display:inline-block;margin:0 14px 4px 0;font-size:12px}
.wb .wb-note{opacity:.7;font-size:12px;margin-top:4px}
.wb pre.wb-text{white-space:pre-wrap;overflow-wrap:anywhere;margin:4px 0;padding:0;
 background:none;color:inherit;border:0;font-family:var(--jp-code-font-family,ui-monospace,monospace);font-size:13px;line-height:1.75}
.wb .t{border-radius:3px;padding:1px 0;box-shadow:inset -1px 0 0 rgba(128,128,128,.35)}
.wb .prompt{opacity:.62}
.wb .plain{background:rgba(128,128,128,.20)}
.wb .accepted{background:rgba(0,158,115,.32)}
.wb .bonus{background:rgba(86,180,233,.30);border-bottom:2px solid #56B4E9}
.wb .forced{background:rgba(204,121,167,.30);border-bottom:2px dotted #CC79A7}
.wb .rejected{background:rgba(213,94,0,.22);text-decoration:line-through;text-decoration-color:#D55E00;opacity:.8}
.wb .dropped{background:rgba(0,158,115,.14);text-decoration:line-through;text-decoration-color:#009E73;opacity:.8}
.wb .s{position:relative}
.wb .s::before{content:"·";position:absolute;left:0;width:100%;text-align:center;opacity:.45}
.wb .w{opacity:.55}
.wb-card{display:inline-block;border:1px solid rgba(128,128,128,.4);border-radius:6px;padding:8px 12px;margin:4px 0}
.wb-card .wb-title{font-weight:600;margin-bottom:4px}
.wb-card table.wb-rows{border-collapse:collapse;margin:0;font-size:13px;border:0;color:inherit}
.wb-card table.wb-rows tbody tr{background:none}
.wb-card table.wb-rows td{padding:1px 16px 1px 0;text-align:left;vertical-align:top;border:0;
 background:none;color:inherit}
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
