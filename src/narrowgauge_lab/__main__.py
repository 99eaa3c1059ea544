"""`python3 -m narrowgauge_lab` needs torch and numpy, and no installation."""

import sys

from narrowgauge_lab.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
