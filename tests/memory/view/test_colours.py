"""The palette: readers with any of the three colour deficiencies tell apart what lies side by side.

Differences: Sharma, Wu, Dalal, "The CIEDE2000 Color-Difference Formula: Implementation Notes, Supplementary Test Data,
and Mathematical Observations", Color Research and Application 30 (2005), of CIELAB at D65.
Deficiencies: Machado, Oliveira, Fernandes, "A Physiologically-based Model for Simulation of Color Vision Deficiency",
IEEE Transactions on Visualization and Computer Graphics 15 (2009), the matrices of severity 1.0, on linear RGB.
"""

import itertools
import math
import re
from importlib import resources

import pytest

from bytescope.memory import view
from bytescope.memory.records.report_record import ROWS, STEP_PHASES

pytestmark = pytest.mark.quick
STATIC = resources.files(view) / "static"
# Areas of equal colour would need a legend that says where they lie. Rows that are empty leave others as neighbours.
NEIGHBOURS, REACH, ANY = 10, 4, 8

DEFICIENCIES = {
    "none": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}
_XYZ = ((0.4124564, 0.3575761, 0.1804375), (0.2126729, 0.7151522, 0.0721750), (0.0193339, 0.1191920, 0.9503041))
_WHITE = (0.95047, 1.0, 1.08883)


def linear(colour):
    """`#rrggbb` as linear red, green and blue from 0 to 1 (IEC 61966-2-1)."""
    values = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    return [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values]


def lab(rgb):
    """CIELAB (L*, a*, b*) of linear RGB."""
    xyz = [sum(k * v for k, v in zip(row, rgb, strict=True)) for row in _XYZ]
    ratios = [value / white for value, white in zip(xyz, _WHITE, strict=True)]
    x, y, z = (r ** (1 / 3) if r > (6 / 29) ** 3 else r / (3 * (6 / 29) ** 2) + 4 / 29 for r in ratios)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def seen(colour, deficiency="none"):
    """CIELAB of `#rrggbb` as readers with a deficiency see it."""
    rgb = linear(colour)
    return lab(
        [min(max(sum(k * v for k, v in zip(row, rgb, strict=True)), 0.0), 1.0) for row in DEFICIENCIES[deficiency]]
    )


def difference(one, other):
    """CIEDE2000 of two CIELAB colours; below about 2 nobody tells them apart, from 10 on nobody mixes them up."""
    (l1, a1, b1), (l2, a2, b2) = one, other
    c_mean = (math.hypot(a1, b1) + math.hypot(a2, b2)) / 2
    g = 0.5 * (1 - math.sqrt(c_mean**7 / (c_mean**7 + 25**7)))
    c1, c2 = math.hypot((1 + g) * a1, b1), math.hypot((1 + g) * a2, b2)
    h1, h2 = (math.degrees(math.atan2(b, (1 + g) * a)) % 360 for a, b in ((a1, b1), (a2, b2)))
    turn = (h2 - h1 + 180) % 360 - 180 if c1 * c2 else 0.0
    delta_l, delta_c = l2 - l1, c2 - c1
    delta_h = 2 * math.sqrt(c1 * c2) * math.sin(math.radians(turn / 2))
    l_mean, c_mean = (l1 + l2) / 2, (c1 + c2) / 2
    h_mean = (h1 + turn / 2) % 360 if c1 * c2 else h1 + h2
    t = (
        1
        - 0.17 * _cos(h_mean - 30)
        + 0.24 * _cos(2 * h_mean)
        + 0.32 * _cos(3 * h_mean + 6)
        - 0.20 * _cos(4 * h_mean - 63)
    )
    s_l = 1 + 0.015 * (l_mean - 50) ** 2 / math.sqrt(20 + (l_mean - 50) ** 2)
    s_c, s_h = 1 + 0.045 * c_mean, 1 + 0.015 * c_mean * t
    rotation = (
        -2
        * math.sqrt(c_mean**7 / (c_mean**7 + 25**7))
        * math.sin(math.radians(60 * math.exp(-(((h_mean - 275) / 25) ** 2))))
    )
    return math.sqrt(
        (delta_l / s_l) ** 2
        + (delta_c / s_c) ** 2
        + (delta_h / s_h) ** 2
        + rotation * (delta_c / s_c) * (delta_h / s_h)
    )


def _cos(degrees):
    return math.cos(math.radians(degrees))


def palette(name, theme):
    """Name -> `#rrggbb` of a style sheet's custom properties in a theme, "light" or "dark"."""
    text = (STATIC / name).read_text(encoding="utf-8")
    found = {}
    for selector, body in re.findall(r"(:root[^{]*)\{([^}]*)\}", text):
        if "dark" not in selector or theme == "dark":
            found |= dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", body))
    return found


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ((50, 2.6772, -79.7751), (50, 0, -82.7485), 2.0425),
        ((50, 2.5, 0), (73, 25, -18), 27.1492),
        ((60.2574, -34.0099, 36.2677), (60.4626, -34.1751, 39.4387), 1.2644),
        ((50, -1, 2), (50, 0, 0), 2.3669),
        ((2.0776, 0.0795, -1.135), (0.9033, -0.0636, -0.5514), 0.9082),
    ],
)
def test_the_measure_is_the_published_one(one, other, expected):
    """Pairs of Sharma et al., table 1."""
    assert difference(one, other) == pytest.approx(expected, abs=1e-4)
    assert difference(other, one) == pytest.approx(expected, abs=1e-4)


def test_the_simulation_takes_hues_away():
    """Red and green that differ most for others are near to each other without a kind of cone; greys stay."""
    red, green = "#d05040", "#7f8a20"
    assert difference(seen(red), seen(green)) > 40
    assert min(difference(seen(red, name), seen(green, name)) for name in ("protanopia", "deuteranopia")) < 16
    for name in DEFICIENCIES:
        assert difference(seen("#808080"), seen("#808080", name)) < 1


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("deficiency", DEFICIENCIES)
def test_categories_are_told_apart(theme, deficiency):
    """Those that can lie next to each other by `NEIGHBOURS` at least, all pairs by `ANY`; and each from the card."""
    colours = palette("base.css", theme)
    looks = [seen(colours["c-" + row], deficiency) for row in ROWS]
    for (i, one), (j, other) in itertools.combinations(enumerate(looks), 2):
        least = NEIGHBOURS if j - i <= REACH else ANY
        assert difference(one, other) >= least, f"{ROWS[i]} and {ROWS[j]}"
    card = seen(colours["card"], deficiency)
    assert min(difference(one, card) for one in looks) > 15


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_words_on_a_category_are_read(theme):
    """By the contrast that WCAG 2 asks of text, 4.5."""
    colours = palette("base.css", theme)
    for row in ROWS:
        dark, bright = sorted(
            0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05
            for r, g, b in (linear(colours["c-" + row]), linear(colours["on-" + row]))
        )
        assert bright / dark >= 4.5, row


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("deficiency", DEFICIENCIES)
def test_phases_are_told_apart(theme, deficiency):
    colours = palette("base.css", theme)
    looks = [seen(colours["p-" + phase], deficiency) for phase in STEP_PHASES]
    assert min(difference(one, other) for one, other in itertools.combinations(looks, 2)) >= NEIGHBOURS
    categories = [seen(colours["c-" + row], deficiency) for row in ROWS]
    least = ANY if deficiency == "none" else 4
    assert min(difference(one, other) for one in looks for other in categories) >= least, (
        "a phase looks like a category"
    )
