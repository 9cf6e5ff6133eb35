"""The report of a run: one self-contained HTML file that a person wants to look at.

It promises to come out for every run folder, also of a failed, cancelled or unfinished run and with pieces missing or
damaged; what could not be read is said in the report. It loads nothing from elsewhere, and nothing that a run wrote can
become markup.
"""

from gkr.report.document import build

__all__ = ["build"]
