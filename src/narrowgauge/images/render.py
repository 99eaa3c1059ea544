"""From targets and templates to the files that are committed: Dockerfiles and compose.yaml.

Rendering is pure and deterministic: strict about names, sorted, no clock, no host.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, TemplateError

from narrowgauge.errors import StaleGenerated, TargetsFileError
from narrowgauge.images.content import dockerfile_path, lock_path
from narrowgauge.targets import Target

__all__ = [
    "check",
    "render_all",
    "render_compose",
    "render_dockerfile",
    "write",
]


def render_dockerfile(root: Path, target: Target, standin_base: str | None = None) -> str:
    """The Dockerfile of `target`; with `standin_base`, the temporary one of a stand-in."""
    standin = standin_base is not None
    return _render(
        root,
        "Dockerfile.j2",
        {
            "base": standin_base or target.base.reference,
            "cuda": f'"{" ".join(target.capabilities)}"' if target.capabilities else "none",
            "lock": lock_path(target, standin=standin).as_posix(),
            "standin": standin,
            "target": target,
        },
    )


def render_compose(root: Path, targets: Mapping[str, Target]) -> str:
    """compose.yaml: one service for each target that has an image."""
    listed = [targets[name] for name in sorted(targets) if targets[name].available]
    return _render(root, "compose.yaml.j2", {"targets": listed})


def render_all(root: Path, targets: Mapping[str, Target]) -> dict[Path, str]:
    """Every generated file, relative to the checkout `root`."""
    files = {
        dockerfile_path(target): render_dockerfile(root, target)
        for _, target in sorted(targets.items())
        if target.available
    }
    files[Path("compose.yaml")] = render_compose(root, targets)
    return files


def write(root: Path, files: Mapping[Path, str]) -> tuple[Path, ...]:
    """Write what differs; the paths that were written."""
    written = []
    for relative, text in files.items():
        if _committed(root / relative) != text:
            (root / relative).parent.mkdir(parents=True, exist_ok=True)
            (root / relative).write_text(text, encoding="utf-8")
            written.append(relative)
    return tuple(written)


def check(root: Path, files: Mapping[Path, str]) -> None:
    """Raise StaleGenerated, with the difference, where a committed file is not what is rendered."""
    differences: list[str] = []
    for relative, text in files.items():
        committed = _committed(root / relative)
        if committed != text:
            differences += difflib.unified_diff(
                (committed or "").splitlines(),
                text.splitlines(),
                f"{relative} (committed)",
                f"{relative} (rendered)",
                lineterm="",
            )
    if differences:
        raise StaleGenerated(
            "generated files are not what docker/ gives",
            why="\n".join(differences),
            next_step="narrowgauge images render, then commit what changed",
        )


def _committed(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None


def _render(root: Path, template: str, values: Mapping[str, object]) -> str:
    environment = Environment(
        loader=FileSystemLoader(root / "docker"),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,
    )
    try:
        return environment.get_template(template).render(values)
    except TemplateError as error:
        raise TargetsFileError(
            f"docker/{template} cannot be rendered", why=f"{type(error).__name__}: {error}"
        ) from error
