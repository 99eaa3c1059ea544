"""Shell completion. Never fails and never asks an engine: a shell waits for it at every Tab."""

from __future__ import annotations

from pathlib import Path

from narrowgauge_contract.errors import NarrowgaugeError

__all__ = ["experiments", "hosts", "parameters", "placements", "profiles", "runs", "targets"]


def experiments(incomplete: str) -> list[str]:
    """Names of experiments in the checkout around the current folder."""
    from narrowgauge.catalog import experiment_names
    from narrowgauge.checkout import find_checkout

    try:
        names = experiment_names(find_checkout(Path.cwd()).experiments)
    except NarrowgaugeError:
        return []
    return [name for name in names if name.startswith(incomplete)]


def targets(incomplete: str) -> list[str]:
    """Names of targets."""
    from narrowgauge.checkout import find_checkout
    from narrowgauge.targets import load_targets

    try:
        names = list(load_targets(find_checkout(Path.cwd()).targets_file))
    except NarrowgaugeError:
        return []
    return [name for name in names if name.startswith(incomplete)]


def hosts(incomplete: str) -> list[str]:
    """Names of boards in hosts.toml."""
    import os

    from narrowgauge.fleet.hosts import hosts_file, load_boards

    try:
        names = [board.name for board in load_boards(hosts_file(os.environ, Path.home()))]
    except NarrowgaugeError:
        return []
    return [name for name in names if name.startswith(incomplete)]


def placements(incomplete: str) -> list[str]:
    """Names of built-in placement plans."""
    from narrowgauge_contract.placement import BUILTIN

    return [name for name in BUILTIN if name.startswith(incomplete)]


def profiles(incomplete: str) -> list[str]:
    """Names of profiles."""
    from narrowgauge_contract.spec import PROFILES

    return [name for name in PROFILES if name.startswith(incomplete)]


def runs(incomplete: str) -> list[str]:
    """Run ids in the checkout's results, newest first."""
    from narrowgauge.checkout import find_checkout
    from narrowgauge.store import Store

    try:
        folders = list(Store(find_checkout(Path.cwd()).results).all())
    except NarrowgaugeError:
        return []
    return [name for name in ("latest", *(f.name for f in folders)) if name.startswith(incomplete)]


def parameters(incomplete: str) -> list[str]:
    """Names of parameters of any experiment, as `name=`: which one is meant stands elsewhere."""
    from narrowgauge.catalog import load_experiments
    from narrowgauge.checkout import find_checkout
    from narrowgauge_contract.parameters import PROFILE_PARAMETER

    try:
        specs = load_experiments(find_checkout(Path.cwd()).experiments)
    except NarrowgaugeError:
        return []
    names = sorted({PROFILE_PARAMETER.name, *(name for spec in specs for name in spec.parameters)})
    return [f"{name}=" for name in names if name.startswith(incomplete)]
