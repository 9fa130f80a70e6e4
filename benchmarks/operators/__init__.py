"""Every operator of torch's database, and programs of a few, in several layouts: kiln against eager.

``cells.py`` says what is measured, ``programs.py`` and ``database.py`` what there is to measure,
``layouts.py`` how inputs lie in memory. ``measure.py`` compiles and times one cell, in the process ``worker.py``;
``campaign.py`` goes through the cells, ``records.py`` keeps the figures, ``judge.py`` compares and ``page.py`` shows.
"""
