"""What a run did, on one page and in the terminal."""

from moestro.report.page import write_report
from moestro.report.summary import print_summary

__all__ = ["print_summary", "write_report"]
