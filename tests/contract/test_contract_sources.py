"""Hashes of source trees, the declared data sets, and the names of errors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from narrowgauge_contract.data_commands import (
    CONTAINER,
    LAUNCHER,
    DataCommands,
    commands_in,
    module_at,
)
from narrowgauge_contract.datasets import DATA_SETS, DataSet, data_set
from narrowgauge_contract.errors import ExitCode, NarrowgaugeError, UnknownNameError, nearest
from narrowgauge_contract.hashing import sha256_file, tree_hash


class TestTreeHash:
    @staticmethod
    def _tree(root: Path) -> Path:
        for name in ("a.py", "sub/b.cu", "sub/c.toml"):
            path = root / "pkg" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(name)
        return root / "pkg"

    def test_it_does_not_matter_where_the_tree_lies(self, tmp_path: Path) -> None:
        one, other = self._tree(tmp_path / "x"), self._tree(tmp_path / "y")

        assert tree_hash([one]) == tree_hash([other])

    def test_builds_caches_and_hidden_files_do_not_count(self, tmp_path: Path) -> None:
        tree = self._tree(tmp_path)
        before = tree_hash([tree])
        for name in ("__pycache__/a.py", ".hidden/a.py", "x.so", "results.json", "a.pyc"):
            (tree / name).parent.mkdir(exist_ok=True)
            (tree / name).write_text("x")

        assert tree_hash([tree]) == before

    @pytest.mark.parametrize("change", ["content", "name", "more", "fewer"])
    def test_any_change_of_a_source_counts(self, tmp_path: Path, change: str) -> None:
        tree = self._tree(tmp_path)
        before = tree_hash([tree])
        if change == "content":
            (tree / "a.py").write_text("other")
        elif change == "name":
            (tree / "a.py").rename(tree / "z.py")
        elif change == "more":
            (tree / "n.py").write_text("")
        else:
            (tree / "a.py").unlink()

        assert tree_hash([tree]) != before

    def test_order_of_roots_does_not_count(self, tmp_path: Path) -> None:
        one = self._tree(tmp_path)
        other = tmp_path / "other"
        other.mkdir()
        (other / "d.h").write_text("d")

        assert tree_hash([one, other]) == tree_hash([other, one])

    def test_a_file_is_hashed_as_a_whole(self, tmp_path: Path) -> None:
        path = tmp_path / "x"
        path.write_bytes(b"abc")

        assert sha256_file(path).startswith("ba7816bf8f01cfea")


#: Sets to train on; the others are a handful of images, and weights.
TO_TRAIN_ON = ("mnist", "fashion-mnist", "cifar10")


class TestDataSets:
    @pytest.mark.parametrize("name", TO_TRAIN_ON)
    def test_a_set_to_train_on_has_both_parts(self, name: str) -> None:
        declared = data_set(name)
        names = ["train-images.u8", "train-labels.u8", "test-images.u8", "test-labels.u8"]
        assert [flat.name for flat in declared.files] == names
        images, labels = declared.file("train-images.u8"), declared.file("train-labels.u8")
        assert images.shape[0] == labels.bytes
        assert len(declared.mean) == len(declared.std) == images.shape[1]
        assert len(declared.classes) == 10

    @pytest.mark.parametrize("declared", DATA_SETS.values(), ids=list(DATA_SETS))
    def test_a_declaration_is_complete(self, declared: DataSet) -> None:
        assert len({flat.sha256 for flat in declared.files}) == len(declared.files) > 0
        assert len(declared.mean) == len(declared.std) > 0
        assert all(re.fullmatch("[0-9a-f]{64}", flat.sha256) for flat in declared.files)
        assert declared.licence
        assert declared.citation

    @pytest.mark.parametrize("declared", DATA_SETS.values(), ids=list(DATA_SETS))
    def test_the_official_mirror_comes_first_and_packages_are_pinned(
        self, declared: DataSet
    ) -> None:
        clients = [source.client for source in declared.sources]
        assert "https" not in clients[1:]
        assert declared.name not in TO_TRAIN_ON or (clients[0] == "https" and len(clients) > 1)
        for source in declared.sources:
            for artifact in source.artifacts:
                if source.client == "https":
                    assert artifact.locator.startswith("https://")
                else:
                    assert re.fullmatch("[0-9a-f]{64}", artifact.sha256 or "")

    def test_an_unknown_set_or_file_names_the_nearest(self) -> None:
        with pytest.raises(UnknownNameError, match="did you mean 'mnist'"):
            data_set("mnits")
        with pytest.raises(UnknownNameError, match=r"did you mean 'test-labels\.u8'"):
            data_set("mnist").file("test-label.u8")


class TestErrors:
    def test_exit_codes_are_distinct_and_fit_a_byte(self) -> None:
        assert len({int(code) for code in ExitCode}) == len(ExitCode)
        assert all(0 <= code <= 255 for code in ExitCode)

    def test_an_error_tells_what_why_and_what_next(self) -> None:
        error = NarrowgaugeError("it broke", why="a\nb", next_step="mend it")

        assert str(error).splitlines() == ["it broke", "why:  a", "      b", "next: mend it"]

    def test_a_name_unlike_any_other_gets_the_list_only(self) -> None:
        assert nearest("zzz", ["mnist", "cifar10"]) is None
        assert (
            "Known: cifar10, mnist"
            in UnknownNameError("set", "zzz", ["mnist", "cifar10"]).next_step
        )
        assert "Known: none" in UnknownNameError("set", "zzz", []).next_step

    def test_of_more_names_than_a_screen_holds_the_nearest_are_listed(self) -> None:
        names = [f"claim-{number}" for number in range(999)]

        said = UnknownNameError("claim", "claim-50x", names).next_step

        assert "claim-50, " in said
        assert said.endswith(" and 987 more")
        assert len(said) < 300


class TestDataCommands:
    """What a message says must be what its reader can type."""

    def test_an_image_is_known_by_its_target(self) -> None:
        assert commands_in({"NARROWGAUGE_TARGET": "cpu"}, LAUNCHER) is CONTAINER
        assert commands_in({"NARROWGAUGE_TARGET": ""}, LAUNCHER) is LAUNCHER
        assert commands_in({}, LAUNCHER) is LAUNCHER

    @pytest.mark.parametrize("commands", [LAUNCHER, CONTAINER, module_at(Path("/data"))])
    def test_every_command_names_the_set(self, commands: DataCommands) -> None:
        for template in (commands.fetch, commands.take, commands.repair):
            assert template.count("{}") == 1
            assert " mnist" in template.format("mnist")

    def test_a_folder_of_any_name_can_be_pasted(self) -> None:
        line = module_at(Path("/a folder/{x}")).fetch.format("mnist")

        assert line == "python3 -m narrowgauge_data fetch mnist --data '/a folder/{x}'"
