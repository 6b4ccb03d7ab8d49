"""Private names of the libraries below rlflow: a file for each library, which breaks first when it is upgraded.

Each file imports its library when a function is called. ``tests/contract/test_compat.py`` checks the names.
"""
