"""Matmuls and convolutions as calls of oneDNN with packed weights, and what is fused into these calls."""
