"""Each journey begins in an empty home."""

import pytest

from tests.support.journeys import Shell


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    return Shell(tmp_path_factory.mktemp("user"))
