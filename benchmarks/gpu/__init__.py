"""Models and kernels on an NVIDIA card: eager, inductor and kiln side by side."""
