"""Other engines on the bundled model: how long a depth sweep takes them, and whether their acceptance is ours.

Run as `python -m mtplab.bench peers`; docs/peers.md says what is compared and what it showed.
"""
