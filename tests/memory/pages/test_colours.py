"""The palette: readers with any of the three colour deficiencies tell apart what lies side by side."""

import itertools
import re
from importlib import resources

import pytest

from bytescope.memory import pages
from bytescope.memory.records import ROWS, STEP_PHASES
from bytescope.memory.text.levers import COLOURS
from support.colours import DEFICIENCIES, difference, seen

pytestmark = pytest.mark.quick
STATIC = resources.files(pages) / "static"
# Areas of equal colour would need a legend that says where they lie. Rows that are empty leave others as neighbours.
NEIGHBOURS, REACH, ANY = 10, 4, 8


def palette(name, theme):
    """Name -> `#rrggbb` of a style sheet's custom properties in a theme, "light" or "dark"."""
    text = (STATIC / name).read_text(encoding="utf-8")
    found = {}
    for selector, body in re.findall(r"(:root[^{]*)\{([^}]*)\}", text):
        if "dark" not in selector or theme == "dark":
            found |= dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", body))
    return found


@pytest.mark.parametrize(("one", "other", "expected"), [
    ((50, 2.6772, -79.7751), (50, 0, -82.7485), 2.0425), ((50, 2.5, 0), (73, 25, -18), 27.1492),
    ((60.2574, -34.0099, 36.2677), (60.4626, -34.1751, 39.4387), 1.2644), ((50, -1, 2), (50, 0, 0), 2.3669),
    ((2.0776, 0.0795, -1.135), (0.9033, -0.0636, -0.5514), 0.9082)])
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
@pytest.mark.parametrize("deficiency", DEFICIENCIES)
def test_phases_are_told_apart(theme, deficiency):
    colours = palette("report.css", theme)
    looks = [seen(colours["p-" + phase], deficiency) for phase in STEP_PHASES]
    assert min(difference(one, other) for one, other in itertools.combinations(looks, 2)) >= NEIGHBOURS


def test_terminals_have_the_colours_of_the_dark_page():
    colours = palette("base.css", "dark")
    assert {row: colour for row, (_, colour) in COLOURS.items()} == {row: colours["c-" + row] for row in ROWS}
