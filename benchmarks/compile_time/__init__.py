"""How long compiling takes: the first call beside other backends, and each stage of ours beside those of torch."""
