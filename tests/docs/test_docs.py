"""The documentation: its code runs as it stands, and its links lead somewhere."""

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = sorted((REPOSITORY / "docs").glob("*.md"))
TEXTS = [*PAGES, *REPOSITORY.glob("*.md")]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
LANGUAGES = {"python", "sh", "text", ""}


def blocks(page, language):
    return [code for found, code in BLOCK.findall(page.read_text()) if found == language]


def anchors(text):
    """Of the headings, as MkDocs and GitHub make them."""
    headings = re.findall(r"^#+ (.*)$", BLOCK.sub("", text), re.MULTILINE)
    plain = (re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", h.lower()).strip()) for h in plain}


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=lambda p: p.stem)
def test_python_runs_from_top_to_bottom(page, tmp_path):
    code = "\n".join(blocks(page, "python"))
    if ".plot()" in code:
        pytest.importorskip("matplotlib")
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_every_block_says_what_it_is(page):
    assert {language for language, _ in BLOCK.findall(page.read_text())} <= LANGUAGES


def test_commands_exist():
    targets = set(re.findall(r"^([a-z]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    from jaxgraph.cli import main

    for page in PAGES:
        for line in "\n".join(blocks(page, "sh")).splitlines():
            words = [word for word in line.split("#")[0].split() if word != "-P"]
            if words[:1] == ["make"]:
                assert words[1] in targets, line
            elif words[:3] == ["python", "-m", "jaxgraph"]:
                with pytest.raises(SystemExit) as ended:
                    main([words[3], "--help"])
                assert ended.value.code == 0, line
            elif words:
                assert words[0] == "pip" or (REPOSITORY / words[0]).exists(), line


@pytest.mark.parametrize("text", TEXTS, ids=lambda p: p.name)
def test_links_lead_somewhere(text):
    for link in re.findall(r"\]\(([^)\s]+)\)", BLOCK.sub("", text.read_text())):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (text.parent / path).resolve() if path else text
        assert target.exists(), link
        if anchor and not anchor.startswith("jaxgraph."):  # those, mkdocstrings makes
            assert anchor in anchors(target.read_text()), link


def test_diagrams_are_drawn_from_their_sources():
    """If this fails: scripts/draw_diagrams.sh"""
    sources = sorted((REPOSITORY / "docs/diagrams").glob("*.dot"))
    shown = "".join(page.read_text() for page in PAGES)
    assert sources
    for source in sources:
        picture = REPOSITORY / "docs/images" / f"{source.stem}.svg"
        assert hashlib.sha256(source.read_bytes()).hexdigest() in picture.read_text(), source
        assert f"(images/{source.stem}.svg)" in shown, source


def test_every_page_is_in_the_navigation():
    listed = set(re.findall(r": (\w+\.md)$", (REPOSITORY / "mkdocs.yml").read_text(), re.MULTILINE))
    assert listed == {page.name for page in PAGES}


def test_the_reference_names_what_is_public():
    import importlib

    import jaxgraph
    import jaxgraph.ops

    named = re.findall(r"^::: (\S+)$", (REPOSITORY / "docs/reference.md").read_text(), re.MULTILINE)
    for name in named:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name
    described = {name.rpartition(".")[2] for name in named}
    assert set(jaxgraph.__all__) - described == {"build_info"}
    assert set(jaxgraph.ops.__all__) <= described


def test_sections_that_are_referred_to_in_the_code_exist():
    (explained,) = [page for page in PAGES if page.name == "troubleshooting.md"]
    from jaxgraph import Stats

    text = explained.read_text()
    for counter in re.findall(r"`((?:eager|evictions|arena)_\w+)`", text):
        if counter.endswith("_…"):
            continue
        assert counter in dict(Stats()), counter
    missing = {name for name in dict(Stats()) if name.startswith("eager_")} - {"eager_ns"}
    assert not {name for name in missing if f"`{name}`" not in text}
