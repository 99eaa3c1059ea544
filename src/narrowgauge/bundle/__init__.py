"""Bundles: everything that somebody elsewhere needs to check the verdicts, in one sealed file."""
