"""Draw pipeline timelines as SVG, text and Perfetto traces.

In: tasks with their times, predicted or measured.
Out: pictures and files.
Imported by: report, api, cli.
"""
