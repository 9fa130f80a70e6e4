"""Code generation, one package per target."""
