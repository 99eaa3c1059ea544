"""Tables of multipliers: families against published figures, import, and every bad input."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, List, Optional, Tuple

import numpy as np
import pytest

from narrowgauge_contract.errors import ExitCode, UnknownNameError
from narrowgauge_lab.multipliers import (
    NAMES,
    CompilerMissingError,
    Difference,
    TableError,
    TableSourceError,
    analyse,
    difference,
    error_blocks,
    error_difference,
    error_statistics,
    find_table,
    from_c,
    make_table,
    named,
)
from narrowgauge_lab.multipliers.c_source import run_c
from narrowgauge_lab.multipliers.report import (
    comparison_text,
    list_entry,
    list_line,
    list_text,
    show_text,
)
from narrowgauge_lab.multipliers.table import codes

C_SOURCE = """
/* int16_t not_this(int8_t a, int8_t b) { */
#include <stdint.h>
static inline int half(int x, int y)
{ return (x + y) / 2; }
int16_t mul8s_TEST(int8_t A, int8_t B)
{ return (int16_t)(A * (int)(B & ~3)); }
uint64_t old_style(const uint64_t a, uint64_t b) { return a * b + (uint64_t)half(0, 1); }
uint16_t pattern(unsigned char a, uint8_t b) { return (uint16_t)((int8_t)a * (int8_t)b); }
int mixed(int8_t a, uint8_t b) { return a * 3 + b; }
uint64_t mul8s_BITS(uint64_t a, uint64_t b)
{ return (uint64_t)(uint16_t)((int8_t)a * (int8_t)b); }
uint16_t crash(uint8_t a, uint8_t b) { *(volatile int *)0 = a; return b; }
uint16_t forever(uint8_t a, uint8_t b) { for (volatile int i = 0;; ) { (void)i; } return a + b; }
uint16_t leaves(uint8_t a, uint8_t b) { __builtin_trap(); return a + b; }
"""


def _pairs(signed: bool = False) -> Any:
    side = codes(signed)
    return side[:, None], side[None, :]


@pytest.fixture(name="source")
def _source(tmp_path: Path) -> Path:
    path = tmp_path / "mul8s_TEST.c"
    path.write_text(C_SOURCE, encoding="utf-8")
    return path


def test_ama5_has_the_published_errors() -> None:
    table = named("ama5")
    found = error_statistics(table)

    assert round(found.er, 4) == 0.9805
    assert round(found.med, 1) == 7649.5
    assert round(found.nmed, 4) == 0.1176
    assert round(found.mred, 4) == 0.5641
    assert (found.bias, found.symmetric) == (1011.5, False)
    assert (int(table.values.max()), int((table.values > 65535).sum())) == (69071, 628)
    assert not table.fits_int16()


def test_the_block_of_ama5_has_the_published_errors_and_makes_the_whole() -> None:
    block = named("ama5-4x4")
    found = error_statistics(block)

    assert (found.med, found.bias, found.exact_pairs, found.symmetric) == (28.0, 3.5, 46, False)
    assert int(block.values.max()) == 239
    m4 = block.values[:16, :16].astype(np.int64)
    a, b = _pairs()
    parts = [(a >> i & 15, b >> j & 15, i + j) for i in (0, 4) for j in (0, 4)]
    whole = sum(m4[np.broadcast_to(x, (256, 256)), np.broadcast_to(y, (256, 256))] << shift
                for x, y, shift in parts)  # fmt: skip

    assert (named("ama5").values == whole).all()


def test_mitchell_and_drum_have_the_published_errors() -> None:
    mitchell, drum = (error_statistics(named(name)) for name in ("mitchell", "drum-6"))

    assert 0.037 < mitchell.mred < 0.039  # 3.8 %, and never too large
    assert mitchell.bias == -mitchell.med
    assert 0.012 < drum.mred < 0.015  # 1.47 % of 16-bit operands; short ones are exact more often
    assert (named("drum-8").values == named("exact").values).all()


def test_an_array_without_cells_lacks_just_these_partial_products() -> None:
    a, b = _pairs(signed=True)
    weights = [1, 2, 4, 8, 16, 32, 64, -128]
    lost = sum(
        weights[i] * weights[j] * (a >> i & 1) * (b >> j & 1)
        for i in range(8) for j in range(8) if (i + j < 3 or j < 2)
    )  # fmt: skip

    assert (named("bam-2-3-signed").values == a * b - lost).all()
    assert (named("bam-0-4").values == named("truncated-4").values).all()


@pytest.mark.parametrize("name", NAMES)
def test_every_listed_name_is_a_table_of_that_name(name: str) -> None:
    table = named(name)

    assert table.name == name
    assert (table.a_signed, table.b_signed) == (name.endswith("-signed"),) * 2
    assert not table.values.flags.writeable
    zero = 128 if table.a_signed else 0
    assert not table.values[zero].any()
    assert not table.values[:, zero].any()


def test_a_magnitudes_signed_table_is_odd_in_both_operands() -> None:
    for name in ("ama5-signed", "mitchell-signed", "drum-4-signed"):
        values = named(name).values[1:, 1:].astype(np.int64)

        assert (values == -values[::-1]).all()
        assert (values == -values[:, ::-1]).all()


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        ("mitchel", UnknownNameError, "mitchell"),
        ("truncated", UnknownNameError, "truncated-4"),
        ("truncated-16", TableError, "0 to 15"),
        ("bam-9-2", TableError, "0 to 8"),
        ("drum-2-signed", TableError, "3 to 8"),
    ],
)
def test_a_name_that_is_none_is_told_its_neighbours(name: str, error: Any, said: str) -> None:
    with pytest.raises(error) as caught:
        named(name)

    assert said in str(caught.value)
    assert caught.value.exit_code == ExitCode.USAGE


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (np.zeros((256, 255), np.int32), "shape [256, 255]"),
        (np.zeros(65536, np.int32), "shape [65536]"),
        (np.zeros((256, 256), np.float32), "float32"),
        (np.zeros((256, 256), bool), "bool"),
        (np.full((256, 256), 2**31, np.int64), "2147483648"),
        (np.full((256, 256), 2**63 + 5, np.uint64), "int32 does not hold"),
        (np.full((256, 256), -(2**31) - 1, np.int64), "-2147483649"),
    ],
)
def test_what_is_no_table_says_why(values: np.ndarray, said: str) -> None:
    with pytest.raises(TableError) as caught:
        make_table("mine", values, a_signed=False, b_signed=False, source="test")

    assert said in str(caught.value)


def test_a_table_keeps_its_own_copy_and_the_edges_of_int32() -> None:
    values = np.full((256, 256), -(2**31), np.int32)
    values[0, 0] = 2**31 - 1
    table = make_table("edges", values, a_signed=False, b_signed=True, source="test")
    values[:] = 0

    assert (int(table.values.min()), int(table.values.max())) == (-(2**31), 2**31 - 1)
    other = make_table("edges", table.values, a_signed=True, b_signed=True, source="test")
    assert other.sha256() != table.sha256()


def test_an_array_in_a_file_is_what_was_saved(tmp_path: Path) -> None:
    a, b = _pairs(signed=True)
    np.save(str(tmp_path / "mine.npy"), (a * b + 1).astype(">i2"))
    table = find_table(str(tmp_path / "mine.npy"), signed=True)

    assert (table.name, table.a_signed, table.source) == ("mine", True, "mine.npy")
    assert (table.values == a * b + 1).all()
    assert not find_table(str(tmp_path / "mine.npy")).a_signed


def test_a_file_that_is_no_array_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.npy").write_text("hello", encoding="utf-8")
    (tmp_path / "empty.npy").write_bytes(b"")
    np.save(str(tmp_path / "objects.npy"), np.array([[{}]], dtype=object), allow_pickle=True)

    for name in ("text.npy", "empty.npy", "objects.npy"):
        with pytest.raises(TableSourceError, match="cannot be read"):
            find_table(str(tmp_path / name))
    with pytest.raises(TableSourceError, match="is not there"):
        find_table(str(tmp_path / "none.npy"))


@pytest.mark.parametrize("function", ["mul8s_TEST", "old_style", "mixed"])
def test_c_gives_what_the_function_gives(source: Path, function: str) -> None:
    table = find_table(f"{source}:{function}")
    (a, _), (_, b) = _pairs(table.a_signed), _pairs(table.b_signed)
    expected = {"mul8s_TEST": a * (b & ~3), "old_style": a * b, "mixed": a * 3 + b}[function]
    signs = {"mul8s_TEST": (True, True), "old_style": (False, False), "mixed": (True, False)}

    assert (table.values == expected).all()
    assert (table.a_signed, table.b_signed) == signs[function]
    assert table.source == f"mul8s_TEST.c:{function}"


def test_the_function_called_as_the_file_is_taken(source: Path) -> None:
    assert find_table(str(source)).name == "mul8s_TEST"
    copied = source.with_name("other.c")
    copied.write_text("int f(int a, int b) { return a; }\nint g(int a, int b) { return b; }")
    with pytest.raises(TableSourceError, match="which function") as caught:
        find_table(str(copied))
    assert "f, g" in caught.value.why


def test_bits_in_unsigned_types_are_read_as_signed_where_asked(source: Path) -> None:
    table = from_c(source, "pattern", signed=True)
    a, b = _pairs(signed=True)

    assert (table.values == a * b).all()
    assert (find_table(f"{source}:mul8s_BITS").values == a * b).all()


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("crash", "killed by SIGSEGV"),
        ("leaves", "killed by SIG"),
        ("forever", "took more than 0.3 s"),
        ("not_this", "has no function 'not_this'"),
    ],
)
def test_c_that_goes_wrong_does_so_alone(source: Path, function: str, said: str) -> None:
    with pytest.raises(TableSourceError) as caught:
        run_c(source, function, None, seconds=0.3)

    assert said in str(caught.value)


def test_c_that_does_not_compile_shows_the_users_lines_alone(tmp_path: Path) -> None:
    path = tmp_path / "mul.c"
    path.write_text("int mul(int a, int b) {\n  return a * c;\n}\n", encoding="utf-8")
    with pytest.raises(TableSourceError, match="does not compile") as caught:
        find_table(str(path))

    assert "mul.c:2" in caught.value.why
    assert "products.c" not in caught.value.why


def test_without_a_compiler_that_is_said(source: Path) -> None:
    with pytest.raises(CompilerMissingError) as caught:
        run_c(source, "", None, env={"PATH": "/nonexistent"})

    assert caught.value.exit_code == ExitCode.TOOLCHAIN_MISSING


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("def f(a, b):\n    return a * b / 2", "no integer for (0, 0)"),
        ("def f(a, b):\n    return 1 // a", "ZeroDivisionError"),
        ("def g(a, b):\n    return 0", "has no function 'f'"),
        ("def f(a, b:\n", "SyntaxError"),
        ("import no_such_module", "cannot be imported"),
        ("def f(a, b):\n    return 2 ** 70", "64 bits do not hold"),
        ("def f(a, b):\n    return 2 ** 40", "int32 does not hold"),
    ],
)
def test_python_that_goes_wrong_says_how(tmp_path: Path, body: str, said: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(body, encoding="utf-8")
    with pytest.raises((TableSourceError, TableError)) as caught:
        find_table(f"{path}:f")

    assert said in str(caught.value)


def test_a_python_function_is_called_with_every_pair(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def f(a, b):\n    return (a * b) & ~1\n", encoding="utf-8")
    a, b = _pairs(signed=True)
    table = find_table(f"{path}:f", signed=True)

    assert (table.values == (a * b) & ~1).all()
    with pytest.raises(TableSourceError, match="many functions"):
        find_table(str(path))
    assert "narrowgauge_user_multiplier" not in sys.modules


def test_the_heat_map_is_the_mean_error_of_its_blocks() -> None:
    table = named("truncated-4")
    blocks = error_blocks(table)

    assert blocks.shape == (16, 16)
    assert float(blocks.mean()) == pytest.approx(error_statistics(table).med)
    first = np.abs(table.values - table.exact())[:16, :16].mean()
    assert float(blocks[0, 0]) == pytest.approx(float(first))


@pytest.mark.parametrize("name", ["exact", "ama5-4x4", "mitchell-signed"])
def test_a_picture_in_text_has_a_line_for_every_block(name: str) -> None:
    table = named(name)
    text = show_text(table, error_statistics(table))
    rows = [line for line in text.splitlines() if line.endswith("|") and line[6] == "|"]

    assert len(rows) == 16
    assert {len(line.partition("|")[2]) for line in rows} == {33}
    assert ("@" in text.partition("shades")[0]) == (name != "exact")


def test_the_list_has_a_line_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = list_text(
        [list_line(list_entry(named(name))) for name in ("ama5", "mitchell")]
    ).splitlines()

    assert lines[0].split()[:3] == ["multiplier", "structure", "terms"]
    assert lines[1].split()[:4] == ["ama5", "bilinear", "2", "0.9805"]
    assert lines[2].split()[:3] == ["mitchell", "none", "–"]


def test_a_difference_is_over_the_operands_that_there_are() -> None:
    a, b = _pairs()
    exact = named("exact")
    off = make_table("off", a * b + 5 * (a == b), a_signed=False, b_signed=False, source="test")
    found = difference(exact, off)

    assert found is not None
    assert (found.pairs, found.largest) == (256, 5)
    assert (found.share, found.mean) == (1 / 256, 5 / 256)
    assert difference(exact, exact) == Difference(0, 0.0, 0.0, 0)
    for other in ("exact-signed", "ama5-4x4"):
        assert difference(exact, named(other)) is None
        assert error_difference(exact, named(other)) is None
    block = difference(named("ama5-4x4"), named("ama5-4x4"))
    assert block is not None
    assert block.pairs == 0


def test_below_zero_the_second_is_nearer() -> None:
    cells = error_difference(named("truncated-6"), named("truncated-4"))

    assert cells is not None
    assert (cells < 0).all()
    assert float(cells.mean()) == pytest.approx(
        error_statistics(named("truncated-4")).med - error_statistics(named("truncated-6")).med
    )


def _compared(*names: str) -> Tuple[List[str], str]:
    one, other = map(named, names)
    text = comparison_text(
        (one, other),
        (error_statistics(one), error_statistics(other)),
        (analyse(one), analyse(other)),
    )
    return text.splitlines(), text


def test_two_side_by_side_share_lines_and_shades() -> None:
    lines, text = _compared("ama5", "truncated-4")
    rows = [line for line in lines if line.count("|") == 4]

    assert lines[0].split() == ["ama5", "truncated-4"]
    assert len(rows) == 16
    assert len({line.rindex("|") for line in rows}) == 1
    assert max(map(len, lines)) <= 80
    assert "their products differ at" in text
    # The second's errors are a sliver of the first's: nothing above the lightest shade.
    assert set("".join(line[41:] for line in rows)) <= set(" |.0123456789")
    assert "shades" in lines[-1]


def test_two_that_cannot_be_paired_or_do_not_differ_say_so() -> None:
    assert "not the same codes" in _compared("exact", "exact-signed")[1]
    assert "the same, at all pairs" in _compared("drum-8", "exact")[1]


def test_signs_of_a_file_are_what_was_asked(source: Path) -> None:
    def signed(asked: Optional[bool]) -> bool:
        return find_table(f"{source}:mul8s_TEST", signed=asked).a_signed

    assert [signed(None), signed(True), signed(False)] == [True, True, False]
