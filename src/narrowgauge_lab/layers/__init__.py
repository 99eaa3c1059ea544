"""Layers whose products run where, and at the precision that, they are told to."""
