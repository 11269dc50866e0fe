"""Lists named values under headings, as text and as HTML. Knows no meaning of theirs."""

from __future__ import annotations

import html
from collections.abc import Sequence

# What it is, its value, the exact value or another one, and a note.
Entry = tuple[str, str, str, str]
Section = tuple[str, Sequence[Entry]]


def size(label: str, nbytes: int, note: str = "") -> Entry:
    """An entry for so many bytes."""
    return label, human(nbytes), f"{nbytes:,} bytes", note


def human(nbytes: float) -> str:
    """Bytes in a unit of thousands, with three digits that count."""
    units = iter(("bytes", "kB", "MB", "GB", "TB", "PB"))
    unit = next(units)
    while nbytes >= 999.5:
        nbytes, unit = nbytes / 1000, next(units, "EB")
    return f"{nbytes:.3g} {unit}"


def as_text(title: str, sections: Sequence[Section]) -> str:
    """An aligned table."""
    entries = [entry for _, listed in sections for entry in listed]
    label, value, exact = (max(len(entry[column]) for entry in entries) for column in range(3))
    lines = [title]
    for heading, listed in sections:
        lines += ["", heading]
        for a, b, c, d in listed:
            lines.append(f"  {a:<{label}}  {b:>{value}}  {c:>{exact}}  {d}".rstrip())
    return "\n".join(lines)


def as_html(title: str, sections: Sequence[Section]) -> str:
    """The same as a ``<table>``."""
    rows = [f"<caption>{html.escape(title)}</caption>"]
    for heading, listed in sections:
        rows.append(f'<tr><th colspan="4">{html.escape(heading)}</th></tr>')
        for entry in listed:
            cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in entry)
            rows.append(f"<tr>{cells}</tr>")
    return f"<table>{''.join(rows)}</table>"
