"""The launcher: plans, builds, runs, records, draws and judges. Never imports torch."""
