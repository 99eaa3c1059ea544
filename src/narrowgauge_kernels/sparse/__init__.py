"""Convolutions on a GPU that skip the zeros of their input: generated, compiled and launched here.

`shapes` says what is computed and how; `geometry` derives sizes and refuses what does not fit;
`generate` writes the CUDA source; `compiling` makes machine code of it; `launching` runs it on
torch's tensors; `tuning` finds the fastest tile on the device at hand. Importing these imports no
torch and needs no GPU.
"""
