"""`python3 -m narrowgauge_lab` needs torch and numpy, and no installation."""

import os
import sys

from narrowgauge_lab.cli import main

if __name__ == "__main__":
    # Before torch loads its OpenMP runtime, which reads this once. Spinning threads cost a loaded
    # 2-core machine a factor of seven in training; what was set is in the record.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    sys.exit(main(sys.argv[1:]))
