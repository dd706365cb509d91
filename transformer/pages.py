"""Pages that open from disk: templates with one look, and figures that come out the same each time."""

import io
import re
import warnings
from pathlib import Path
from typing import Any

import jinja2
import matplotlib
from matplotlib.figure import Figure

from transformer.jsons import write_whole
from transformer.tables import human

# Without a date and with fixed ids the same input gives the same bytes.
# A dollar in a name is a dollar.
STYLE: dict[Any, Any] = {"svg.hashsalt": "report", "svg.fonttype": "none", "pdf.fonttype": 42, "text.parse_math": False}
METADATA: dict[str, Any] = {
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}


def write_page(path: Path, template: str, **values: Any) -> Path:
    """Fill a template of ``transformer/templates``; all ``values`` are escaped. Written whole or not at all."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("transformer"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["human"] = human
    write_whole(path, environment.get_template(template).render(**values).encode())
    return path


def drawn(figure: Figure, kind: str = "svg") -> bytes:
    """A figure's bytes as "svg" or "pdf", the same each time."""
    out = io.BytesIO()
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # a name in any script; the reader may have it
        figure.savefig(out, format=kind, transparent=True, metadata=METADATA[kind])
    return out.getvalue()


def inline(svg: bytes, prefix: str = "") -> str:
    """An SVG file as an element of a page; ids get the prefix, so that several figures can share a page."""
    text = svg.decode()
    return re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}", text[text.index("<svg") :])
