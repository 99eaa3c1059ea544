"""What a hardened container still lets its user do: compile and call code of one's own."""

from __future__ import annotations

import os

from harness import Program, facts_in


def test_a_functor_of_ones_own_is_compiled_and_called(program: Program) -> None:
    """One C++ file, the image's g++, no CUDA, nothing of ours."""
    program.run("probe", "-p", "act=functor")

    assert facts_in(program.record())["product"] == (100 & ~15) * (200 & ~15)


def test_an_extension_of_torch_is_built_and_imported(program: Program) -> None:
    """It takes ninja, Python's headers, and a cache that may be executed from."""
    program.run("probe", "-p", "act=extension")
    facts = facts_in(program.record())

    assert facts["twice"] == [2.0, 2.0]
    assert facts["built_in"].startswith("/cache/")


def test_what_a_run_leaves_belongs_to_the_caller(program: Program) -> None:
    program.run("probe")

    made = [program.results, *program.results.rglob("*")]
    assert len(made) > 5
    assert {(path.lstat().st_uid, path.lstat().st_gid) for path in made} == {
        (os.getuid(), os.getgid())
    }
