"""`python -m narrowgauge` is `narrowgauge`."""

from narrowgauge.cli.app import main

if __name__ == "__main__":
    main()
