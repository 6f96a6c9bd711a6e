"""For MkDocs: links from docs/ to other files of the repository lead to `repo_url`, if it is set.

Such links work where the repository is browsed; on the site, without an address, they become text.
"""

import re
from typing import Any

_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)]+)\)")


def on_page_markdown(markdown: str, *, config: Any, **_: Any) -> str:
    """Replaces links to files outside of docs/."""
    base = (config.repo_url or "").rstrip("/")

    def replaced(match: re.Match[str]) -> str:
        text, path = match.groups()
        return f"[{text}]({base}/blob/main/{path})" if base else text

    return _OUTSIDE.sub(replaced, markdown)
