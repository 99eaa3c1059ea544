"""Policies and gradients as text."""

from __future__ import annotations

import pytest

from narrowgauge_contract.errors import BadValueError, UnknownNameError
from narrowgauge_lab.layers.manual.policies import (
    NAMES,
    Gradient,
    Policy,
    parse_gradient,
    parse_policy,
)


class TestPolicies:
    @pytest.mark.parametrize(
        "text",
        ["exact_fp32", "exact_int8", "axfpm", "axfpm_fixed", "axbf16", "mitchell", "truncated(7)",
         "lut8x8:ama5", "lut8x8:/a/b c.npy", "lut8x8:mac.c:mul(8)", "custom:/x/mac.h",
         "lut8x8:t.npy,signed", "lut8x8:m.py:f,unsigned"],
    )  # fmt: skip
    def test_text_and_value_are_one(self, text: str) -> None:
        assert str(parse_policy(text)) == text
        assert parse_policy(str(parse_policy(text))) == parse_policy(text)

    def test_every_name_is_a_policy(self) -> None:
        extra = {"truncated": "(3)", "lut8x8": ":ama5", "custom": ":f.h"}

        assert [parse_policy(name + extra.get(name, "")).name for name in NAMES] == list(NAMES)

    def test_a_synonym_is_the_same_policy(self) -> None:
        assert parse_policy("axfpm_faithful") == Policy("axfpm")

    def test_operands_are_codes_of_two(self) -> None:
        policies = [Policy("exact_int8"), Policy("lut8x8", source="ama5"), Policy("mitchell")]

        assert [policy.eight_bit for policy in policies] == [True, True, False]

    @pytest.mark.parametrize(
        ("text", "near"),
        [("mitchel", "mitchell"), ("axfpm_fixd", "axfpm_fixed"), ("lut8x9:ama5", "lut8x8"),
         ("exact_int(8)", "exact_int8")],
    )  # fmt: skip
    def test_an_unknown_name_is_told_the_nearest(self, text: str, near: str) -> None:
        with pytest.raises(UnknownNameError) as caught:
            parse_policy(text)

        assert caught.value.nearest == near

    @pytest.mark.parametrize(
        "text",
        ["truncated", "truncated(0)", "truncated(24)", "truncated(x)", "truncated()",
         "truncated(-1)", "mitchell(3)", "mitchell(0)", "lut8x8", "lut8x8:", "custom",
         "exact_fp32:ama5", "truncated:ama5", "truncated(3", "truncated(3)4",
         "lut8x8:ama5,signed"],
    )  # fmt: skip
    def test_what_a_name_does_not_take_is_refused(self, text: str) -> None:
        with pytest.raises(BadValueError):
            parse_policy(text)


class TestGradients:
    @pytest.mark.parametrize("text", ["straight-through", "local", "local(8)"])
    def test_text_and_value_are_one(self, text: str) -> None:
        assert str(parse_gradient(text)) == text

    def test_local_is_over_one_code_unless_told(self) -> None:
        assert parse_gradient("local") == Gradient("local", 1)

    @pytest.mark.parametrize("text", ["local(0)", "local(128)", "straight-through(2)", "local:2"])
    def test_what_it_does_not_take_is_refused(self, text: str) -> None:
        with pytest.raises(BadValueError):
            parse_gradient(text)

    def test_an_unknown_one_is_told_the_nearest(self) -> None:
        with pytest.raises(UnknownNameError) as caught:
            parse_gradient("straight_through")

        assert caught.value.nearest == "straight-through"
