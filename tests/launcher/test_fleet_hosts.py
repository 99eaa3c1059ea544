"""hosts.toml and what a command line asks of it."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowgauge.errors import UnknownNameError, UsageError
from narrowgauge.fleet.errors import HostsFileError
from narrowgauge.fleet.hosts import (
    Board,
    append_board,
    hosts_file,
    load_boards,
    parse_boards,
    select,
)
from narrowgauge_contract.errors import ExitCode, NarrowgaugeError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LAB = """
[[host]]
name = "desk"
address = "desk.lab"
labels = ["bench"]

[[host]]
name = "orin"
address = "192.168.1.7"
user = "lab"
port = 2222
target = "jetson"
devices = ["gpu0", "cpu0-3"]
data = "/mnt/ssd/ng"
leases = "/var/lock"
labels = ["bench", "jetson"]
ssh_config = "lab_ssh"
"""


def _parse(text: str) -> tuple[Board, ...]:
    return parse_boards(tomllib.loads(text))


def test_a_file_says_what_its_boards_are() -> None:
    desk, orin = _parse(LAB)

    assert desk == Board("desk", "desk.lab", labels=("bench",))
    assert (desk.login, orin.login) == ("desk.lab", "lab@192.168.1.7")
    assert orin.devices == ("gpu0", "cpu0-3")
    assert (orin.port, orin.target, orin.leases) == (2222, "jetson", "/var/lock")


def test_two_boards_of_one_name_are_an_error_that_says_which() -> None:
    text = '[[host]]\nname = "a"\naddress = "x"\n[[host]]\nname = "a"\naddress = "y"\n'

    with pytest.raises(HostsFileError, match="names two boards 'a'") as raised:
        _parse(text)

    assert "hosts 1 and 2" in raised.value.why
    assert "another name" in raised.value.next_step
    assert raised.value.exit_code == ExitCode.USAGE


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('adress = "x"', "lacks 'address'"),
        ('address = "x"\ndevice = ["all"]', "unknown key 'device'"),
        ('address = "-oProxyCommand=evil"', "address"),
        ('address = "x y"', "address"),
        ('address = "x"\nport = 70000', "above 65535"),
        ('address = "x"\nport = "ssh"', "port"),
        ('address = "x"\ndevices = ["gpu"]', "devices"),
        ('address = "x"\ndevices = []', "each device once"),
        ('address = "x"\ndevices = ["gpu0", "gpu0"]', "each device once"),
        ('address = "x"\ndevices = ["all", "gpu0"]', "whole board"),
        ('address = "x"\ndevices = ["cpu3-1"]', "ends before it begins"),
        ('address = "x"\ndevices = ["cpu0-3", "cpu2"]', "share processor 2"),
        ('address = "x"\ndevices = ["cpu0-9999999999"]', "above 4095"),
        ('address = "x"\ndata = "relative"', "data"),
        ('address = "x"\nuser = "-l"', "user"),
    ],
)
def test_what_is_wrong_is_said(line: str, said: str) -> None:
    with pytest.raises(HostsFileError, match=said):
        _parse(f'[[host]]\nname = "a"\n{line}\n')


@pytest.mark.parametrize("text", ['[host]\nname = "a"', '[hosts.a]\naddress = "x"'])
def test_another_shape_is_refused(text: str) -> None:
    with pytest.raises(HostsFileError, match=r"\[\[host\]\]|unknown table"):
        _parse(text)


def test_a_file_that_is_no_toml_is_refused(tmp_path: Path) -> None:
    (tmp_path / "hosts.toml").write_text("[[host]\n")

    with pytest.raises(HostsFileError):
        load_boards(tmp_path / "hosts.toml")


@settings(max_examples=50)
@given(
    st.dictionaries(
        st.sampled_from(["host", "name", "x"]),
        st.one_of(
            st.integers(),
            st.text(max_size=5),
            st.lists(
                st.dictionaries(
                    st.sampled_from(["name", "address", "port", "devices", "data", "zzz"]),
                    st.one_of(st.text(max_size=6), st.integers(), st.lists(st.text(max_size=4))),
                ),
                max_size=3,
            ),
        ),
    )
)
def test_any_document_gives_boards_or_an_error_of_ours(document: dict[str, object]) -> None:
    try:
        boards = parse_boards(document)
    except NarrowgaugeError:
        return
    assert len({board.name for board in boards}) == len(boards)


def test_boards_are_chosen_by_name_by_label_or_all() -> None:
    boards = _parse(LAB)

    def names(*given: str, every: bool = False, label: str | None = None) -> list[str]:
        return [board.name for board in select(boards, given, every=every, label=label)]

    assert names("orin") == ["orin"]
    assert names("orin", "desk") == ["desk", "orin"]
    assert names(every=True) == names(label="bench") == ["desk", "orin"]
    assert names(label="jetson") == ["orin"]
    with pytest.raises(UnknownNameError, match="unknown host 'orni'") as raised:
        names("orni")
    assert "did you mean 'orin'?" in raised.value.next_step
    with pytest.raises(UnknownNameError, match="unknown label 'bnech'"):
        names(label="bnech")
    with pytest.raises(UsageError, match="no board"):
        select((), (), every=True, label=None)


def test_a_board_is_added_and_read_back_and_the_rest_stays(tmp_path: Path) -> None:
    file = tmp_path / "conf" / "hosts.toml"
    first, second = _parse(LAB)
    append_board(file, first)
    file.write_text(file.read_text() + "# mine\n")
    append_board(file, second)

    there = str(file.parent / "lab_ssh")
    assert load_boards(file) == (first, dataclasses.replace(second, ssh_config=there))
    assert "# mine\n" in file.read_text()
    with pytest.raises(HostsFileError, match="already"):
        append_board(file, first)


def test_where_the_file_lies(tmp_path: Path) -> None:
    assert hosts_file({}, tmp_path) == tmp_path / ".config/narrowgauge/hosts.toml"
    assert hosts_file({"XDG_CONFIG_HOME": "/x"}, tmp_path) == Path("/x/narrowgauge/hosts.toml")
    assert hosts_file({"NARROWGAUGE_HOSTS": "/y.toml"}, tmp_path) == Path("/y.toml")
    assert load_boards(tmp_path / "none.toml") == ()


def test_ssh_s_configuration_lies_beside_the_file(tmp_path: Path) -> None:
    path = tmp_path / "hosts.toml"
    path.write_text(LAB, encoding="utf-8")

    desk, orin = load_boards(path)

    assert desk.ssh_config is None
    assert orin.ssh_config == str(tmp_path / "lab_ssh")
