"""Sums the suite's junit reports: the 20 slowest tests, then `N passed, N failed`.

Usage: python scripts/summarise.py FOLDER. Exits 1 when a test failed or no report is there.
"""

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

SLOWEST = 20


def main(folder: Path) -> int:
    passed = failed = skipped = 0
    times = []
    reports = sorted(folder.glob("*.xml"))
    for report in reports:
        for case in ElementTree.parse(report).iter("testcase"):
            name = f"{report.stem}: {case.get('classname')}::{case.get('name')}"
            times.append((float(case.get("time", 0)), name))
            if case.find("failure") is not None or case.find("error") is not None:
                failed += 1
            elif case.find("skipped") is not None:
                skipped += 1
            else:
                passed += 1
    print(f"\nthe {SLOWEST} slowest tests:")
    for seconds, name in sorted(times, reverse=True)[:SLOWEST]:
        print(f"  {seconds:7.2f} s  {name}")
    print(f"\n{skipped} skipped" if skipped else "")
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not reports else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
