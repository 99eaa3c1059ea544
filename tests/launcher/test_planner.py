"""The planner: from measured parts to a plan, its prediction, and other machines."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from statistics import median

import pytest
from planner_cases import LAYERS, SHAPES, Rates, costs, recorded, with_steps

from narrowgauge.errors import (
    BadValueError,
    DamagedRecordError,
    NotApplicableError,
    NoValidRow,
    UnknownNameError,
    UsageError,
)
from narrowgauge.placement_toml import plan_toml
from narrowgauge.planner.pipeline import Stages, pieces_of, through
from narrowgauge.planner.rates import Rates as Fitted
from narrowgauge.planner.rates import fitted
from narrowgauge.planner.report import make_report, report_json
from narrowgauge.planner.search import Asked, Found, Planner, plan_of, precisions_of
from narrowgauge.planner.source import costs_of
from narrowgauge.planner.whatif import HERE, Machine, Speed, changes_of, machine_of
from narrowgauge_contract.codec import dumps
from narrowgauge_contract.placement import PASSES, parse_plan, plan_document
from narrowgauge_contract.placement_costs import Costs, parse_costs
from narrowgauge_contract.placement_files import load_plan


def _devices(found: Found) -> dict[str, set[str]]:
    """By layer, where its passes are."""
    plan = plan_of(found)
    return {
        layer.name: {plan.placement(layer.name).of(name).device for name in PASSES}
        for layer in LAYERS
    }


def test_a_plan_has_the_operators_that_the_costs_are_of() -> None:
    """On a CPU; nobody measured the kernels' on an accelerator."""
    by_kernels = costs(elsewhere_by="kernels")
    on_cpu = plan_of(Planner(by_kernels).fastest(Asked("cpu")))
    on_gpu = plan_of(Planner(by_kernels).fastest(Asked("accelerator")))

    assert (on_cpu.elsewhere, on_cpu.elsewhere_by) == ("cpu", "kernels")
    assert (on_gpu.elsewhere, on_gpu.elsewhere_by) == ("accelerator", "torch")
    assert plan_of(Planner(costs()).fastest(Asked("cpu"))).elsewhere_by == "torch"
    assert parse_plan(plan_document(on_cpu), "x") == on_cpu


def test_costs_from_before_are_of_torchs_operators() -> None:
    made = json.loads(dumps(costs(elsewhere_by="kernels")))
    assert parse_costs(json.dumps(made), "x").elsewhere_by == "kernels"
    del made["elsewhere_by"]
    assert parse_costs(json.dumps(made), "x").elsewhere_by == "torch"


def test_the_costs_of_a_file_are_what_was_written() -> None:
    made = with_steps(costs(), cpu=0.01)

    assert parse_costs(dumps(made), "costs.json") == made


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "format 2"),
        ({"surprise": 1}, "unknown field 'surprise'"),
        ({"layers": []}, "no layers"),
        ({"batch": "32"}, "should be int"),
        ({"layers": [{"name": "a", "shape": 9, "input_grad": True}]}, "does not describe"),
        ({"steps": [{"plan": "cpu", "seconds": []}]}, "without samples"),
        ({"steps": [{"plan": "cpu", "seconds": ["NaN"]}]}, "no time"),
    ],
)
def test_costs_that_are_not_as_they_should_be_are_refused(
    change: dict[str, object], message: str
) -> None:
    document = {**json.loads(dumps(costs())), **change}

    with pytest.raises(DamagedRecordError, match=message):
        parse_costs(json.dumps(document), "costs.json")
    with pytest.raises(DamagedRecordError, match="not JSON"):
        parse_costs("{", "costs.json")


def test_a_fast_accelerator_behind_a_fast_bus_gets_the_large_layers() -> None:
    found = Planner(costs(Rates(bus=1e12, accelerator=1e14))).fastest(Asked())

    devices = _devices(found)
    assert devices["blocks.0.conv"] == devices["blocks.1.conv"] == {"accelerator"}
    assert found.variant.wire == "fp32"


def test_behind_a_slow_bus_everything_stays_on_the_cpu() -> None:
    found = Planner(costs(Rates(bus=1e8))).fastest(Asked())

    assert set().union(*_devices(found).values()) == {"cpu"}
    assert found.predicted.busy["up"] == found.predicted.bytes == 0


def test_a_free_choice_moves_everything_where_it_is_faster() -> None:
    planner = Planner(costs())
    free, cpu, gpu = (planner.fastest(Asked(place)) for place in ("free", "cpu", "accelerator"))

    assert free.variant.elsewhere == "accelerator"
    assert free.predicted == gpu.predicted
    assert free.predicted.seconds < cpu.predicted.seconds


def test_a_shorter_wire_is_taken_only_where_its_precision_is_allowed() -> None:
    planner = Planner(costs(Rates(bus=2e9), precisions=("fp32", "int8")))
    strict, loose = (planner.fastest(Asked("cpu", each)) for each in (("fp32",), ("fp32", "int8")))

    assert strict.variant.wire == "fp32"
    assert loose.variant.wire == "int8"
    assert "int8" in plan_of(loose).precisions()
    assert "int8" not in plan_of(strict).precisions()
    assert loose.predicted.seconds < strict.predicted.seconds


def test_what_whole_steps_took_longer_is_predicted_too() -> None:
    parts = Planner(with_steps(costs(), cpu=1.0, hetero_fp32=1.0))
    cpu, hetero = (parts.step_of(name) for name in ("cpu", "hetero-fp32"))
    planner = Planner(with_steps(costs(), cpu=cpu + 1e-3, hetero_fp32=hetero + 1e-3 + 11e-5))

    unmodelled = planner.unmodelled(planner.fastest(Asked()).variant)

    assert unmodelled.step == pytest.approx(1e-3)
    assert unmodelled.per_pass == pytest.approx(1e-5)  # three layers of three passes, one of two
    bare = Planner(costs()).fastest(Asked()).predicted.seconds
    assert planner.fastest(Asked()).predicted.seconds > bare + 1e-3


def test_no_processor_is_busy_for_longer_than_the_step() -> None:
    """Where whole steps over the bus take less than their parts."""
    rates = Rates(bus=1e12, accelerator=1e14, call=1e-4)
    parts = Planner(with_steps(costs(rates), cpu=1.0, hetero_fp32=1.0))
    cpu, hetero = (parts.step_of(name) for name in ("cpu", "hetero-fp32"))
    as_parts, shorter = (
        Planner(with_steps(costs(rates), cpu=cpu, hetero_fp32=hetero - less))
        .fastest(Asked("cpu"))
        .predicted
        for less in (0.0, 11 * 8e-5)
    )

    assert shorter.busy["cpu"] <= shorter.seconds
    assert shorter.busy["cpu"] < as_parts.busy["cpu"]


def test_a_plan_of_the_planner_reads_back_from_its_toml(tmp_path: Path) -> None:
    found = Planner(costs(Rates(bus=1e12), precisions=("fp32", "bf16"))).fastest(
        Asked("cpu", ("fp32", "bf16"))
    )
    plan = plan_of(found, "mine")
    path = tmp_path / "mine.toml"
    path.write_text(plan_toml(plan))

    assert load_plan(path) == plan
    assert parse_plan(plan_document(plan), "again") == plan
    for group in found.instance.groups:
        for layer in group.layers:
            decision = found.decisions[layer]
            for name, choice in decision.choices.items():
                placed = plan.placement(layer).of(name)
                assert (placed.device, placed.precision) == (choice.device, choice.precision)


def test_too_little_memory_is_named_with_what_would_do() -> None:
    planner = Planner(costs())

    with pytest.raises(NotApplicableError, match=r"--memory 0.01 .* no plan fits") as caught:
        planner.fastest(Asked("accelerator", memory=1e7))
    assert "0.05 GB" in caught.value.why
    limited = planner.fastest(Asked("free", memory=1e7))
    assert limited.predicted.bytes <= 1e7


def test_with_less_memory_inputs_are_sent_again() -> None:
    planner = Planner(costs(Rates(bus=1e12, accelerator=1e14)))
    roomy = planner.fastest(Asked("cpu", memory=1e9))
    tight = planner.fastest(Asked("cpu", memory=roomy.predicted.bytes - 1000))

    assert roomy.variant.resident
    assert tight.predicted.bytes < roomy.predicted.bytes
    assert tight.predicted.seconds > roomy.predicted.seconds


def test_a_precision_that_a_layer_does_not_have_is_named() -> None:
    with pytest.raises(NotApplicableError, match=r"--precision int8 .* layer 'conv1'") as caught:
        Planner(costs()).fastest(Asked("cpu", ("int8",)))
    assert "11 passes" in caught.value.why


def test_one_memory_takes_the_bus_away() -> None:
    planner = Planner(costs(Rates(bus=1e9)))
    here, there = planner.fastest(Asked()), planner.fastest(Asked(), Machine(coherent=True))

    assert there.predicted.seconds < here.predicted.seconds
    assert there.predicted.busy["up"] == there.predicted.busy["down"] == 0
    assert _devices(there)["blocks.0.conv"] == {"accelerator"}


@pytest.mark.parametrize("change", ["bus=2x", "coherent=yes", "accelerator=2x", "cpu=2x"])
def test_a_better_machine_is_never_slower(change: str) -> None:
    planner = Planner(costs(precisions=("fp32", "bf16")))
    for place in ("cpu", "accelerator"):
        asked = Asked(place, ("fp32", "bf16"))
        here = planner.fastest(asked).predicted.seconds
        there = planner.fastest(asked, machine_of([change])).predicted.seconds
        assert there <= here * (1 + 1e-9)


def test_a_cpu_twice_as_fast_halves_what_only_it_does() -> None:
    planner = Planner(costs(Rates(bus=1e8)))  # all stays on the CPU

    here = planner.fastest(Asked()).predicted.seconds
    there = planner.fastest(Asked(), Machine(cpu=2.0)).predicted.seconds

    assert there == pytest.approx(here / 2)


def test_launches_that_cost_nothing_leave_the_accelerator_its_own_time() -> None:
    slow = Rates(launch=1e-3)
    planner = Planner(costs(slow))

    there = planner.fastest(Asked("accelerator"), Machine(latency=0.0)).predicted

    assert planner.fastest(Asked("accelerator")).predicted.binding == "chain"
    assert there.binding == "accelerator"
    assert there.seconds == pytest.approx(there.busy["accelerator"])


def test_changes_are_read_with_their_units() -> None:
    words = changes_of("bus=64GB/s, coherent=yes,accelerator=4x,cpu=2x,latency=2us")

    assert machine_of(words) == Machine(Speed(per_second=64e9), True, 4.0, 2.0, 2e-6)
    assert changes_of("") == ()
    assert machine_of(()) == HERE


@pytest.mark.parametrize(
    "text",
    ["bus=64", "bus=0x", "coherent=maybe", "cpu=fast", "latency=2", "cpu", "cpu=2x,cpu=3x",
     "accelerator=64GB/s", "bus=1.2.3x"],
)  # fmt: skip
def test_a_change_that_says_nothing_is_refused(text: str) -> None:
    with pytest.raises(BadValueError):
        changes_of(text)


def test_an_unknown_change_or_precision_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'coherent'"):
        changes_of("coherant=yes")
    with pytest.raises(UnknownNameError, match="did you mean 'bf16'"):
        precisions_of("fp32,bf61")
    with pytest.raises(UsageError, match="names none"):
        precisions_of(",")
    assert precisions_of("int8, fp32") == ("fp32", "int8")


def test_a_line_is_fitted_without_negative_parts() -> None:
    exact = fitted([(size, 5e-6 + size * 1e-10) for size in (1e3, 1e5, 1e7)])
    bent = fitted([(1e3, 1e-6), (1e6, 1e-4), (1e7, 2e-3)])

    assert exact.start == pytest.approx(5e-6)
    assert exact.per_unit == pytest.approx(1e-10)
    assert bent.start >= 0
    assert bent.per_unit > 0


def test_copies_follow_the_bus_and_one_memory_has_none() -> None:
    made = costs()
    here, twice = Fitted(made, HERE), Fitted(made, machine_of(["bus=2x"]))
    rate = Fitted(made, machine_of(["bus=64GB/s", "latency=1us"]))

    assert here.copy("overlapped", "up", 1 << 20) == pytest.approx(5e-6 + (1 << 20) / 2e10)
    assert twice.copy("overlapped", "up", 1 << 20) == pytest.approx(5e-6 + (1 << 20) / 4e10)
    assert rate.copy("overlapped", "down", 1 << 20) == pytest.approx(1e-6 + (1 << 20) / 64e9)
    assert Fitted(made, Machine(coherent=True)).copy("overlapped", "up", 1 << 20) == 0


def test_where_tensors_are_not_page_locked_they_are_copied_aside() -> None:
    locked, staged = (Fitted(costs(page_locked=each), HERE) for each in
                      ("all CPU tensors", "torch's pool"))  # fmt: skip

    assert locked.conversion("cpu", "pack", "fp32", 1 << 20) == 0
    assert staged.conversion("cpu", "pack", "fp32", 1 << 20) > 0
    assert staged.conversion("cpu", "unpack", "fp32", 1 << 20) == 0


def test_pieces_overlap_on_three_lanes() -> None:
    stages = Stages(pack=0.0, fill=0.0, up=1.0, product=1.0, down=1.0, unpack=0.0)

    assert through(stages, 1, serial=False) == 3.0
    assert through(stages, 4, serial=False) == 6.0
    assert through(stages, 4, serial=True) == 12.0
    slow = dataclasses.replace(stages, product=3.0)
    assert through(slow, 4, serial=False) == 1.0 + 4 * 3.0 + 1.0
    host = dataclasses.replace(stages, fill=2.0, unpack=2.0, pack=1.0)
    # The last piece is filled at 9 and down at 12; three are unpacked by then but one.
    assert through(host, 4, serial=False) == 17.0
    assert pieces_of(32, 8 << 20, 1 << 20, 8) == 8
    assert pieces_of(4, 8 << 20, 1 << 20, 8) == 4
    assert pieces_of(32, 1 << 10, 1 << 20, 8) == 1


def test_a_stand_in_does_everything_itself() -> None:
    found = Planner(costs(stand_in=True)).fastest(Asked())

    assert found.predicted.binding == "chain"


def test_the_report_ranks_what_would_help() -> None:
    made = with_steps(costs(Rates(bus=1e8)), cpu=0.01)
    report = make_report(made, Asked(), ("bus=100x", "coherent=yes"), "mine")
    document = report_json(report)

    assert [change.text for change in report.changes] == [
        "bus=100x", "coherent=yes", "bus=100x,coherent=yes",
    ]  # fmt: skip
    seconds = [change.seconds for change in report.ranking]
    assert seconds == sorted(seconds)
    assert {change.text for change in report.ranking} >= {"cpu=2x", "latency=0us"}
    assert report.binding == "cpu"
    assert report.doubtful == ("cpu",)
    right = with_steps(made, cpu=Planner(made).step_of("cpu"))
    assert make_report(right, Asked(), (), "mine").doubtful == ()
    assert [line.layer for line in report.lines] == [layer.name for layer in LAYERS]
    assert set(report.lines[0].alone) == {"cpu", "accelerator"}
    assert document["predicted_step"] == report.found.predicted.seconds
    assert parse_plan(document["plan"], "report") == report.plan
    assert json.loads(json.dumps(document)) is not None


def test_the_costs_of_a_run_are_found_by_its_row(tmp_path: Path) -> None:
    made = costs()
    one = recorded(tmp_path / "one", made)
    two = recorded(tmp_path / "two", made, dataclasses.replace(made, network="other"))

    assert costs_of(one)[0] == made
    assert costs_of(two, 1)[0].network == "other"
    with pytest.raises(UsageError, match="several steps") as caught:
        costs_of(two)
    assert "--row 1 (resnet20" in caught.value.next_step
    with pytest.raises(UsageError, match="no costs in row 7"):
        costs_of(one, 7)


def test_costs_of_several_processes_count_alike(tmp_path: Path) -> None:
    made = with_steps(costs(), cpu=0.010)
    (step,) = made.steps
    slow = dataclasses.replace(
        made,
        steps=(dataclasses.replace(step, seconds=(0.016,) * 9),),
        products=tuple(
            dataclasses.replace(each, seconds=(1.0, 2.0, 6.0)) for each in made.products
        ),
        copies=made.copies[1:],
    )
    folder = recorded(tmp_path / "run", made, slow, made, made, made, slow, profile="paper")
    found, rows = costs_of(folder)

    assert [row.index for row in rows] == list(range(6))
    assert found.steps[0].seconds == (0.010, 0.016, 0.010, 0.010, 0.010, 0.016)
    assert [each.seconds[1] for each in found.products] == [2.0] * len(made.products)
    assert found.products[0].seconds[0] == median(made.products[0].seconds)
    assert sorted(len(each.seconds) for each in found.copies) == [4] + [6] * len(slow.copies)
    assert found.layers == made.layers
    assert Planner(found).measured["cpu"] == 0.010
    assert costs_of(recorded(tmp_path / "one", made))[0] == made


def test_a_run_without_usable_costs_says_why(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no costs"):
        costs_of(recorded(tmp_path / "none"))
    with pytest.raises(NoValidRow, match="may be used") as caught:
        costs_of(recorded(tmp_path / "invalid", costs(), valid=False))
    assert "held back" in caught.value.why
    with pytest.raises(DamagedRecordError, match="was changed"):
        costs_of(recorded(tmp_path / "spoilt", costs(), spoilt=True))


def test_every_shape_here_is_of_a_layer() -> None:
    made: Costs = costs()

    assert {layer.shape for layer in made.layers} == set(range(len(SHAPES)))
