"""Who may import whom, and what an import may cost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _modules_after(statement: str) -> set[str]:
    code = f"import json, sys; {statement}; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(json.loads(done.stdout))


def test_the_import_contract_holds() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports"))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr


def test_the_contract_needs_the_standard_library_only() -> None:
    files = sorted((ROOT / "src" / "narrowgauge_contract").glob("*.py"))
    names = [f"narrowgauge_contract.{path.stem}" for path in files if path.stem != "__init__"]
    assert len(names) >= 10
    imports = "import " + ", ".join(names)
    top = {name.partition(".")[0] for name in _modules_after(imports)}

    foreign = {name for name in top if name not in sys.stdlib_module_names}
    assert {n for n in foreign if not n.startswith("_")} <= {"narrowgauge_contract", "tomli"}


def test_fetching_data_needs_the_standard_library_only() -> None:
    """It runs in a container that has Python and nothing else; Pillow is asked for when needed."""
    files = sorted((ROOT / "src" / "narrowgauge_data").glob("*.py"))
    names = [p.stem for p in files if p.stem not in ("__init__", "__main__", "png")]
    assert len(names) >= 8
    loaded = _modules_after("import " + ", ".join(f"narrowgauge_data.{name}" for name in names))

    foreign = {name.partition(".")[0] for name in loaded} - set(sys.stdlib_module_names)
    assert {n for n in foreign if not n.startswith("_")} == {
        "narrowgauge_contract", "narrowgauge_data"
    }  # fmt: skip


@pytest.mark.parametrize("heavy", ["docker", "matplotlib", "numpy", "pydantic", "rich", "scipy"])
def test_the_command_line_imports_nothing_heavy(heavy: str) -> None:
    """`narrowgauge --help` is quick because each command imports what it needs when it runs."""
    assert heavy not in _modules_after("import narrowgauge.cli.app")


def test_no_host_module_pulls_in_torch() -> None:
    modules = sorted(
        ".".join(path.relative_to(ROOT / "src").with_suffix("").parts)
        for path in (ROOT / "src" / "narrowgauge").rglob("*.py")
        if path.name not in ("__init__.py", "__main__.py")
    )
    loaded = _modules_after("import " + ", ".join(modules))

    assert "torch" not in loaded
    assert "narrowgauge_lab" not in loaded
