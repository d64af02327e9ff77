"""A sweep on engines that serve, held against the same sweep here: texts, rounds, and what the engines count.

Run as `python -m mtplab.bench engines`; docs/engines.md says what it showed.
"""
