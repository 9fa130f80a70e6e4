"""The report: a recording as one HTML file that needs no server and no network.

``data.py`` packs the recording, ``js/`` and ``report.css`` are the page, ``vendor/`` holds the graph layout library
(`make report-assets`).
"""

from __future__ import annotations

from torchkiln.debug.report.page import report_page

__all__ = ["report_page"]
