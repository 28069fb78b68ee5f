"""Pages in a headless browser: what they hold as text, and what a browser makes of them."""

import json
import re
import subprocess
from html.parser import HTMLParser

from bytescope.memory.view.frame import source_hash
from support.oracles import CHROMIUM, require

# What would end an element, an attribute or a line of a script, and what a template would run.
HOSTILE = "</script><b>x</b><!--&amp;'\"\u2028{{ 7 * 6 }}{% if x %}"
# Bytes of a page at the most: it is mailed, and opened on a phone.
MOST = 600_000
TRAP = """addEventListener("error", (e) => { document.title = "ERROR " + e.message; });
addEventListener("securitypolicyviolation", (e) => { document.title = "ERROR refused " + e.violatedDirective; });"""


class Page(HTMLParser):
    """Counts elements, and keeps the words, the attributes and the text of each script."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.tags, self.words, self.scripts, self.attributes = {}, [], [], []
        self.feed(text)
        self.close()

    @property
    def data(self):
        """What the page's script draws."""
        return json.loads(self.scripts[1])

    def handle_starttag(self, tag, attrs):
        self.tags[tag] = self.tags.get(tag, 0) + 1
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data):
        if self.lasttag == "script" and len(self.scripts) > 0 and self.cdata_elem:
            self.scripts[-1] += data
        else:
            self.words.append(data)


def one_file(text, links=()):
    """The page parsed, once it is sure that it is one file with the four scripts of every page and no more; `links`:
    the addresses that it may lead to."""
    page = Page(text)
    assert page.tags["script"] == 4 and page.tags["style"] == 1 and "<b>x" not in text
    policy = dict(part.strip().split(" ", 1) for part in re.search('Policy" content="(.*?)"', text)[1].split(";"))
    style = re.search("<style>(.*?)</style>", text, re.S)[1]
    assert policy["script-src"] == " ".join(source_hash(page.scripts[k]) for k in (0, 2, 3))
    assert policy["style-src"] == source_hash(style) and policy["default-src"] == "'none'"
    assert "const base" in page.scripts[0] and "base.start(" in page.scripts[3]
    assert "const charts" in page.scripts[2] and len(text.encode()) <= MOST, f"{len(text.encode()):,} bytes"
    for name, value in page.attributes:
        assert name != "style", f"the policy refuses style={value}"
        needless = value.startswith("data:") or (name == "href" and value in links)
        assert name not in ("src", "href") or needless, f"{name}={value} needs the network"
    return page


def with_style_attributes(text):
    """The HTML of a page with the declarations of its style rules in the elements that they are for."""
    rules = dict(re.findall(r':root \[data-style="(\d+)"\] { (.*?) }', text))
    return re.sub(r'data-style="(\d+)"', lambda match: f'style="{rules[match[1]]}"', text.partition("<body>")[2])


def literally(page):
    """How often the hostile text is shown, as it was written."""
    return sum(word.count(HOSTILE) for word in page.words)


def browse(tmp_path, text, fragment="", script="", options=(), dark=False):
    """The page's document after its scripts ran, as text; `script` runs last, and is added to what the page's policy
    allows."""
    require("chromium")
    path = tmp_path / "page.html"
    allowed = text.replace("script-src ", f"script-src {source_hash(TRAP)} {source_hash(script)} ", 1)
    path.write_text(
        allowed.replace("</title>", f"</title><script>{TRAP}</script>", 1).replace(
            "</body>", f"<script>{script}</script></body>"
        ),
        encoding="utf-8",
    )
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--no-first-run",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--window-size=1440,1400",
        "--hide-scrollbars",
        "--virtual-time-budget=6000",
        *(["--blink-settings=preferredColorScheme=0"] if dark else []),
        *options,
        f"{path.as_uri()}{fragment}",
    ]
    done = subprocess.run(command, capture_output=True, timeout=120)
    return done.stdout.decode("utf-8", "replace")


def body(document):
    """What a person sees: the document without its scripts."""
    assert "<title>ERROR" not in document, re.search("<title>ERROR.*?</title>", document)[0]
    return re.sub(r"<script.*?</script>", "", document, flags=re.S)


# What a page cuts off: cells and words that their own box hides, and a page that scrolls sideways.
_CUT = """(() => {
  const found = [], wide = document.documentElement.scrollWidth;
  if (wide > innerWidth) found.push(`the page is ${wide} wide`);
  for (const node of document.querySelectorAll("main *")) {
    const look = getComputedStyle(node);
    const hides = look.overflowX === "hidden" || look.overflowX === "clip";
    if (hides && !node.closest("svg") && node.scrollWidth > node.clientWidth + 1 && node.textContent.trim())
      found.push(`${node.tagName}.${node.className} hides part of ${node.textContent.trim().slice(0, 60)}`);
    if (node.tagName === "TD" && !node.closest(".scroll")) found.push(`a table without .scroll: ${node.textContent}`);
  }
  return found;
})()"""


def at_widths(browser, pages, widths, script="null"):
    """Pages in windows of so many pixels: {(page, width): (what is cut off, the value of `script`)}.

    browser: a `pages.chromium.Browser`. pages: name -> text. script: a JavaScript expression in the page.
    """
    found = {}
    for name, text in pages.items():
        for width in widths:
            browser.open(text, width)
            found[name, width] = browser.call(_CUT), browser.call(script)
            assert not browser.errors(), (name, width, browser.errors())
    return found
