"""One file a reward, with a function ``reward``; the file's name is its name. Keyword-only parameters are options."""
