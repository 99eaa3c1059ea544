"""Checkpoints are whole or absent, damage is named, and the one before is kept."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from narrowgauge_contract.errors import ExitCode
from narrowgauge_lab.checkpoint import (
    Checkpoints,
    DamagedCheckpointError,
    random_state,
    set_random_state,
)

_STATE = {
    "epoch": 3,
    "weights": torch.arange(6.0).view(2, 3),
    "history": {"loss": [1.0, float("nan")]},
    "nothing": None,
    "pair": (1, "two"),
}


def _names(folder: Path) -> list:
    return sorted(path.name for path in folder.iterdir())


def test_a_state_comes_back_as_it_was(tmp_path: Path) -> None:
    Checkpoints(tmp_path / "new" / "folder").save(_STATE)
    state = Checkpoints(tmp_path / "new" / "folder", resume=True).load()

    assert state is not None
    assert torch.equal(state["weights"], _STATE["weights"])
    assert state["epoch"] == 3
    assert state["pair"] == (1, "two")
    assert state["history"]["loss"][0] == 1.0
    assert np.isnan(state["history"]["loss"][1])


def test_nothing_is_loaded_unless_asked_to_resume(tmp_path: Path) -> None:
    Checkpoints(tmp_path).save(_STATE)

    assert Checkpoints(tmp_path, resume=False).load() is None
    assert Checkpoints(tmp_path / "none", resume=True).load() is None


def test_the_last_two_are_kept_and_the_newest_is_loaded(tmp_path: Path) -> None:
    for epoch in range(1, 6):
        # A new object each time, as in a process that resumed.
        Checkpoints(tmp_path).save({"epoch": epoch})

    assert _names(tmp_path) == ["checkpoint-000004.pt", "checkpoint-000005.pt"]
    state = Checkpoints(tmp_path, resume=True).load()
    assert state is not None
    assert state["epoch"] == 5


def _damage_byte(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (_damage_byte, "does not match its sha256"),
        (lambda content: content[:-10], "bytes of"),
        (lambda content: b"", "does not begin as a checkpoint does"),
        (lambda content: b"\x80garbage\n" + content, "does not begin as a checkpoint does"),
    ],
    ids=["a-bit-flipped", "truncated", "empty", "foreign"],
)
def test_damage_is_an_error_that_names_the_file_and_the_way_on(
    tmp_path: Path, damage: object, why: str
) -> None:
    store = Checkpoints(tmp_path, resume=True)
    store.save({"epoch": 1})
    newest = store.save({"epoch": 2})
    newest.write_bytes(damage(newest.read_bytes()))  # type: ignore[operator]

    with pytest.raises(DamagedCheckpointError) as caught:
        store.load()

    assert str(newest) in caught.value.what
    assert why in caught.value.why
    assert "checkpoint-000001.pt" in caught.value.next_step
    assert caught.value.exit_code is ExitCode.RECORD_DAMAGED
    newest.unlink()
    state = store.load()
    assert state is not None
    assert state["epoch"] == 1, "what the message advises works"


def test_damage_of_the_only_checkpoint_says_that_there_is_no_other(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, resume=True)
    store.save({"epoch": 1}).write_bytes(b"short")

    with pytest.raises(DamagedCheckpointError, match="is damaged") as caught:
        store.load()

    assert "no earlier one" in caught.value.next_step


def test_a_full_disk_leaves_the_old_checkpoints_and_no_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Checkpoints(tmp_path, resume=True)
    store.save({"epoch": 1})
    store.save({"epoch": 2})

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            store.save({"epoch": 3})

    assert _names(tmp_path) == ["checkpoint-000001.pt", "checkpoint-000002.pt"]
    state = store.load()
    assert state is not None
    assert state["epoch"] == 2


def test_a_killed_write_is_no_checkpoint(tmp_path: Path) -> None:
    """What a kill leaves is the temporary file: it is not read, and the next write replaces it."""
    store = Checkpoints(tmp_path, resume=True)
    store.save({"epoch": 1})
    (tmp_path / ".checkpoint-000002.pt.1.tmp").write_bytes(b"narrowgauge-checkpoint 1 half")

    state = store.load()
    assert state is not None
    assert state["epoch"] == 1
    store.save({"epoch": 2})
    assert _names(tmp_path) == ["checkpoint-000001.pt", "checkpoint-000002.pt"]


def test_clearing_removes_what_is_ours_only(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path)
    store.save({"epoch": 1})
    (tmp_path / ".checkpoint-000002.pt.1.tmp").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("mine")
    store.clear()
    Checkpoints(tmp_path / "absent").clear()

    assert _names(tmp_path) == ["notes.txt"]


def test_clearing_takes_the_stages_of_the_row_with_it(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path / "row-0")
    stage, inner, other = (
        Checkpoints(tmp_path / name) for name in ("row-0/trunk", "row-0/trunk/first", "row-1")
    )
    for each in (stage, inner, other):  # the row itself may have none yet
        each.save({"epoch": 1})
    (stage.folder / ".checkpoint-000002.pt.1.tmp").write_bytes(b"half")
    (stage.folder / "notes.txt").write_text("mine")
    store.clear()

    left = [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.*")]
    assert sorted(left) == ["row-0/trunk/notes.txt", "row-1/checkpoint-000001.pt"]


def test_what_another_machine_gives_replaces_the_rows_own_checkpoints_only(tmp_path: Path) -> None:
    store, stage = Checkpoints(tmp_path, resume=True), Checkpoints(tmp_path / "trunk", resume=True)
    store.save({"epoch": 1})
    given = store.take()
    for epoch in (5, 6):
        store.save({"epoch": epoch})
    stage.save({"epoch": 3})
    store.put(given)

    assert _names(tmp_path) == ["checkpoint-000001.pt", "trunk"]
    assert store.load() == {"epoch": 1}
    assert stage.load() == {"epoch": 3}


def test_every_random_stream_goes_on_where_it_was(tmp_path: Path) -> None:
    own = torch.Generator()
    own.manual_seed(5)
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    np.random.standard_normal()  # leaves half a pair behind, which is state too

    def draws() -> tuple:
        return (
            random.random(),
            np.random.standard_normal(),
            torch.rand(3).tolist(),
            torch.rand(3, generator=own).tolist(),
        )

    Checkpoints(tmp_path).save(random_state({"own": own}))
    expected = draws()
    draws()
    state = Checkpoints(tmp_path, resume=True).load()
    assert state is not None
    set_random_state(state, {"own": own})

    assert draws() == expected
