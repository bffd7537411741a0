"""Make the description of the package from README.md: a package index resolves no link relative to the repository."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_IMAGE = re.compile(r"!\[([^\]]*)\]\((?!\w+:)([^)\s]+)\)")
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!\w+:|#)([^)\s]+)\)")


class ReadmeHook(MetadataHookInterface):
    """Sets `readme`, whose links lead to the `Source` of `[project.urls]`; while there is none they are plain text."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the readme of the package."""
        source = metadata.get("urls", {}).get("Source")
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": without_relative_links(text, source)}


def without_relative_links(text: str, source: str | None) -> str:
    """Return Markdown whose relative links and images are absolute, or without a source the text of each."""
    if source is None:
        return _LINK.sub(r"\1", _IMAGE.sub(r"*\1*", text))
    text = _IMAGE.sub(rf"![\1]({source}/raw/main/\2)", text)
    return _LINK.sub(rf"[\1]({source}/blob/main/\2)", text)
