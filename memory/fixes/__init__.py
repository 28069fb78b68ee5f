"""Proposes changes to a user's source files for the problems of a report, compiles them, and writes them as a patch.

In: a report with its findings and audit, and the files of the user's program. Out: proposals with the bytes of the
changed program. Start at `proposals.py`. `source_edits.py` changes source text at positions that Python's parser gives,
and `patched_program.py` compiles and runs a program from changed source files that are not written to disk.
`equal_results.py` runs two versions at small sizes and compares their results.
"""
