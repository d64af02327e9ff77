"""What is measured, against whom. Run as `python -m mtplab.bench`."""
