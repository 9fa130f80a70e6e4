"""The process and the machine: LLVM, the loader of object code, symbols, and what processor and BLAS offer.

Nothing here knows of graphs or kernels. Code generation compiles through this package, the run time loads through it.
"""
