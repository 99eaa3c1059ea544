#!/bin/sh
# Starts the lab: `run …` and `facts` are its commands.
exec python3 -m narrowgauge_lab "$@"
