"""What was judged, for people: one view of it, written in five formats.

    text      texts of records, which anybody can have written, made inert for each format
    words     figures and expectations as a reader wants them
    cards     what a report says of one run
    content   Judged and cards -> Report, which every format shows
    picture   the paper's figure beside ours, as SVG
    html, markdown, latex, tabular    Report -> text

The same judgements and records give the same bytes: no clock, no random ids.
"""
