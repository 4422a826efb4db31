"""What all tests share."""

import os
from pathlib import Path

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Warnings are errors, but for Lightning's own: its CombinedLoader still asks torch for a LeafSpec."""
    config.addinivalue_line("filterwarnings", "ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")


@pytest.fixture(scope="session")
def data_root() -> Path:
    """The folder of real data sets: `$APPRENTICE_DATA`, else `../shared/data` beside the checkout."""
    root = Path(os.environ.get("APPRENTICE_DATA") or Path(__file__).parents[2] / "shared" / "data")
    if not root.is_dir():
        pytest.skip(f"real data is not at {root}; APPRENTICE_DATA can name another place")
    return root
