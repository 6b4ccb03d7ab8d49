"""One file a reward, with a function ``reward``; the file's name is its name. Keyword-only parameters are options.

``check``, where a file has one, is given them all and raises RecipeError for what does not go together; ``prepare``
those that it takes, in the process that workers are forked from.
"""
