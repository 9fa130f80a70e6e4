"""A model of several files, for the map from kernels to lines. Tests find lines by the remarks at their ends."""
