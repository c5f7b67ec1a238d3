"""What a page consists of, for tests of pages."""

from html.parser import HTMLParser


class HtmlPage(HTMLParser):
    """The parts of a page.

    Attributes:
        text: what a reader sees.
        places: what its elements load or lead to.
        scripts: texts of those that it holds.
        policy: its content security policy.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.images: list[dict[str, str]] = []
        self.places: list[str] = []
        self.text = ""
        self.scripts: list[str] = []
        self.policy = ""
        self._in: str | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attributes}
        self.tags.append(tag)
        self.text += " "
        self.images += [given] if tag == "img" else []
        self.places += [given[name] for name in ("src", "href", "data-video", "poster") if name in given]
        self._in = "data" if "type" in given else tag
        if "http-equiv" in given:
            self.policy = given["content"]

    def handle_endtag(self, tag: str) -> None:
        self._in = None

    def handle_data(self, data: str) -> None:
        if self._in == "script":
            self.scripts.append(data)
        elif self._in not in ("style", "data"):
            self.text += data
