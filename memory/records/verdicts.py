"""The verdict on a memory limit: the word that says whether the predicted bytes fit."""

# Above this fraction of the limit, the verdict on bytes that fit is "tight".
TIGHT = 0.95
TIGHT_PERCENT = f"{100 * TIGHT:g} %"


def verdict_word(predicted: int, limit: int) -> str:
    """Returns the verdict on `predicted` bytes where `limit` bytes are available: "fits", "tight" (fits, with more than
    the fraction `TIGHT` of the limit) or "exceeds"."""
    if predicted > limit:
        return "exceeds"
    return "tight" if predicted > TIGHT * limit else "fits"
