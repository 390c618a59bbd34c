"""The report as one HTML page that needs nothing but a browser.

In: the rows of a report.
Out: HTML.
Imported by: report, api, cli.
"""
