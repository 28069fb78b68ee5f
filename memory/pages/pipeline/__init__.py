"""The page of a pipeline's schedules: records of memory/pipeline in, HTML text out; start at schedule.py."""
