"""``kiln bench``: models and functions, compiled by several backends, timed side by side.

``cells.py`` says what is measured, ``entries/`` what there is to measure, ``backends.py`` by what; ``worker.py`` is the
process of one backend, ``process.py`` says how one is spoken to, ``interleave.py`` runs those of one cell in turns,
``load.py`` says what else the machine did meanwhile, ``records.py`` keeps the figures, ``summary.py`` and
``targets.py`` judge them, and ``table.py``, ``plot.py``, ``html_plot.py`` and ``page.py`` show them. ``profile.py``
says where a step's time goes.
"""
