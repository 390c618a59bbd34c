"""The command line: parse arguments, call the library, print results.

In: command-line arguments.
Out: text, files, an exit code.
Imported by: `__main__`.
"""
