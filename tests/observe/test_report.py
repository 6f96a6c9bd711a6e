"""The report, read by a browser that clicks its sections: it shows what stats() says.

Without Chromium (Debian: `chromium`) what a browser would show is not tested.
"""

import html
import json
import re
import shutil
import subprocess

import jax
import jax.numpy as jnp
import pytest

import jaxgraph

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")

# Clicks every tab, and leaves behind what could be seen then.
CLICKS = """
<script>
const seen = {};
for (const tab of document.querySelectorAll('nav button')) {
  tab.click();
  const visible = [...document.querySelectorAll('section')].filter(s => s.getClientRects().length);
  const selected = [...document.querySelectorAll('nav button[aria-selected=true]')];
  seen[tab.dataset.section] = {
    visible: visible.map(s => s.id),
    selected: selected.map(t => t.innerText),
    text: visible.map(s => s.innerText).join(''),
  };
}
document.querySelector('[data-section=counters]').click();
seen.counters.values = Object.fromEntries(
  [...document.querySelectorAll('[data-counter]')].map(c => [c.dataset.counter, c.innerText]));
document.querySelector('[data-section=pictures]').click();
const svg = document.querySelector('svg');
seen.pictures.svg = svg ? svg.getBoundingClientRect().width : 0;
const left = document.createElement('pre');
left.id = 'seen';
left.textContent = JSON.stringify(seen);
document.body.append(left);
</script>
"""


@pytest.fixture
def step():
    def scaled(x, w):
        return jnp.tanh(x @ w) + 1

    step = jaxgraph.wrap(scaled)
    x, w = jnp.ones((4, 64)), jnp.ones((64, 64))
    for _ in range(5):
        jax.block_until_ready(step(x, w))
    return step


def browse(page, profile):
    """What the browser has seen, without a network."""
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={profile}",
        "--virtual-time-budget=2000", "--dump-dom", page.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr[-2000:]
    return json.loads(html.unescape(found[1]))


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_a_browser_shows_what_stats_says(step, tmp_path):
    pytest.importorskip("matplotlib")
    page = jaxgraph.report(step, tmp_path / "report.html")
    stats, events = dict(step.stats()), step.events()
    text = page.read_text()
    page.write_text(text.replace("</body>", CLICKS + "</body>"))
    seen = browse(page, tmp_path / "profile")
    for name, tab in seen.items():
        assert tab["visible"] == [name]
        assert len(tab["selected"]) == 1
    shown = {name: int(value) for name, value in seen["counters"]["values"].items()}
    assert shown == stats
    for event in events:
        assert event.why in seen["events"]["text"]
    assert "split 0: native" in seen["plan"]["text"]
    assert seen["pictures"]["svg"] > 300


def test_it_needs_nothing_else(step, tmp_path):
    text = jaxgraph.report(step, tmp_path / "report.html").read_text()
    assert not re.findall(r'(?:src|href)="(?!#)', text)
    assert "@import" not in text and "url(http" not in text
    assert step.history() in html.unescape(text)


def test_names_cannot_break_the_page(step, tmp_path):
    step.name = "model.<lambda> & </script>"
    text = jaxgraph.report(step, tmp_path / "report.html").read_text()
    assert "model.&lt;lambda&gt; &amp; &lt;/script&gt;" in text
    assert text.count("</script>") == 1


def test_a_step_that_never_ran_has_a_report_too(tmp_path):
    step = jaxgraph.wrap(lambda x: x + 1)
    text = jaxgraph.report(step, tmp_path / "report.html").read_text()
    assert "No native split has run yet" in html.unescape(text)
    assert "call it first" in text or "jaxgraph[plot]" in text
