"""What the documents say is true: commands exist, pages are current, links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from narrowgauge.cli.app import build_app
from narrowgauge.targets import TARGETS_FILE, load_targets
from narrowgauge.unverified import find_markers, main, render
from narrowgauge_contract.errors import UsageError

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def _commands(text: str) -> list[str]:
    """The `narrowgauge …` lines of the fenced shell blocks."""
    blocks = re.findall(r"```sh\n(.*?)```", text, flags=re.DOTALL)
    lines = [line.strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.startswith("narrowgauge ")]


def test_every_command_of_the_readme_exists() -> None:
    commands = _commands((ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(commands) >= 8
    names = {tuple(word for word in line.split()[1:3] if re.match(r"^[a-z][a-z-]*$", word))
             for line in commands}  # fmt: skip
    groups = {"data", "weights", "images", "image-bin"}
    for words in sorted(names):
        path = words[:2] if words[0] in groups else words[:1]
        done = CliRunner().invoke(build_app(), [*path, "--help"])
        assert done.exit_code == 0, f"narrowgauge {' '.join(path)}: {done.output}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))

    assert [t for t in targets if not (page.parent / t).exists()] == []


def test_the_page_of_unverified_things_is_current() -> None:
    page = (ROOT / "docs" / "unverified.md").read_text(encoding="utf-8")

    assert page == render(find_markers(ROOT))


def test_a_marker_reaches_the_page(tmp_path: Path) -> None:
    (tmp_path / "docker").mkdir()
    (tmp_path / "docs").mkdir()
    note = "unverified" + ": the base | not reachable | build it"
    (tmp_path / "docker" / "x.toml").write_text(f"# {note}\n")

    main([], tmp_path)

    text = (tmp_path / "docs" / "unverified.md").read_text()
    assert "| the base | not reachable | build it | `docker/x.toml` |" in text
    assert main(["--check"], tmp_path) == 0
    (tmp_path / "docker" / "x.toml").write_text("")
    with pytest.raises(UsageError):
        main(["--check"], tmp_path)


@pytest.mark.parametrize(
    ("name", "script", "pattern"),
    [
        *((name, "bench.py", "*") for name in ("energy", "harness", "images", "launcher")),
        ("layers", "channels_last.py", "channels-last-*"),
        ("layers", "host_memory.py", "host-memory-*"),
    ],
)
def test_the_table_of_a_benchmark_is_that_of_its_samples(
    name: str, script: str, pattern: str
) -> None:
    folder = ROOT / "benchmarks" / name
    page = (folder / "README.md").read_text(encoding="utf-8")
    (samples,) = (folder / "reference").glob(f"{pattern}.json")
    shown = subprocess.run(
        [sys.executable, str(folder / script), "--show", str(samples)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip

    assert shown.stdout.strip() in page


def test_the_tables_of_the_experiments_are_those_of_their_records() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "narrowgauge", "results", "tables", "--check"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr


def test_the_runs_that_are_scored_on_one_scale_have_their_records_here() -> None:
    page = (ROOT / "docs" / "anytime.md").read_text(encoding="utf-8")
    runs = re.findall(r"`(\d{8}T\d{6}Z-[a-z-]+-[0-9a-f]{6})`", page)
    kept = {path.name.partition(".")[0] for path in ROOT.glob("experiments/*/reference/*/*")}

    assert len(runs) >= 12
    assert not set(runs) - kept


def test_the_readmes_table_of_targets_says_what_targets_toml_says() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name, target in load_targets(ROOT / TARGETS_FILE).items():
        (row,) = re.findall(rf"^\| `{name}` \| .* \|$", readme, re.MULTILINE)
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert cells[2] == f"{target.base.repository}:{target.base.tag}".removeprefix(
            "docker.io/library/"
        )
        assert cells[3] == target.python
        assert (target.cuda or "–").startswith(cells[4])
        assert cells[5] == (target.torch.version or "the base's")
        if target.fits.driver_least:
            assert f"driver {target.fits.driver_least.removesuffix('.0')} or newer" in cells[1]
