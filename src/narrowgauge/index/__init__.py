"""An index over the records of a results folder: a cache, rebuilt from them at any time.

listed     what the index keeps of a run
database   the file, brought up to date with the folder, and asked
"""

from narrowgauge.index.database import INDEX_FILE, Index
from narrowgauge.index.listed import Listed

__all__ = ["INDEX_FILE", "Index", "Listed"]
