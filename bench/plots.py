"""Draw bars as SVG, without a library, scripts or external resources."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import log10
from typing import NamedTuple

WIDTH_PX, LABEL_PX, ROW_PX, TOP_PX = 860, 300, 26, 44
#: The axis is logarithmic between these shares of a target; longer bars are clipped.
SHARE_MIN, SHARE_MAX = 0.1, 100.0


class Bar(NamedTuple):
    """A bar: a figure as a share of its target, and the text next to it."""

    name: str
    share: float
    text: str


def draw_bars(title: str, bars: Sequence[Bar]) -> str:
    """Return the bars as an SVG with a line at a share of 1; bars that do not reach it have another colour."""
    height = TOP_PX + ROW_PX * len(bars) + 12
    line_px = _x_of(1.0)
    rows = [
        f'<line x1="{line_px:.1f}" x2="{line_px:.1f}" y1="{TOP_PX - 8}" y2="{height - 8}" stroke="#6b7280"/>',
        f'<text x="{line_px:.1f}" y="{TOP_PX - 12}" text-anchor="middle" fill="#4b5563" font-size="11">target</text>',
    ]
    for number, bar in enumerate(bars):
        y = TOP_PX + number * ROW_PX
        end_px = _x_of(bar.share)
        colour = "#2f7d4f" if bar.share >= 1 else "#b9512a"
        rows.append(f'<text x="{LABEL_PX - 8}" y="{y + 14}" text-anchor="end" fill="#111827">{escape(bar.name)}</text>')
        size = f'width="{max(2.0, end_px - LABEL_PX):.1f}" height="16" rx="3"'
        rows.append(f'<rect x="{LABEL_PX}" y="{y + 2}" {size} fill="{colour}"/>')
        rows.append(f'<text x="{end_px + 6:.1f}" y="{y + 14}" fill="#4b5563">{escape(bar.text)}</text>')
    head = f'viewBox="0 0 {WIDTH_PX} {height}" role="img" font-family="system-ui, sans-serif" font-size="12"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {head}>',
            f"<title>{escape(title)}</title>",
            f'<rect width="{WIDTH_PX}" height="{height}" rx="8" fill="#f6f7f9"/>',
            f'<text x="16" y="22" font-weight="600" fill="#111827">{escape(title)}</text>',
            *rows,
            "</svg>\n",
        ]
    )


def _x_of(share: float) -> float:
    """Return the x coordinate of a share on the logarithmic axis."""
    within = min(max(share, SHARE_MIN), SHARE_MAX)
    length_px = WIDTH_PX - LABEL_PX - 250
    return LABEL_PX + (log10(within) - log10(SHARE_MIN)) / (log10(SHARE_MAX) - log10(SHARE_MIN)) * length_px
