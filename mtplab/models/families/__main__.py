"""`python -m mtplab.models.families`: the families that are run, as README's table.

Knows only what each says of itself.
"""

from mtplab.models.families.family import as_markdown

if __name__ == "__main__":
    print(as_markdown())
