"""The documentation as a site: it needs nothing from elsewhere, and its links lead somewhere."""

import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


class Page(HTMLParser):
    """What a page needs (scripts, styles, pictures), where it leads to, and its anchors."""

    def __init__(self, file):
        super().__init__()
        self.needs, self.leads, self.anchors = [], [], set()
        self.feed(file.read_text())

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.anchors |= {found[name] for name in ("id", "name") if found.get(name)}
        if tag == "a" and found.get("href"):
            self.leads.append(found["href"])
        elif tag == "link" and found.get("rel") in ("stylesheet", "icon", "preconnect"):
            self.needs.append(found["href"])
        elif found.get("src"):
            self.needs.append(found["src"])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs", reason="needs the extra docs")
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-P", "-m", "mkdocs", "build", "--quiet", "--site-dir", target]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return {file: Page(file) for file in target.rglob("*.html")}


def test_pages_need_nothing_from_elsewhere(site):
    for file, page in site.items():
        for need in page.needs:
            parts = urlsplit(need)
            assert not parts.netloc, f"{file.name} fetches {need}"
            if parts.scheme != "data" and file.name != "404.html":
                assert (file.parent / unquote(parts.path)).exists(), f"{file.name} needs {need}"


def test_links_and_anchors_lead_somewhere(site):
    for file, page in site.items():
        if file.name == "404.html":  # its links begin at the site's address
            continue
        for link in page.leads:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            target = target / "index.html" if target.is_dir() else target
            assert target.exists(), f"{file} leads to {link}"
            if parts.fragment and target in site:
                assert unquote(parts.fragment) in site[target].anchors, f"{file} leads to {link}"
