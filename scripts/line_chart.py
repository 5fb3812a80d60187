"""A line chart as SVG, for the pictures of docs/curves.

Not by matplotlib, which writes its version into a file and lays out text by the fonts it finds: the tests compare each
picture byte by byte with one drawn again from its numbers.
"""

from __future__ import annotations

from collections.abc import Iterable

WIDTH, HEIGHT = 640, 240
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 14, 34
"""The margins, which hold the numbers of the axes."""


class LineChart:
    """Values between `low` and `high` (upwards) by step between `first` and `last` (to the right)."""

    def __init__(self, first: int, last: int, low: float, high: float) -> None:
        self.first = first
        self.low = low
        # A chart of one step, or without any change, has no width or height of its own.
        self.steps = (last - first) or 1
        self.span = (high - low) or 1.0
        self.parts: list[str] = []

    def place(self, step: float, value: float) -> tuple[float, float]:
        """A point of the picture, in its units, from the left and from the top."""
        x = LEFT + (WIDTH - LEFT - RIGHT) * (step - self.first) / self.steps
        y = TOP + (HEIGHT - TOP - BOTTOM) * (1 - (value - self.low) / self.span)
        return x, y

    def axes(self, steps: Iterable[int]) -> None:
        """Horizontal lines with their values, and these steps along the bottom."""
        for share in (0, 0.25, 0.5, 0.75, 1):
            value = self.low + share * self.span
            _, y = self.place(self.first, value)
            self.parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#ddd"/>')
            self.text(f"{LEFT - 6}", f"{y + 4:.1f}", f"{value:.3g}", "end")
        for step in steps:
            x, _ = self.place(step, self.low)
            self.text(f"{x:.1f}", f"{HEIGHT - BOTTOM + 16}", str(step))

    def line(self, points: Iterable[tuple[float, float]], style: str) -> None:
        """A line through (step, value) points; `style` is attributes of the element."""
        path = " ".join("{:.1f},{:.1f}".format(*self.place(step, value)) for step, value in points)
        self.parts.append(f'<polyline fill="none" {style} points="{path}"/>')

    def dots(self, points: Iterable[tuple[float, float]], color: str) -> None:
        """A dot at each (step, value)."""
        for step, value in points:
            x, y = self.place(step, value)
            self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{color}"/>')

    def mark(self, step: int, text: str) -> None:
        """A vertical line at a step, with a text at its left."""
        x, _ = self.place(step, self.low)
        self.parts.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{HEIGHT - BOTTOM}" stroke="#888"/>')
        self.text(f"{x - 5:.1f}", f"{TOP + 12}", text, "end")

    def text(self, x: str, y: str, text: str, anchor: str = "middle") -> None:
        """A text at a point of the picture; the point is its middle or, with the anchor `end`, its right end."""
        self.parts.append(f'<text x="{x}" y="{y}" text-anchor="{anchor}">{text}</text>')

    def svg(self) -> str:
        """The file."""
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
            f'height="{HEIGHT}" font-family="sans-serif" font-size="12" fill="#333">',
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
            *self.parts,
            f'<text x="{WIDTH / 2:.0f}" y="{HEIGHT - 4}" text-anchor="middle">step</text>',
            "</svg>",
        ]
        return "\n".join(lines) + "\n"
