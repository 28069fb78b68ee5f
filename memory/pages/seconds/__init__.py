"""Pages about seconds: predictions beside what was measured.

In: the JSON of a validation (`validation.result.Result.to_json`). Out: the text of a page. Start at `validation`.
"""
