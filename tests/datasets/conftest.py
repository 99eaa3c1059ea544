"""The tests' own helpers are importable from the tests of data."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
