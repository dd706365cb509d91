"""What tests ask of a page: that it is well-formed, loads nothing, and lets nobody's text become markup."""

import re
from html.parser import HTMLParser

EVIL = "<script>alert('x')</script> & \"quoted\" </pre><img src=http://evil.example/x onerror=alert(1)>"
VOID = {"meta", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """Parses strictly: every element that is opened is closed, in order."""

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: dict[str, str] = {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.words[self.open[-1]] = self.words.get(self.open[-1], "") + data


def loads_nothing(page: Page, text: str) -> None:
    """No script, no link, no picture, no style from elsewhere."""
    assert {tag for tag, _ in page.elements} & {"script", "link", "img", "iframe", "object", "embed", "base"} == set()
    for tag, attributes in page.elements:
        for name, value in attributes.items():
            if name in ("src", "href", "xlink:href", "data", "action", "srcset", "poster"):
                assert value and value.startswith("#"), f"{tag} loads {value}"
            assert not name.startswith("on")
    assert not re.search(r"url\((?!#)", text) and "@import" not in text
