"""`python3 -m narrowgauge_lab` needs torch and numpy, and no installation."""

import os
import sys

from narrowgauge_lab.cli import main
from narrowgauge_lab.waiting import processors, waiting

if __name__ == "__main__":
    # Before torch loads its OpenMP runtime; what was set is in the record.
    os.environ.update(waiting(os.environ, processors()))
    sys.exit(main(sys.argv[1:]))
