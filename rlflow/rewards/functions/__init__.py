"""The built-in rewards: one file each, named as in a recipe, with a function ``reward``.

Keyword-only parameters of ``reward`` are its options. A file may also have ``check``, which receives all options and
raises RecipeError for invalid combinations, and ``prepare``, which runs once in the fork server and receives the
options that it has parameters for.
"""
