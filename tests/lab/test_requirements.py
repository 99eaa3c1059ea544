"""What the rows' parent imports for them."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, List

import pytest
from toys import METRIC, toy_job, write_toy

from narrowgauge_lab.requirements import preload


def _imported(monkeypatch: pytest.MonkeyPatch, folder: Path, *words: str) -> List[str]:
    """The modules that `preload` imports for the toy; torch.nowhere is not there."""
    extra = '[requires]\npreload = ["torch.nowhere", "torch.jit"]\n'
    write_toy(folder, METRIC, extra=extra)
    job = toy_job(folder, *words)
    seen: List[str] = []
    real = importlib.import_module

    def recorded(name: str) -> Any:
        seen.append(name)
        return real(name)

    monkeypatch.setattr(importlib, "import_module", recorded)
    preload(job)
    return seen


def test_what_many_rows_need_is_imported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module that this torch does not have is passed over, and the next one imported."""
    assert _imported(monkeypatch, tmp_path, "x=1,2,3") == ["torch.nowhere", "torch.jit"]


def test_a_module_that_refuses_this_machine_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch's compiler refuses a Python that it does not know."""
    (tmp_path / "torch_refuses.py").write_text('raise RuntimeError("not on Python 3.99")\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    real = importlib.import_module

    def refusing(name: str) -> Any:
        return real("torch_refuses" if name == "torch.nowhere" else name)

    monkeypatch.setattr(importlib, "import_module", refusing)
    assert _imported(monkeypatch, tmp_path / "toy", "x=1,2,3") == ["torch.nowhere", "torch.jit"]


def test_for_one_row_nothing_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _imported(monkeypatch, tmp_path, "x=1") == []
