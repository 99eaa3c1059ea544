"""Claims against records: verdicts. Pure but for `gather`, which reads claims and records.

    model     what judging says, as data
    judging   one claim, its experiment's specification and records -> Judgement
    gather    a checkout and a results folder -> Judged

What the report, the bundle and `ae check` call:

    from narrowgauge.judge.gather import judge_stored, load_judged
    judge_stored(checkout, store, words=(), replay=False) -> Judged   reads and judges now
    judge_references(checkout, words=()) -> Judged                    its reference records
    load_judged(path) -> Judged                                       what `reproduce` wrote

`reproduce` and `kick` write what they judged to <results>/judged/<occasion>.json, and `latest.json`
beside it is a copy of the newest. `replay` prints and writes nothing unless told where.
"""
