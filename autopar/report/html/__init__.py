"""Write a report as one self-contained HTML page.

In: the rows of a report.
Out: HTML.
Imported by: report, api, cli.
"""
