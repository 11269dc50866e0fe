"""Facts, bars and a chart as text for a terminal and as HTML for a notebook. Knows no table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

_CHART_COLUMNS = 60
_CHART_LINES = 4
_METER_COLUMNS = 24


@dataclass(frozen=True)
class Meter:
    """A number of bytes as a bar.

    Args:
        name, note: what it is.
        value: in words.
        share: of the longest bar.
    """

    name: str
    value: str
    note: str
    share: float


@dataclass(frozen=True)
class Chart:
    """Shares of parts that stand in a row.

    Args:
        name, note: what it is.
        shares: of each part, from 0 to 1.
        labels: what each part is.
        ends: where the first part begins and the last one ends.
    """

    name: str
    note: str
    shares: Sequence[float]
    labels: Sequence[str]
    ends: tuple[str, str]

    @property
    def top(self) -> float:
        """The end of the scale: 100%, 10%, 1% or so on, the least that is enough."""
        most = max(self.shares)
        return 10.0 ** math.ceil(math.log10(most)) if most else 1.0


@dataclass(frozen=True)
class Card:
    """All that is shown.

    Args:
        title, subtitle, path, tag: what it is about.
        figures: what matters most, name to value and note.
        meters: sizes; the last one is what the others are held against.
        chart: shares.
        facts: name to text.
        more: facts that are wanted less often.
    """

    title: str
    subtitle: str
    path: str
    tag: str
    figures: Mapping[str, tuple[str, str]]
    meters: Sequence[Meter]
    chart: Chart
    facts: Mapping[str, str]
    more: Mapping[str, str]


def in_bytes(count: int) -> str:
    """A size in the unit that suits it."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"


def in_percent(share: float) -> str:
    """A share, never rounded to none or to all."""
    if 0 < share < 1e-5:
        return "<0.001%"
    if 0.9995 <= share < 1:
        return ">99.9%"
    return f"{100 * share:.3g}%"


def meters(*sizes: tuple[str, int, str]) -> list[Meter]:
    """Bars of names, bytes and notes, on one scale."""
    most = max(size for _, size, _ in sizes)
    return [Meter(name, in_bytes(size), note, size / most) for name, size, note in sizes]


# For a terminal


def to_text(card: Card) -> str:
    """A table of two aligned columns."""
    values = max(len(meter.value) for meter in card.meters)
    lines = {
        "path": card.path,
        **{name: _joined(*texts) for name, texts in card.figures.items()},
        **{meter.name: _meter_line(meter, values) for meter in card.meters},
        **card.facts,
        **card.more,
        card.chart.name: _chart_text(card.chart),
    }
    width = max(map(len, lines))
    table = [f"{card.title}, {card.subtitle}, {card.tag}"]
    for name, text in lines.items():
        names = [name, *[""] * text.count("\n")]
        parts = zip(names, text.split("\n"), strict=True)
        table += [f"{name:<{width}}  {part}".rstrip() for name, part in parts]
    return "\n".join(table)


def _joined(value: str, note: str) -> str:
    return f"{value} ({note})" if note else value


def _meter_line(meter: Meter, width: int) -> str:
    eighths = math.ceil(meter.share * _METER_COLUMNS * 8)
    bar = "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()
    return f"{meter.value:>{width}}  {bar:<{_METER_COLUMNS}}  {meter.note}"


def _chart_text(chart: Chart) -> str:
    """Bars of block characters, with a scale before them, the ends below, and the note."""
    columns = max(_CHART_COLUMNS // len(chart.shares), 1)
    gap = " " if columns > 2 else ""
    levels = [math.ceil(share / chart.top * _CHART_LINES * 8) for share in chart.shares]
    lines = []
    for line in reversed(range(_CHART_LINES)):
        cells = (min(max(level - 8 * line, 0), 8) for level in levels)
        lines.append(gap.join(" ▁▂▃▄▅▆▇█"[cell] * (columns - len(gap)) for cell in cells))
    scale = [in_percent(chart.top), *[""] * (_CHART_LINES - 2), in_percent(0)]
    wide = max(map(len, scale))
    drawn = [f"{mark:>{wide}} {line}".rstrip() for mark, line in zip(scale, lines, strict=True)]
    first, last = chart.ends
    drawn.append(f"{'':{wide}} {first} {last:>{len(lines[0]) - len(first) - 1}}")
    return "\n".join([*drawn, chart.note])


# For a notebook

# Tints of whatever the notebook's colours are, for light and dark ones alike.
_STYLE = """
.ooc-embed{max-width:47em;padding:.9em 1.1em;border:1px solid rgba(128,128,128,.35);
border-radius:8px;font:13px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif;color:inherit}
.ooc-embed *{box-sizing:border-box}
.ooc-embed .head{display:flex;flex-wrap:wrap;align-items:baseline;gap:0 .7em}
.ooc-embed .title{font-size:1.2em;font-weight:600}
.ooc-embed .tag{margin-left:auto;padding:0 .7em;border-radius:1em;font-size:.87em;
background:rgba(74,144,217,.18)}
.ooc-embed .path{font:.92em/1.6 ui-monospace,Menlo,Consolas,monospace;overflow-wrap:anywhere}
.ooc-embed .dim,.ooc-embed .name,.ooc-embed .path{opacity:.68}
.ooc-embed .figures{display:grid;grid-template-columns:repeat(4,1fr);gap:0 1em;
margin:.7em 0;padding:.55em 0;border:solid rgba(128,128,128,.22);border-width:1px 0}
.ooc-embed .figures>div>*{display:block}
.ooc-embed .figures .value{font-size:1.45em;line-height:1.3;font-variant-numeric:tabular-nums}
.ooc-embed .figures .dim,.ooc-embed .figures .name,.ooc-embed .scale{font-size:.87em}
.ooc-embed .rows{display:grid;grid-template-columns:8em minmax(0,1fr);gap:.1em 1em}
.ooc-embed .rows>div{display:contents}
.ooc-embed .rows .value{overflow-wrap:anywhere}
.ooc-embed .meters{grid-template-columns:8em minmax(5em,1fr) max-content minmax(0,max-content);
align-items:center}
.ooc-embed .meters .value{text-align:right;font-variant-numeric:tabular-nums}
.ooc-embed .bar{height:.6em;border-radius:2px;background:rgba(128,128,128,.16)}
.ooc-embed .bar span{display:block;height:100%;min-width:1px;border-radius:2px;background:#4a90d9}
.ooc-embed .meters>div:last-child .bar span{background:rgba(128,128,128,.55)}
.ooc-embed .chart{margin:.8em 0}
.ooc-embed .scale{display:flex;justify-content:space-between;gap:1em}
.ooc-embed .bars{display:flex;align-items:stretch;gap:2px;height:4.2em;
border-bottom:1px solid rgba(128,128,128,.5)}
.ooc-embed .bars>div{flex:1;display:flex;align-items:flex-end;background:rgba(128,128,128,.1)}
.ooc-embed .bars span{width:100%;background:#4a90d9}
.ooc-embed details{margin-top:.5em}
.ooc-embed summary{cursor:pointer;opacity:.68}
""".replace("\n", "")


def to_html(card: Card) -> str:
    """A card that needs nothing from elsewhere."""
    figures = "".join(
        f"<div>{_span('name', name)} {_span('value', value)} {_span('dim', note)}</div>"
        for name, (value, note) in card.figures.items()
    )
    sizes = "".join(
        f"<div>{_span('name', meter.name)} "
        f'<span class="bar"><span style="width:{meter.share:.2%}"></span></span> '
        f"{_span('value', meter.value)} {_span('dim', meter.note)}</div>"
        for meter in card.meters
    )
    return _frame(
        card.title,
        card.subtitle,
        card.path,
        card.tag,
        f'<div class="figures">{figures}</div><div class="rows meters">{sizes}</div>'
        f"{_chart_html(card.chart)}{_rows_html(card.facts)}"
        f"<details><summary>more</summary>{_rows_html(card.more)}</details>",
    )


def problem_html(title: str, subtitle: str, path: str, tag: str, message: str) -> str:
    """A small card for what cannot be looked into."""
    return _frame(title, subtitle, path, tag, f"<div>{escape(message)}</div>")


def _frame(title: str, subtitle: str, path: str, tag: str, body: str) -> str:
    return (
        f'<div class="ooc-embed"><style>{_STYLE}</style><div class="head">{_span("title", title)} '
        f"<span>{escape(subtitle)}</span> {_span('tag', tag)}</div>"
        f'<div class="path">{escape(path)}</div>{body}</div>'
    )


def _span(kind: str, text: str) -> str:
    return f'<span class="{kind}">{escape(text)}</span>'


def _rows_html(facts: Mapping[str, str]) -> str:
    rows = (
        f"<div>{_span('name', name)} {_span('value', value)}</div>" for name, value in facts.items()
    )
    return f'<div class="rows">{"".join(rows)}</div>'


def _chart_html(chart: Chart) -> str:
    """Bars that say what they are when pointed at."""
    bars = "".join(
        f'<div title="{escape(label)}"><span style="height:{_height(share / chart.top)}"></span>'
        f"</div>"
        for share, label in zip(chart.shares, chart.labels, strict=True)
    )
    first, last = chart.ends
    return (
        f'<div class="chart"><div class="scale">{_span("name", chart.name)} '
        f"{_span('dim', chart.note)} {_span('dim', f'scale to {in_percent(chart.top)}')}</div>"
        f'<div class="bars">{bars}</div>'
        f'<div class="scale">{_span("dim", first)} {_span("dim", last)}</div></div>'
    )


def _height(share: float) -> str:
    """Of a bar; one that is not nothing can be seen."""
    return f"{max(share, 0.02):.1%}" if share else "0"
