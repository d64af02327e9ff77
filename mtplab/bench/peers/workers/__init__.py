"""What runs inside each engine's own environment: one job in, as JSON on stdin, one result out, as a JSON file.

A job: `model`, `prompts` (lists of ids), `tokens` each, `depth`, `batch` (prompts at once), `threads`. A result:
`version`, `arithmetic`, `load` and `work` in seconds, `outputs` (ids of each prompt, where the job asks for `counts`)
and what the engine says of rounds, as it says it. Nothing of mtplab is imported here, but by `run_ours.py`.
"""
