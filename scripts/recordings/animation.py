"""Animated SVG: values that change at given times, repeated for ever.

An element is animated by SMIL, which pictures in Markdown may use: no script, no style from other files. Readers who
ask for reduced motion see one picture that does not move.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

STILL = ".still{display:none}@media (prefers-reduced-motion:reduce){.moving{display:none}.still{display:inline}}"
NAMESPACE = "http://www.w3.org/2000/svg"


class Changes:
    """Changes of one value over a recording: (time, value), the first at 0."""

    def __init__(self, values: Iterable[tuple[float, str]]) -> None:
        self.points: list[tuple[float, str]] = []
        for time, value in values:
            if self.points and self.points[-1][0] == time:
                self.points.pop()
            if not self.points or self.points[-1][1] != value:
                self.points.append((time, value))

    @property
    def first(self) -> str:
        return self.points[0][1]

    def animate(self, attribute: str, duration: float, mode: str = "discrete") -> str:
        """The element that changes an attribute of its parent; empty if the value is constant."""
        points = [point for point in self.points if point[0] < duration]
        if len(points) < 2:
            return ""
        times = ";".join(f"{time / duration:.4f}".rstrip("0").rstrip(".") or "0" for time, _ in points)
        values = ";".join(value for _, value in points)
        if mode == "linear":  # the last value stays until the end
            times, values = times + ";1", f"{values};{points[-1][1]}"
        return (
            f'<animate attributeName="{attribute}" dur="{duration:g}s" repeatCount="indefinite" calcMode="{mode}" '
            f'keyTimes="{times}" values="{values}"/>'
        )


def shown(start: float, end: float, duration: float) -> tuple[str, str]:
    """An attribute and a child of an element that is visible from `start` to `end`; both empty if it always is."""
    points = Changes([(0.0, "hidden"), (start, "visible"), (end, "hidden")])
    animation = points.animate("visibility", duration)
    return (' visibility="hidden"', animation) if animation else ("", "")


def document(width: float, height: float, title: str, style: str, body: Sequence[str]) -> str:
    size = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}"'
    head = f'<svg xmlns="{NAMESPACE}" {size} role="img">'
    return "\n".join([head, f"<title>{escape(title)}</title>", f"<style>{STILL}{style}</style>", *body, "</svg>\n"])
