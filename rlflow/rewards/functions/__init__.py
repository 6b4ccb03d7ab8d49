"""The built-in rewards: one file each, named as in a recipe, with a function ``reward``.

Keyword-only parameters of ``reward`` are its options. A file may also have

- ``check``, which receives all options and raises RecipeError for invalid combinations;
- ``check_row``, which returns a Failure for a row that it cannot judge any response to;
- ``prepare``, which runs once in the fork server.

The last two receive the options that they have parameters for.
"""
