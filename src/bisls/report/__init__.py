"""From outcomes to plots, one HTML page and one Markdown page. Nothing is run here."""

from bisls.report.files import ReportError as ReportError
from bisls.report.files import read_outcomes as read_outcomes
from bisls.report.markdown import markdown_table as markdown_table
from bisls.report.markdown import write_markdown as write_markdown
from bisls.report.page import write_report as write_report
from bisls.report.summary import EMPTY as EMPTY
from bisls.report.summary import Count as Count
from bisls.report.summary import count as count
