"""HTML put together so that nothing from a file can become markup: text is escaped unless it was made here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def tag(name: str, *children: str | None, **attributes: str | bool | None) -> Html:
    """An element; ``class_`` and ``data_x`` become ``class`` and ``data-x``, an attribute of ``None`` is left out."""
    given = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{escape(str(value))}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    return Html(f"<{name}{given}>{join(children)}</{name}>")


def join(children: Iterable[str | None]) -> Html:
    """One piece of HTML from several, with what is plain text escaped."""
    return Html("".join(child if isinstance(child, Html) else escape(child) for child in children if child is not None))


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Iterable[int] = ()) -> Html:
    """A table whose cells know their column's name, so that a narrow screen can stack them; ``numbers`` align right."""
    right = frozenset(numbers)
    head = tag(
        "tr", *(tag("th", text, scope="col", class_="n" if i in right else None) for i, text in enumerate(heads))
    )
    body = [
        tag(
            "tr",
            *(
                tag("td", tag("div", cell), data_head=heads[i], class_="n" if i in right else None)
                for i, cell in enumerate(row)
            ),
        )
        for row in rows
    ]
    return tag("table", tag("thead", head), tag("tbody", *body))


def facts(pairs: Iterable[tuple[str, str]]) -> Html:
    """Names and values beside each other."""
    return tag("dl", *(tag("div", tag("dt", name), tag("dd", value)) for name, value in pairs))


def folded(title: str, body: Html, key: str, *, opened: bool = False) -> Html:
    """Something to unfold; ``key`` is what the page remembers it by when it is refreshed."""
    return tag("details", tag("summary", title), body, id=key, open=opened)


def dotted(name: str) -> Html:
    """A module's name or another with dots, as code that a line may break after a dot."""
    return tag("code", Html(escape(name).replace(".", ".<wbr>")))
