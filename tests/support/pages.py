"""The Python on pages of docs/, run as it stands there."""

import re
from types import SimpleNamespace

from tests.support import CHECKOUT


def code_of(page):
    """The blocks of Python on a page of docs/."""
    return re.findall(r"```python\n(.*?)```", (CHECKOUT / "docs" / page).read_text(), re.DOTALL)


def names_of(page, blocks=1, name="page"):
    """The names that the first blocks of Python on a page of docs/ define; name="__main__" runs their scripts, too."""
    names = {"__name__": name}
    for code in code_of(page)[:blocks]:
        exec(code, names)
    return SimpleNamespace(**names)
