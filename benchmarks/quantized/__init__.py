"""Quantized models: kiln beside inductor with frozen weights, and the float model."""
