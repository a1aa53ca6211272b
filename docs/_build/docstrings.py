"""What the package's docstrings need to read well on a page; mkdocs.yml loads it."""

from __future__ import annotations

import re
from typing import Any

from griffe import Attribute, Docstring, Extension, Object

_ROLE = re.compile(r":(?:class|func|meth|mod|data|attr):`~?([\w.]+)`")
_COMMENT = re.compile(r"^\s*#: ?(.*)$")


class Docstrings(Extension):
    """Sphinx roles as code, and ``#:`` comments above a field as its docstring."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rewrite one object's docstring."""
        if obj.docstring is None and isinstance(obj, Attribute):
            said = _comment_above(obj)
            if said:
                obj.docstring = Docstring(said, lineno=obj.lineno, parent=obj)
        if obj.docstring is not None:
            obj.docstring.value = _ROLE.sub(lambda found: f"`{found.group(1)}`", obj.docstring.value)


def _comment_above(attribute: Attribute) -> str:
    """The ``#:`` lines right above an attribute, joined."""
    if attribute.lineno is None:
        return ""
    said: list[str] = []
    for line in reversed(attribute.lines_collection[attribute.filepath][: attribute.lineno - 1]):
        found = _COMMENT.match(line)
        if found is None:
            break
        said.append(found.group(1))
    return " ".join(reversed(said))
