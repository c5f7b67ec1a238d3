"""The colours of all pages: whoever sees little contrast can read them, in light and in dark."""

import re
from importlib.resources import files

import pytest

TEXT, EDGE = 4.5, 3.0
"""The least contrast of texts, and of edges, icons and lines, by WCAG 2.2 AA."""
SHEETS = ("report/style.css", "ui/static/ui.css")
SURFACES = ("paper", "side", "soft", "raised")
STATES = ("good", "warn", "stop")
SOFT = tuple(f"{state}-soft" for state in STATES)
COLOURS = {
    name: (light or both, dark or both)
    for name, light, dark, both in re.findall(
        r"--([\w-]+): (?:light-dark\(#(\w{6}), #(\w{6})\)|#(\w{6}));",
        "".join(files("diffsynth_lite").joinpath(sheet).read_text() for sheet in SHEETS),
    )
}


def luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(first: str, second: str) -> float:
    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize(
    ("fronts", "surfaces", "least"),
    [
        (("ink", "ink-2"), (*SURFACES, "matte", "track", "accent-soft", *SOFT), TEXT),
        (("accent",), (*SURFACES, "accent-soft", *SOFT), TEXT),
        (STATES, SURFACES, TEXT),
        *(((state,), (f"{state}-soft",), TEXT) for state in STATES),
        (("ink-3",), SURFACES, TEXT),
        (("on-veil",), ("veil",), TEXT),
        (("on-fill",), ("accent-fill", "accent-press", "stop-fill"), TEXT),
        (("edge",), (*SURFACES, *SOFT), EDGE),
        (("accent",), ("matte", "track"), EDGE),
        (tuple(f"line-{place}" for place in range(1, 7)), ("paper",), EDGE),
    ],
)
def test_text_on_a_surface_has_enough_contrast(
    fronts: tuple[str, ...], surfaces: tuple[str, ...], least: float
) -> None:
    found = {
        (front, surface, theme): contrast(COLOURS[front][theme], COLOURS[surface][theme])
        for front in fronts
        for surface in surfaces
        for theme in (0, 1)
    }
    assert {pair: ratio for pair, ratio in found.items() if ratio < least} == {}
