"""Packages: models compiled ahead of time, in one file that another process loads without a compiler.

``compilation.py`` writes them and imports the compiler. What loads them (``package.py``) imports the run time alone.
"""
