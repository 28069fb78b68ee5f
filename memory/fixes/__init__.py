"""Proposes changes to a user's source files for the problems in a report, compiles them, and prints them as a patch.

Input: a report with its findings and its audit, and the source files of the user's program. Output: proposed changes,
with the bytes of the changed program. Start at `proposals.py`. `source_edits.py` changes source text at positions that
Python's parser gives. `patched_program.py` compiles a program from changed source text that is not written to disk.
`equal_results.py` checks that a change does not change the results.
"""
