"""Names that want to be markup, and what a page may consist of in spite of them."""

from html.parser import HTMLParser

HOSTILE = (
    "<script>evil()</script>",
    '"><meta http-equiv=refresh content="0;url=http://evil.example">',
    "'><img src=http://evil.example onerror=evil()>",
    "</title></style></svg><iframe src=//evil.example>",
    "{{ 6 * 7 }}{% include 'evil' %}",
)
EVERYTHING = "".join(HOSTILE)
TAGS = set(
    "html head meta title style body header h1 h2 h3 nav ul li a main section p div span strong em small b i dl dt dd "
    "table thead tbody tr th td details summary figure figcaption svg path text article img footer".split()
)
ATTRIBUTES = set(
    "lang charset http-equiv content name id class href scope colspan rowspan tabindex role open style alt src width "
    "height viewbox x y d transform text-anchor aria-label aria-hidden xmlns".split()
)
METAS = ["Content-Security-Policy", "viewport", "color-scheme"]


class Elements(HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.found, self.texts = [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)

    def handle_data(self, text):
        self.texts.append(text)


def assert_only_our_markup(page):
    """The page has the elements of our templates, loads nothing, and shows hostile names as text."""
    elements = Elements(page)
    assert {tag for tag, _ in elements.found} <= TAGS
    assert {name for _, attributes in elements.found for name in attributes} <= ATTRIBUTES
    metas = [found.get("http-equiv") or found.get("name") for tag, found in elements.found if tag == "meta"]
    assert [name for name in metas if name] in (METAS, [])
    places = [attributes[key] for _, attributes in elements.found for key in ("src", "href") if key in attributes]
    assert all(place.startswith(("#", "data:image/")) for place in places)
    return " ".join(elements.texts)
