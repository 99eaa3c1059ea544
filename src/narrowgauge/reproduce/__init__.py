"""From claims to verdicts: which runs they need, in which order; running them; judging.

needs      the settings that claims need, each once. Pure
planning   needs, a host and a budget -> a plan, with what is left out and why. Pure
journal    a plan and what became of its steps, on disk, safe against a kill anywhere
carrying   runs the steps through the launcher
conclude   judges what the steps measured, and keeps that
show       a plan, and verdicts, for people
"""
