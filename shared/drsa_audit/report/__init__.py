"""The report: one HTML file that holds everything it shows."""

from .page import render, write_report
from .verdict import Verdict, make_verdict

__all__ = ["Verdict", "make_verdict", "render", "write_report"]
