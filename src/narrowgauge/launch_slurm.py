"""Puts runs on a Slurm cluster together: what is checked before anything is sent, and the array."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from narrowgauge.catalog import load_experiment
from narrowgauge.checkout import git_facts
from narrowgauge.errors import UsageError
from narrowgauge.executors.slurm import Site, SlurmExecutor
from narrowgauge.launch import World, draw_quietly
from narrowgauge.plan import NATIVE, JobRequest, plan_jobs, read_request
from narrowgauge.progress import Reporter
from narrowgauge.recording import StartFacts
from narrowgauge.runner import (
    Session,
    StopRequest,
    attach,
    check_results,
    check_results_early,
    run_array,
    stop_signals,
)
from narrowgauge.selection import check_experiment
from narrowgauge.slurm.asking import SlurmAsk
from narrowgauge.slurm.image import convert, pick_tool
from narrowgauge.store import RunFolder, Store
from narrowgauge.targets import Target, load_targets, target_named
from narrowgauge_contract.job import Job
from narrowgauge_contract.record import MachineFacts, Record

__all__ = ["attach_slurm", "prepare_slurm", "run_request", "run_slurm", "target_of"]

#: Submissions (submitit's pickles and logs) lie beside the experiments' results.
_SUBMISSIONS = ".slurm"
#: Of a run that never came to a node: no machine is better than the launcher's.
_NO_MACHINE = MachineFacts("", "", "", "none: it never ran on a node", 0, 0)


def target_of(world: World, ask: SlurmAsk, on: str | None) -> Target | None:
    """The target that `--on` names, whose image runs on the nodes; None natively. Raises
    UnknownNameError, and UsageError where a target is named and no image of it is given."""
    if on is None:
        return None
    target = target_named(load_targets(world.checkout.targets_file), on)
    if ask.container == "none" or not ask.image:
        raise UsageError(
            f"--on {on}: without an image the lab runs natively, on no target",
            why="the record would name a target that never ran",
            next_step=f"narrowgauge images save {on} --out FILE where Docker is, then"
            " --slurm image=FILE here; or leave --on out",
        )
    return target


def prepare_slurm(
    world: World, ask: SlurmAsk, results: Path, lab_python: Path | None
) -> SlurmExecutor:
    """The executor for runs that are kept in `results`, everything that can be refused refused.

    Raises ClusterUnreachable, ClusterRefused, UnknownNameError, ToolchainMissing and what the image
    or the native environment may lack.
    """
    check_results_early(results)
    tool = pick_tool(ask.container, ask.image, world.env)
    SlurmExecutor(ask, world.env, world.say).prepare()
    image = convert(Path(ask.image).absolute(), tool, world.env, world.say) if tool else None
    python = None
    if image is None:
        from narrowgauge.environment import ensure_lab_python

        python = ensure_lab_python(world.checkout, world.host, world.env, world.say, lab_python)
    check_results(results)
    site = Site(
        source=world.checkout.source,
        submissions=results / _SUBMISSIONS,
        python=python,
        image=image,
        git=git_facts(world.checkout.root),
    )
    executor = SlurmExecutor(ask, world.env, world.say, site=site)
    executor.prepare()
    if not ask.exclusive:
        world.say("shared nodes were asked for: the figures will be indicative only")
    return executor


def run_request(
    world: World,
    request: JobRequest,
    ask: SlurmAsk,
    *,
    store: Store,
    data: Path,
    lab_python: Path | None,
    on: str | None,
    reporter: Reporter,
) -> tuple[int, list[tuple[RunFolder, Record]]]:
    """Run one experiment's jobs there: how many there were, and those that were recorded."""
    spec = load_experiment(world.checkout.experiments, request.experiment)
    target = target_of(world, ask, on)
    jobs = plan_jobs(spec, read_request(spec, request), target.name if target else NATIVE)
    if target is not None:  # natively the lab says it: this host's facts are not the nodes'
        check_experiment(spec, target, load_targets(world.checkout.targets_file), world.host)
    executor = prepare_slurm(world, ask, store.root, lab_python)
    stop = StopRequest()
    done = run_slurm(world, executor, jobs, store=store, data=data, reporter=reporter, stop=stop)
    return len(jobs), done


def run_slurm(
    world: World,
    executor: SlurmExecutor,
    jobs: Sequence[Job],
    *,
    store: Store,
    data: Path,
    reporter: Reporter,
    stop: StopRequest,
    finished: Callable[[RunFolder, Record], None] | None = None,
) -> list[tuple[RunFolder, Record]]:
    """Fetch the data, submit the jobs as one array, watch and record each in turn."""
    from narrowgauge_contract.data_commands import LAUNCHER
    from narrowgauge_data import ensure
    from narrowgauge_data.caller import Caller

    caller = Caller(world.say, world.env, LAUNCHER)
    for sets in dict.fromkeys(job.data_sets for job in jobs):
        ensure(sets, data, caller)
    session = _session(world, executor, store, data, reporter, stop)
    recorded = []
    with stop_signals(stop):
        for folder, record in run_array(jobs, executor, session):
            draw_quietly(folder, store, world.say)
            if finished is not None:
                finished(folder, record)
            recorded.append((folder, record))
    return recorded


def attach_slurm(world: World, folder: RunFolder, reporter: Reporter) -> Record:
    """Watch and record a run on the cluster whose launcher is gone."""
    store = Store(folder.path.parent.parent)
    stop = StopRequest()
    executor = SlurmExecutor(SlurmAsk(), world.env, world.say)
    with stop_signals(stop):
        session = _session(world, executor, store, folder.path, reporter, stop)
        record = attach(folder, session)
    draw_quietly(folder, store, world.say)
    return record


def _session(
    world: World,
    executor: SlurmExecutor,
    store: Store,
    data: Path,
    reporter: Reporter,
    stop: StopRequest,
) -> Session:
    def facts(engine: str | None) -> StartFacts:
        del engine
        return StartFacts(_NO_MACHINE, git_facts(world.checkout.root))

    return Session(
        executor=executor,
        store=store,
        experiments=world.checkout.experiments,
        data=data,
        start_facts=facts,
        reporter=reporter,
        stop=stop,
        elsewhere=True,
    )
