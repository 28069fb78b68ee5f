"""Published activation memory, from the compiler: Korthikanti et al. 2022 (arXiv 2205.05198), Table 2."""

import pytest

from support.korthikanti import MODELS, ROWS, kept, units

# Two policies; the other rows take the same programs at other widths: tests/bench/published.py prints all rows.
CASES = [("22B", "selective", True), ("1T", "full", False)]


@pytest.mark.exhaustive
@pytest.mark.oracle("cuda")
@pytest.mark.parametrize(("model", "policy", "sequence_parallel"), CASES)
def test_activation_bytes_a_layer(model, policy, sequence_parallel):
    heads, width, _ = MODELS[model]
    found = units(model, kept(model, policy, sequence_parallel))
    assert found == pytest.approx(ROWS[policy, sequence_parallel](heads, width), abs=0.005)


def test_the_formulas_for_22b():
    """10 + 24/t + 5as/(ht) and its fellows, worked out: what the rows above are held against."""
    for (policy, sequence_parallel), wanted in {
        ("megatron", False): 26.33,
        ("megatron", True): 17.58,
        ("selective", False): 13.0,
        ("selective", True): 4.25,
        ("full", False): 2.0,
        ("full", True): 0.25,
    }.items():
        assert ROWS[policy, sequence_parallel](64, 6144) == pytest.approx(wanted, abs=0.005)
