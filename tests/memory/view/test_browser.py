"""Chromium, as the tests of pages drive it: one that stops answering is replaced and never waited for without end."""

import pytest

from support.pages import chromium, sweep

PAGE = """<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,"><title>p</title><p>one</p>
<div class="chart" id="a" style="width: 99px; height: 99px"></div>"""


@pytest.fixture
def browser(tmp_path, monkeypatch):
    with chromium.Browser(tmp_path) as running:
        monkeypatch.setattr(chromium, "ANSWER_S", 3)
        yield running


@pytest.mark.oracle("chromium")
def test_a_page_that_never_returns_fails_and_the_next_page_gets_a_new_browser(browser):
    browser.open(PAGE, 500)
    with pytest.raises(chromium.NoAnswer, match=r"Runtime\.evaluate: no answer within 3 s"):
        browser.call("(() => { for (;;); })()")
    browser.open(PAGE, 500)
    assert browser.call("document.querySelector('p').textContent") == "one" and browser.started == 2


@pytest.mark.oracle("chromium")
def test_a_browser_that_draws_no_frame_is_not_waited_for(browser):
    browser.open(PAGE, 500)
    browser.call("void (window.requestAnimationFrame = () => 0)")
    browser.call(sweep.PROBE)
    browser.call('probe.show("a")')


def test_a_browser_that_hangs_once_is_replaced_and_one_that_hangs_again_fails(monkeypatch):
    answers = iter([chromium.NoAnswer("first"), ["a defect"], chromium.NoAnswer("first"), chromium.NoAnswer("second")])

    def answer(*_):
        one = next(answers)
        if isinstance(one, Exception):
            raise one
        return one

    monkeypatch.setattr(sweep, "sweep", answer)
    with pytest.raises(AssertionError, match="a defect"):
        sweep.check_page(None, "")
    with pytest.raises(chromium.NoAnswer, match="second"):
        sweep.check_page(None, "")
